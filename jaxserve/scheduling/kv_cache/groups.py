"""KVGroups: layer groups that have KV pages of their own, within one page id space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

RELEASED = -1  # page id after a sequence has released a page that no later token sees
_AHEAD = 4  # maximum tokens by which plans in flight run ahead of tokens known to be computed


@dataclass(frozen=True)
class KVGroups:
    """Groups with the same number of layers each, so that a page has the same size in every group.

    A block (`page_size` tokens) takes one page in every group. A sequence keeps their ids in one list, block by block.
    A sliding-window group needs only the blocks within the window: earlier entries are RELEASED, and their pages
    reused. If windows differ, all sliding groups keep the largest one.

    Attributes:
        page_size: tokens per page.
        windows: sliding window per group in tokens; None for full attention.
        num_snapshots: maximum state snapshots for recurrent layers; None without such layers.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    num_snapshots: int | None = None

    @cached_property
    def size(self) -> int:
        """Number of groups, and pages per block."""
        return len(self.windows)

    @cached_property
    def sliding(self) -> tuple[int, ...]:
        """Indices of the groups with a sliding window."""
        return tuple(group for group, window in enumerate(self.windows) if window is not None)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Indices of the groups with full attention."""
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    @cached_property
    def max_window(self) -> int:
        """Largest sliding window in tokens; there must be one."""
        return max(window for window in self.windows if window is not None)

    @cached_property
    def num_window_blocks(self) -> int:
        """Maximum earlier blocks that a window reaches from a block's first token."""
        return -(-(self.max_window - 1) // self.page_size)

    @cached_property
    def num_held_blocks(self) -> int:
        """Maximum blocks that a sequence holds in a sliding group if it is computed a page at a time."""
        return -(-(self.max_window - 1 + _AHEAD) // self.page_size) + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.page_size)

    def num_pages(self, num_tokens: int) -> int:
        """Return the maximum pages that a sequence of `num_tokens` holds if it is computed a page at a time."""
        num_blocks = self.num_blocks(num_tokens)
        if not self.sliding:
            return num_blocks * self.size
        return num_blocks * len(self.full) + min(num_blocks, self.num_held_blocks) * len(self.sliding)

    def max_tokens(self, num_pages: int) -> int | None:
        """Return the maximum number of tokens in a sequence with `num_pages` pages; None if any length fits."""
        num_blocks = num_pages // self.size
        if self.sliding and num_blocks >= self.num_held_blocks:
            if not self.full:
                return None
            num_blocks = (num_pages - self.num_held_blocks * len(self.sliding)) // len(self.full)
        return num_blocks * self.page_size

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that a window reaches from the token after the first `num_tokens`."""
        return max(num_tokens - self.max_window + 1, 0) // self.page_size
