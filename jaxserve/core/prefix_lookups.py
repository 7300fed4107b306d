"""PrefixLookups: asks a shared store for the pages of new prompts, before these are queued.

A scheduler's plans must depend on its events only, so the store's answer is an event, `Found`. A prompt waits for it
until the store's deadline; another thread computes the hashes meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from jaxserve.core.events import Found
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from jaxserve.scheduling.request import Request

logger = logging.getLogger(__name__)

MAX_KEYS = 65536  # pages in one lookup: a longer prompt's others count as missing


# Begins to look for pages; the given function is called with a flag for each, or None, possibly on another thread.
Find = Callable[[Sequence[PageKey], Callable[[Sequence[bool] | None], None]], None]


class Looked(NamedTuple):
    """Requests whose lookup has ended.

    Attributes:
        requests: samples of one prompt.
        found: the store's pages; None if it has not answered.
    """

    requests: Sequence[Request]
    found: Found | None


class PrefixLookups:
    """Lookups for one engine. One thread at a time uses it.

    Args:
        tier: number of the store's tier.
        groups: KV groups.
        find: looks for pages.
    """

    def __init__(self, tier: int, groups: KVGroups, find: Find) -> None:
        self._tier, self._groups, self._find = tier, groups, find
        self._hashes = PrefixHashes(groups.page_size)  # used by the thread
        self._prompts: SimpleQueue[Sequence[Request] | None] = SimpleQueue()
        self._ended: deque[Looked] = deque()
        self._thread: Thread | None = None

    def begin(self, requests: Sequence[Request]) -> None:
        """Begin to look for the pages of a prompt, given its samples."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="jaxserve lookups", daemon=True)
            self._thread.start()
        self._prompts.put(requests)

    def take_ended(self) -> list[Looked]:
        """Return the lookups that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """End the thread."""
        self._prompts.put(None)

    def _run(self) -> None:
        """Look for prompts until `close`."""
        while (requests := self._prompts.get()) is not None:
            try:
                self._look(requests)
            except Exception:  # a defect must not leave requests waiting
                logger.exception("a prompt's pages could not be looked up")
                self._ended.append(Looked(requests, None))

    def _look(self, requests: Sequence[Request]) -> None:
        """Look for the pages of one prompt."""
        keys = self._keys(requests[0])
        for request in requests[1:]:
            request.page_hashes[:] = requests[0].page_hashes
        if not keys:
            self._ended.append(Looked(requests, None))
            return

        def done(found: Sequence[bool] | None) -> None:
            event = None
            if found is not None:
                named = [(key.group, key.page_hash.hex()) for key in keys]
                event = Found(
                    self._tier,
                    [name for name, is_there in zip(named, found, strict=True) if is_there],
                    [name for name, is_there in zip(named, found, strict=True) if not is_there],
                )
            self._ended.append(Looked(requests, event))

        self._find(keys, done)

    def _keys(self, request: Request) -> list[PageKey]:
        """Return the pages that a prompt could be read from."""
        if not request.read_prefix_cache:
            return []
        num_tokens, size = request.num_last_tokens, self._groups.page_size
        hashes = self._hashes.full_pages(request)[: num_tokens // size]
        if request.takes_prompt and num_tokens % size:
            hashes = [*hashes, self._hashes.last_page(request, num_tokens)]
        groups = [*range(self._groups.size), *([] if self._groups.num_snapshots is None else [STATES])]
        return [PageKey(group, page_hash) for page_hash in hashes for group in groups][:MAX_KEYS]
