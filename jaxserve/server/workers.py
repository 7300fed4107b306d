"""Workers: threads for work that would hold the event loop, which all tenants use in fair shares.

A tenant has at most `MAX_PER_TENANT` threads at a time, so that others never wait for its long texts. Among the waiting
tenants the one with the fewest threads goes first, then the one that has used the least time; among the waiting work of
one tenant the smallest goes first, unless larger work has waited for its size in bytes over `BYTES_PER_S`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from jaxserve.core.growing_outputs import RequestGroup

MAX_THREADS = 16
MAX_PER_TENANT = 2
BYTES_PER_S = 2**18  # rate at which the order of one tenant's work assumes that a thread reads texts
MAX_PART_BYTES = 2**18  # bytes that `parts` makes before other work gets its turn
GIL_PAUSE_S = 5e-5  # sleep after each piece, in which the loop takes the interpreter's lock without waiting for it
MAX_TENANTS = 4096  # tenants whose times are kept

Result = TypeVar("Result")
_Waiting = tuple[float, int, "asyncio.Future[None]"]  # time at which it is due, number, turn


class Workers:
    """Threads for the work of one event loop, which all tenants use in fair shares. Methods are called on the loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="jaxserve worker")
        self._numbers = itertools.count()
        self._waiting: dict[str, list[_Waiting]] = {}  # heaps by tenant
        self._num_running: dict[str, int] = {}
        self._used_s: dict[str, float] = {}  # time of each tenant's finished work

    async def run(self, tenant: str, work: Callable[[], Result], num_bytes: int = 0) -> Result:
        """Return the result of work that a thread does in its turn. Work of a cancelled caller is not begun.

        Args:
            tenant: name of the tenant for whom the work is done.
            work: function to call on a thread.
            num_bytes: size of the text that it reads, as an estimate of its time.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        due_s = time.monotonic() + num_bytes / BYTES_PER_S
        heapq.heappush(self._waiting.setdefault(tenant, []), (due_s, next(self._numbers), turn))
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant, 0.0)
            raise
        began_s = time.monotonic()
        future = self._pool.submit(work)
        future.add_done_callback(partial(self._ended, loop, tenant, began_s))
        return await asyncio.wrap_future(future)

    async def parts(self, tenant: str, pieces: Iterator[bytes]) -> AsyncGenerator[tuple[list[bytes], bool], None]:
        """Yield pieces in lists of about `MAX_PART_BYTES`, each made in a turn of its own, and whether more follow.

        Args:
            tenant: name of the tenant for whom they are made.
            pieces: pieces, which take a millisecond each at most.
        """
        has_more = True
        while has_more:
            made, has_more = await self.run(tenant, partial(_take, pieces))
            yield made, has_more

    def release(self, groups: Sequence[RequestGroup]) -> None:
        """Free the memory of log probabilities slowly, on one thread, so that the loop need not wait meanwhile."""
        self._pool.submit(_release, groups)

    def close(self) -> None:
        """Cancel the work that has not begun; do not wait for the rest."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Give waiting work its turn while threads are free, in the order that the module describes."""
        while sum(self._num_running.values()) < MAX_THREADS:
            ready = [name for name in self._waiting if self._num_running.get(name, 0) < MAX_PER_TENANT]
            if not ready:
                return
            tenant = min(ready, key=lambda name: (self._num_running.get(name, 0), self._used_s.get(name, 0.0)))
            _, _, turn = heapq.heappop(self._waiting[tenant])
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():  # else its caller is cancelled
                self._num_running[tenant] = self._num_running.get(tenant, 0) + 1
                turn.set_result(None)

    def _ended(self, loop: asyncio.AbstractEventLoop, tenant: str, began_s: float, future: Future[object]) -> None:
        """Release a tenant's thread on the loop; called on the thread when the work has ended."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._release, tenant, time.monotonic() - began_s)

    def _release(self, tenant: str, used_s: float) -> None:
        """Count a tenant's work as ended after `used_s` seconds, and start waiting work."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        if tenant not in self._used_s:
            if len(self._used_s) >= MAX_TENANTS:
                self._used_s.clear()
            # A tenant that was not there has no claim to the time that others have used meanwhile.
            self._used_s[tenant] = min(self._used_s.values(), default=0.0)
        self._used_s[tenant] += used_s
        self._start()


def _release(groups: Sequence[RequestGroup]) -> None:
    """Free the log probabilities of groups one by one, with pauses in which the loop can run."""
    for group in groups:
        group.release_logprobs()
        time.sleep(GIL_PAUSE_S)


def _take(pieces: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the next pieces, about `MAX_PART_BYTES`, and whether there may be more."""
    made: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        if num_bytes >= MAX_PART_BYTES:
            return made, True
        time.sleep(GIL_PAUSE_S)
    return made, False
