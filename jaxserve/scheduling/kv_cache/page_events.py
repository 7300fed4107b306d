"""PageEvents: the blocks that requests can find in device memory, as a list of changes for routers.

Only full blocks are announced: when they become findable, and again when they were loaded from a lower tier; consumers
keep a set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.api.token_ids import TokenIds
from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.request import Request


class BlocksStored(NamedTuple):
    """Consecutive blocks that can be found.

    Attributes:
        hashes: their hashes.
        parent: hash of the block before; None for the first.
        token_ids: their tokens.
        group: KV group of their pages.
        salt: namespace of the first block, which has no other before it; None for later ones.
        session: conversation of the request; empty without one.
        adapter: digest of the LoRA adapter on which they depend; empty for the base model.
        images: for each block, the digests of images with tokens in it, and the index of each one's first token minus
            that of the block; empty without images.
    """

    hashes: list[bytes]
    parent: bytes | None
    token_ids: TokenIds
    group: int
    salt: bytes | None
    session: str
    adapter: str
    images: Sequence[Sequence[tuple[bytes, int]]] = ()


class BlocksRemoved(NamedTuple):
    """Blocks that can be found no more."""

    hashes: list[bytes]
    group: int


class AllCleared(NamedTuple):
    """No block can be found any more."""


PageEvent = BlocksStored | BlocksRemoved | AllCleared


class PageEvents:
    """Changes since the last `take`.

    Args:
        page_size: tokens per block.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[PageEvent] = []

    def stored(self, request: Request, hashes: Sequence[bytes], blocks: Sequence[int], group: int) -> None:
        """Note consecutive blocks of a request, by index; `hashes` covers all its blocks."""
        split = request.adapter_start // self._page_size if request.adapter else sys.maxsize
        self._stored(request, hashes, [block for block in blocks if block < split], group, "")
        self._stored(request, hashes, [block for block in blocks if block >= split], group, request.adapter)

    def _stored(
        self, request: Request, hashes: Sequence[bytes], blocks: Sequence[int], group: int, adapter: str
    ) -> None:
        """Note consecutive blocks that all depend on this adapter, or all on none."""
        if not blocks:
            return
        first, stop, size = blocks[0], blocks[-1] + 1, self._page_size
        hint = request.reuse
        event = BlocksStored(
            list(hashes[first:stop]),
            hashes[first - 1] if first else None,
            request.tokens(first * size, stop * size),
            group,
            None if first else request.salt,
            "" if hint is None else hint.group,
            adapter,
            _images_by_block(request, size, first, stop),
        )
        self._events.append(event)

    def registered(self, request: Request, hashes: Sequence[bytes], blocks: Iterable[int], num_groups: int) -> None:
        """Note the blocks of a request that have pages, by KV group."""
        indices = list(blocks)
        for group in range(num_groups):
            self.stored(
                request, hashes, [i for i in indices if request.pages[i * num_groups + group] != RELEASED], group
            )

    def removed(self, page_hash: bytes, group: int) -> None:
        """Note a block that was evicted."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.group == group:
            last.hashes.append(page_hash)
        else:
            self._events.append(BlocksRemoved([page_hash], group))

    def cleared(self) -> None:
        """Note that all blocks were forgotten."""
        self._events = [AllCleared()]

    def loaded(self, request: Request, hashes: Sequence[bytes], pages: Sequence[int], num_groups: int) -> None:
        """Note the blocks that were loaded for a request that starts with these pages, by KV group."""
        for block in sorted(request.loaded_blocks):
            if block < len(hashes):
                for group in range(num_groups):
                    if pages[block * num_groups + group] != RELEASED:
                        self.stored(request, hashes, [block], group)

    def take(self) -> list[PageEvent]:
        """Return the changes, and forget them."""
        events, self._events = self._events, []
        return events


def _images_by_block(request: Request, page_size: int, first: int, stop: int) -> Sequence[Sequence[tuple[bytes, int]]]:
    """Return the images that have tokens in each block from `first` to `stop`; see `BlocksStored.images`."""
    if not request.images:
        return ()
    found: list[list[tuple[bytes, int]]] = [[] for _ in range(first, stop)]
    for span in request.images:
        for block in range(max(first, span.first // page_size), min(stop, -(-span.end // page_size))):
            found[block - first].append((span.image.digest, span.first - block * page_size))
    return found
