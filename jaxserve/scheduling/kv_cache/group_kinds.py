"""Kinds of KV groups: which earlier pages the next token sees, and hence which prefixes hit and which pages are
released.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import cycle
from typing import Protocol, runtime_checkable

from jaxserve.scheduling.kv_cache.groups import RELEASED, KVGroups
from jaxserve.scheduling.kv_cache.sparsity import Sparsity
from jaxserve.scheduling.request import Request

Cached = Sequence[Container[bytes]]  # hashes of cached pages by group; states come last


@runtime_checkable
class GroupKind(Protocol):
    """All KV groups of one kind: full attention, sliding windows or recurrent states (`state_snapshots.py`).

    Attributes:
        groups: groups whose pages lie in the KV pool.
    """

    groups: tuple[int, ...]

    def longest_hit(self, hashes: Sequence[bytes], cached: Cached) -> int:
        """Return the length, in blocks, of a prompt's longest prefix after which the next token sees only cached pages.

        Args:
            hashes: prefix hash per prompt block.
            cached: hashes of cached pages, by group.
        """

    def seen(self, num_blocks: int) -> range:
        """Return the blocks that the token after the first `num_blocks` blocks sees."""

    def remove_unseen(self, request: Request) -> list[int]:
        """Remove a running request's pages that none of its later tokens sees; return them in reverse token order."""
        return []


class FullAttention(GroupKind):
    """Groups in which every token sees all earlier ones, MLA included."""

    def __init__(self, groups: KVGroups) -> None:
        self.groups = groups.full

    def longest_hit(self, hashes: Sequence[bytes], cached: Cached) -> int:
        """Return the number of leading blocks that are cached in all groups."""
        return min((_num_leading(cached[group], hashes) for group in self.groups), default=len(hashes))

    def seen(self, num_blocks: int) -> range:
        """Return all of the first `num_blocks` blocks."""
        return range(num_blocks)


class SparseAttention(FullAttention):
    """Groups with full attention whose output tokens do not see all earlier ones."""

    def __init__(self, groups: KVGroups, sparsity: Sparsity) -> None:
        super().__init__(groups)
        self._sparsity, self._num_groups = sparsity, groups.size

    def remove_unseen(self, request: Request) -> list[int]:
        """Remove a running request's pages that are hidden from its next token; return them in reverse token order."""
        num_prompt = request.num_prompt_tokens
        if request.num_computed_tokens < num_prompt or self._sparsity.num_copied(num_prompt):
            return []
        certain = min(request.num_computed_tokens, request.num_known_tokens - 1)
        before, hidden = request.num_hidden_blocks, self._sparsity.num_hidden(max(certain, num_prompt), num_prompt)
        if hidden <= before:
            return []
        size, first, pages = self._num_groups, self._sparsity.num_sink_pages, request.pages
        unseen = [block * size + group for block in range(first + before, first + hidden) for group in self.groups]
        removed = [pages[index] for index in reversed(unseen)]
        for index in unseen:
            pages[index] = RELEASED
        request.num_hidden_blocks = hidden
        return removed


class SlidingWindow(GroupKind):
    """Groups in which a token sees only the last tokens. If windows differ, all groups keep the largest window."""

    def __init__(self, groups: KVGroups) -> None:
        self.groups = groups.sliding
        self._sizes = groups

    def longest_hit(self, hashes: Sequence[bytes], cached: Cached) -> int:
        """Return the end of the last run of cached blocks that covers a window or begins at the first block."""
        needed, num_last = self._sizes.num_window_blocks, 0  # consecutive cached blocks
        tables = [cached[group] for group in self.groups]
        for block in range(len(hashes) - 1, -1, -1):
            if num_last == needed:
                return block + 1 + num_last
            num_last = num_last + 1 if all(hashes[block] in table for table in tables) else 0
        return num_last

    def seen(self, num_blocks: int) -> range:
        """Return the blocks, among the first `num_blocks`, in the window of the token after them."""
        return range(max(num_blocks - self._sizes.num_window_blocks, 0), num_blocks)

    def remove_unseen(self, request: Request) -> list[int]:
        """Remove a running request's pages before the next token's window; return them in reverse token order.

        All known tokens except the last are certainly computed, at the latest by steps in flight.
        """
        certain = min(request.num_computed_tokens, request.num_known_tokens - 1)
        released, first = request.num_released_blocks, self._sizes.first_block(certain)
        if first <= released:
            return []
        size, pages = self._sizes.size, request.pages
        unseen = [block * size + group for block in range(released, first) for group in self.groups]
        removed = [pages[index] for index in reversed(unseen)]
        for index in unseen:
            pages[index] = RELEASED
        request.num_released_blocks = first
        return removed


def longest_hit(kinds: Sequence[GroupKind], hashes: Sequence[bytes], cached: Cached) -> int:
    """Return the number of blocks in a prompt's longest prefix that is cached by all kinds.

    Each kind shortens it in turn until all agree.

    Args:
        kinds: all kinds of groups.
        hashes: prefix hash per prompt block.
        cached: hashes of cached pages, by group.
    """
    num_blocks, num_agreed = len(hashes), 0
    for kind in cycle(kinds):
        num_hit = kind.longest_hit(hashes[:num_blocks], cached)
        num_agreed = num_agreed + 1 if num_hit == num_blocks else 1
        num_blocks = num_hit
        if num_agreed == len(kinds):
            break
    return num_blocks


def pages_seen(kinds: Sequence[GroupKind], num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (block, group) for each KV page that the token after the first `num_blocks` blocks sees."""
    for kind in kinds:
        for block in kind.seen(num_blocks):
            for group in kind.groups:
                yield block, group


def _num_leading(cached: Container[bytes], hashes: Sequence[bytes]) -> int:
    """Return the number of leading hashes that are cached."""
    return next((index for index, page_hash in enumerate(hashes) if page_hash not in cached), len(hashes))
