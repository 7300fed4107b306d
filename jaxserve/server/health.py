"""Health: whether the engine makes progress."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine

LOOK_S = 0.25  # time between two looks at the engine


class Health:
    """Watch over an engine, whose steps must not stop while requests are unfinished.

    Args:
        engine: the engine.
        stuck_after_s: time without a step after which there is a problem.
    """

    def __init__(self, engine: Engine, stuck_after_s: float) -> None:
        self._engine, self._stuck_after_s = engine, stuck_after_s
        self._seen = -1  # steps at the last look
        self._moved_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Start a task that checks every LOOK_S seconds whether the engine has made a step."""
        self._task = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Cancel the task that `watch` started."""
        if self._task is not None:
            self._task.cancel()

    def problem(self) -> str | None:
        """Return why the engine cannot serve requests; None if it can."""
        if (problem := self._engine.host.problem) is not None:
            return problem
        stuck_s = time.monotonic() - self._moved_s
        if stuck_s > self._stuck_after_s and self._engine.host.driver.has_work():
            return f"the engine has made no step for {stuck_s:.0f} s, with requests unfinished"
        return None

    async def _look(self) -> None:
        """Note every LOOK_S seconds whether the engine has made a step, until cancelled."""
        with suppress(asyncio.CancelledError):
            while True:
                num_steps = self._engine.stats.num_dispatches
                if num_steps != self._seen or not self._engine.host.driver.has_work():
                    self._seen, self._moved_s = num_steps, time.monotonic()
                await asyncio.sleep(LOOK_S)
