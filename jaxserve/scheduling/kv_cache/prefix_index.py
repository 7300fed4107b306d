"""PrefixIndex: finds the longest cached prefix of a request, in device memory or in any tier."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Container
from functools import partial
from typing import NamedTuple

from jaxserve.scheduling.kv_cache.group_kinds import (
    FullAttention,
    GroupKind,
    SlidingWindow,
    SparseAttention,
    longest_hit,
    pages_seen,
)
from jaxserve.scheduling.kv_cache.groups import RELEASED, KVGroups
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes
from jaxserve.scheduling.kv_cache.state_snapshots import StateSnapshots
from jaxserve.scheduling.kv_cache.transfers import InAnyTier, Transfers
from jaxserve.scheduling.request import Request


class Prefix(NamedTuple):
    """Content of a waiting request's prefix.

    Attributes:
        pages: block, KV group and hash per page.
        state: hash for the state snapshot after it; None without recurrent layers.
    """

    pages: list[tuple[int, int, bytes]]
    state: bytes | None

    @property
    def num_blocks(self) -> int:
        """Blocks, a partly filled one included."""
        return max(block + 1 for block, *_ in self.pages)


class PrefixIndex:
    """Cached pages and state snapshots, by hash.

    Args:
        groups: layer groups that have pages of their own.
        states: state snapshots; None if no layer is recurrent.
        transfers: moves between tiers.

    Attributes:
        page_by_hash: cached pages by hash, for each KV group.
        paged_kinds: kinds of groups whose pages lie in the KV pool.
    """

    def __init__(self, groups: KVGroups, states: StateSnapshots | None, transfers: Transfers) -> None:
        self._groups, self._states, self._transfers = groups, states, transfers
        self._page_size = groups.page_size
        self._hashes = PrefixHashes(groups.page_size)
        self.page_by_hash: list[dict[bytes, int]] = [{} for _ in groups.windows]
        self._full = FullAttention(groups) if groups.sparsity is None else SparseAttention(groups, groups.sparsity)
        self._first = groups.full[0] if groups.full else 0  # group that `has` looks up
        self.paged_kinds: list[GroupKind] = [self._full]
        if groups.sliding:
            self.paged_kinds.append(SlidingWindow(groups))
        self._kinds = self.paged_kinds if states is None else [*self.paged_kinds, states]
        # By KV group; states come last.
        self._cached: list[Container[bytes]] = [*self.page_by_hash]
        self._in_any_tier: list[Container[bytes]] = [
            InAnyTier(group, cached, transfers) for group, cached in enumerate(self.page_by_hash)
        ]
        if states is not None:
            self._cached.append(states.cached)
            self._in_any_tier.append(InAnyTier(STATES, states.cached, transfers))
            self._known_states = ChainMap(states.cached, states.taken)

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of a request's full pages with known tokens."""
        return self._hashes.full_pages(request)

    def hash_at(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash for a request's first `num_tokens` tokens, of which the last page may be partly filled."""
        if num_tokens % self._page_size:
            return self._hashes.last_page(request, num_tokens)
        return self.hashes(request)[num_tokens // self._page_size - 1]

    def has(self, page_hash: bytes) -> bool:
        """Return whether a page with this hash is cached, in the first group with full attention."""
        return page_hash in self.page_by_hash[self._first]

    def may_match(self, request: Request, num_blocks: int) -> bool:
        """Return False if a single lookup proves that `match` would find fewer than `num_blocks` blocks."""
        if num_blocks > (request.num_known_tokens - 1) // self._page_size:
            return False
        return not self._full.groups or num_blocks < 1 or self.has(self.hashes(request)[num_blocks - 1])

    def match(self, request: Request, *, with_last: bool = True) -> list[int]:
        """Return the pages of a request's longest cached prefix, block by block, without taking references.

        At least one known token is left over, because sampling needs the last one's hidden state.

        Args:
            request: waiting request.
            with_last: True if recurrent layers may continue from the state after the partly filled page of
                `match_last`; False if the request starts without that page.
        """
        hashes = self._matchable_hashes(request)
        find = partial(self._num_hit, request) if with_last else partial(longest_hit, self._kinds)
        hashes = hashes[: find(hashes, self._cached)]
        size = self._groups.size
        if size == 1 and self._full.groups:
            return [self.page_by_hash[0][page_hash] for page_hash in hashes]
        pages = [RELEASED] * (len(hashes) * size)
        for block, group in pages_seen(self.paged_kinds, len(hashes)):
            pages[block * size + group] = self.page_by_hash[group][hashes[block]]
        return pages

    def num_full_blocks(self, request: Request) -> int:
        """Return the number of leading blocks that are cached in all full-attention groups."""
        return self._full.longest_hit(self._matchable_hashes(request), self.page_by_hash)

    def match_last(self, request: Request, num_blocks: int) -> list[int]:
        """Return the partly filled pages, one per group, that follow a request's cached blocks; empty if not cached.

        They exist if a request with shares_last_page ended at this prefix, or if this request was swapped out.

        Args:
            request: waiting request.
            num_blocks: number of its cached full blocks.
        """
        last = self._last_hash(request, num_blocks)
        if last is None or not all(last in cached for cached in self._cached):
            return []
        return [page_by_hash[last] for page_by_hash in self.page_by_hash]

    def below(self, request: Request) -> Prefix | None:
        """Return a waiting request's longest prefix found in any tier, if to load it pays.

        None if device memory has all of it.
        """
        hashes = self._matchable_hashes(request)
        num_blocks = self._num_hit(request, hashes, self._in_any_tier)
        pages = [(block, group, hashes[block]) for block, group in pages_seen(self.paged_kinds, num_blocks)]
        state = hashes[num_blocks - 1] if num_blocks else None
        last = self._last_hash(request, num_blocks)
        has_last = last is not None and all(last in cached for cached in self._in_any_tier)
        if last is not None and has_last:
            pages += [(num_blocks, group, last) for group in range(self._groups.size)]
            state = last
        num_missing = sum(page_hash not in self._cached[group] for _, group, page_hash in pages)
        if self._states is None:
            state = None
        elif state is not None and state not in self._known_states:
            num_missing += self._transfers.state_pages
        if not num_missing:
            return None
        num_gained = num_blocks + has_last - self._num_hit(request, hashes, self._cached)
        return Prefix(pages, state) if self._transfers.pays(num_gained, num_missing) else None

    def _matchable_hashes(self, request: Request) -> list[bytes]:
        """Return a request's hashes for full pages before its last known token, which must be computed anyway."""
        num_tokens = self._groups.num_shareable(request.num_known_tokens, request.num_prompt_tokens)
        return self.hashes(request)[: (num_tokens - 1) // self._page_size]

    def _num_hit(self, request: Request, hashes: list[bytes], cached: list[Container[bytes]]) -> int:
        """Return the number of full blocks in the longest prefix that all kinds have.

        A recurrent layer may continue from the state after a partly filled page; its full blocks then need no state.

        Args:
            request: waiting request.
            hashes: hashes of its full blocks.
            cached: hashes of cached pages, by group.
        """
        num_hit, num_last = longest_hit(self._kinds, hashes, cached), request.num_last_tokens // self._page_size
        if self._states is None or num_last < num_hit:
            return num_hit
        last = self._last_hash(request, num_last)
        if last is None or not all(last in each for each in cached):
            return num_hit
        return num_last if longest_hit(self.paged_kinds, hashes[:num_last], cached) == num_last else num_hit

    def _last_hash(self, request: Request, num_blocks: int) -> bytes | None:
        """Return the hash of the partly filled page after `num_blocks` blocks; None if it cannot be cached."""
        num_tokens = request.num_last_tokens
        if not (request.shares_last_page or request.takes_prompt or request.num_kept_tokens):
            return None
        if self._groups.sparsity is not None and num_tokens >= request.num_prompt_tokens:
            return None  # a row computes the prompt's last token
        if num_tokens // self._page_size != num_blocks or not num_tokens % self._page_size:
            return None
        return self._hashes.last_page(request, num_tokens)
