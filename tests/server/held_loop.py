"""Probe of a server's event loop: how long it is held, and by how much work of this process."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.server.conftest import Running

PROBE_S = 0.004


@dataclass
class Held:
    """Longest times between two turns of a probe that asks for a turn every `PROBE_S`.

    Attributes:
        wall_s: time by the clock, in which other processes may have run.
        busy_s: processor time of this process meanwhile, on any thread: one may hold the interpreter's lock.
    """

    wall_s: float = 0.0
    busy_s: float = 0.0


@contextmanager
def probed(server: Running) -> Iterator[Held]:
    """Measure how long a server's loop is held within the context."""
    held, loop = Held(), server.app.service.streams._loop
    is_over = False

    async def probe() -> None:
        while not is_over:
            wall_s, busy_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(PROBE_S)
            wall_s, busy_s = time.perf_counter() - wall_s, time.process_time() - busy_s
            held.wall_s = max(held.wall_s, wall_s)
            held.busy_s = max(held.busy_s, min(busy_s, wall_s))

    ended = asyncio.run_coroutine_threadsafe(probe(), loop)
    try:
        yield held
    finally:
        is_over = True
        ended.result(30)
