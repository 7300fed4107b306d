"""KVGroups: layers whose keys and values have pages of their own, over one space of page ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

RELEASED = -1  # entry of a page that no later token sees, and that the sequence has released
_AHEAD = 4  # tokens that plans in flight may be ahead of what is known to be computed


@dataclass(frozen=True)
class KVGroups:
    """Groups of equally many layers, so that all pages have the same bytes whichever group they serve.

    For each `page_size` tokens, a block, a sequence has a page in every group. It keeps their ids in one list, block
    by block. A group of sliding-window layers needs only the blocks that a window reaches: the entries of earlier
    ones are RELEASED, and their pages belong to others. If windows differ, all of these groups keep what the largest
    reaches.

    Attributes:
        page_size: tokens per page.
        windows: sliding window of each group's layers in tokens; None for full attention.
        num_snapshots: most snapshots of the state of layers without attention; None where there are no such layers.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    num_snapshots: int | None = None

    @cached_property
    def size(self) -> int:
        """Number of groups, and of pages in a block."""
        return len(self.windows)

    @cached_property
    def sliding(self) -> tuple[int, ...]:
        """Groups with a window."""
        return tuple(group for group, window in enumerate(self.windows) if window is not None)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Groups without a window."""
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    @cached_property
    def num_window_blocks(self) -> int:
        """Earlier blocks that a window may reach from a token that begins a block."""
        return -(-(max(window for window in self.windows if window is not None) - 1) // self.page_size)

    @cached_property
    def num_held_blocks(self) -> int:
        """Most blocks of a sliding group that a sequence holds, if it is computed a page at a time."""
        window = max(window for window in self.windows if window is not None)
        return -(-(window - 1 + _AHEAD) // self.page_size) + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of so many tokens."""
        return -(-num_tokens // self.page_size)

    def num_pages(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of so many tokens holds, if it is computed a page at a time."""
        num_blocks = self.num_blocks(num_tokens)
        if not self.sliding:
            return num_blocks * self.size
        return num_blocks * len(self.full) + min(num_blocks, self.num_held_blocks) * len(self.sliding)

    def max_tokens(self, num_pages: int) -> int | None:
        """Return the tokens of the longest sequence that fits so many pages; None if any length fits."""
        num_blocks = num_pages // self.size
        if self.sliding and num_blocks >= self.num_held_blocks:
            if not self.full:
                return None
            num_blocks = (num_pages - self.num_held_blocks * len(self.sliding)) // len(self.full)
        return num_blocks * self.page_size

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that a window reaches from the token behind the first `num_tokens`."""
        window = max(window for window in self.windows if window is not None)
        return max(num_tokens - window + 1, 0) // self.page_size
