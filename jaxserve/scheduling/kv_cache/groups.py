"""KVGroups: layer groups that have KV pages of their own, within one page id space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxserve.scheduling.kv_cache.sparsity import AHEAD, LONGEST, Sparsity

RELEASED = -1  # page id after a sequence has released a page that no later token sees


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
        sparsity: rule by which output tokens see fewer keys and values in groups with full attention; None without.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    num_snapshots: int | None = None
    sparsity: Sparsity | None = None

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
        return -(-(self.max_window - 1 + AHEAD) // self.page_size) + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.page_size)

    @property
    def releases_pages(self) -> bool:
        """True if running sequences release pages."""
        return bool(self.sliding) or self.sparsity is not None

    def num_pages(self, num_tokens: int, num_prompt: int | None = None) -> int:
        """Return the maximum pages that a sequence of `num_tokens` holds if it is computed a page at a time.

        `num_prompt` is its number of prompt tokens, which see all others; None for all.
        """
        num_blocks = num_full = self.num_blocks(num_tokens)
        if self.sparsity is not None and num_prompt is not None:
            num_full = self.sparsity.held_pages(num_tokens, num_prompt)
        if not self.sliding:
            return num_full * self.size
        return num_full * len(self.full) + min(num_blocks, self.num_held_blocks) * len(self.sliding)

    def num_decoding_pages(self, num_tokens: int) -> int:
        """Return the pages that a sequence of `num_tokens` holds while it samples, after a prompt of nearly all."""
        num_pages = self.num_pages(num_tokens)
        if self.sparsity is None or not self.sparsity.hides_pages:
            return num_pages
        return num_pages - max(self.num_blocks(num_tokens) - self.sparsity.num_pages - 1, 0) * len(self.full)

    def num_shareable(self, num_tokens: int, num_prompt: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens have keys and values that others can use."""
        return num_tokens if self.sparsity is None else min(num_tokens, num_prompt)

    def row_end(self, start: int, num_prompt: int) -> int:
        """Return the index before which a row must end, so that all its tokens see the same keys and values.

        Args:
            start: index of the row's first token in its sequence.
            num_prompt: number of prompt tokens.
        """
        if self.sparsity is None:
            return start + LONGEST
        return num_prompt if start < num_prompt else self.sparsity.row_end(start)

    def max_tokens(self, num_pages: int) -> int | None:
        """Return the maximum number of tokens in a sequence with `num_pages` pages; None if any length fits.

        It holds for prompts; outputs may get longer if they release pages.
        """
        num_blocks = num_pages // self.size
        if self.sliding and num_blocks >= self.num_held_blocks:
            if not self.full:
                return None
            num_blocks = (num_pages - self.num_held_blocks * len(self.sliding)) // len(self.full)
        return num_blocks * self.page_size

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that a window reaches from the token after the first `num_tokens`."""
        return max(num_tokens - self.max_window + 1, 0) // self.page_size
