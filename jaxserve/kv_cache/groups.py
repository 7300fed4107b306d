"""KVGroups: layers whose keys and values have pages of their own, over one space of page ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

RELEASED = -1  # entry of a page that no later token sees, and that the sequence has released
_AHEAD = 4  # tokens that plans in flight may be ahead of what is known to be computed


@dataclass(frozen=True)
class KVGroups:
    """Groups of equally many layers, so that all pages have the same bytes whichever group they serve.

    For each `page_size` tokens, a column, a sequence has a page in every group. It keeps their ids in one list, column
    by column. A group of sliding-window layers needs only the columns that a window reaches: the entries of earlier
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
        """Number of groups, and of pages in a column."""
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
    def num_window_columns(self) -> int:
        """Earlier columns that a window may reach from a token that begins a column."""
        return -(-(max(window for window in self.windows if window is not None) - 1) // self.page_size)

    @cached_property
    def num_held_columns(self) -> int:
        """Most columns of a sliding group that a sequence holds, if it is computed a page at a time."""
        window = max(window for window in self.windows if window is not None)
        return -(-(window - 1 + _AHEAD) // self.page_size) + 1

    def num_columns(self, num_tokens: int) -> int:
        """Return the columns of so many tokens."""
        return -(-num_tokens // self.page_size)

    def num_pages(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of so many tokens holds, if it is computed a page at a time."""
        num_columns = self.num_columns(num_tokens)
        if not self.sliding:
            return num_columns * self.size
        return num_columns * len(self.full) + min(num_columns, self.num_held_columns) * len(self.sliding)

    def most_tokens(self, num_pages: int) -> int | None:
        """Return the tokens of the longest sequence that fits so many pages; None if any length fits."""
        num_columns = num_pages // self.size
        if self.sliding and num_columns >= self.num_held_columns:
            if not self.full:
                return None
            num_columns = (num_pages - self.num_held_columns * len(self.sliding)) // len(self.full)
        return num_columns * self.page_size

    def first_column(self, num_tokens: int) -> int:
        """Return the first column that a window reaches from the token behind the first `num_tokens`."""
        window = max(window for window in self.windows if window is not None)
        return max(num_tokens - window + 1, 0) // self.page_size
