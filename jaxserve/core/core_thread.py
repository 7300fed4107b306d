"""CoreThread: the thread that drives a core as long as the core has work."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxserve.core.core import EngineCore

logger = logging.getLogger(__name__)

MAX_DELTAS = 8  # maximum deltas in the outbox before the core waits
LOOK_S = 1e-3  # time between two checks of the outbox, if it is full, or of the inbox
POLL_S = 5e-5  # time between two checks of several replicas' devices


class CoreThread:
    """Thread that plans, launches and reads steps; it ends when no work is left, and `start` begins it again.

    Args:
        core: core, which no other thread may drive unless this one is paused.
        free: called if the core cannot continue, to free its resources.
        notify: called on the thread after each step, and when it ends; None to wake `wait`.
        num_untaken: returns how many deltas their reader has not taken yet; steps pause if it exceeds MAX_DELTAS. None
            counts the core's outbox.

    Attributes:
        is_running: True from `start` until the thread ends.
    """

    def __init__(
        self,
        core: EngineCore,
        free: Callable[[], None],
        notify: Callable[[], None] | None = None,
        num_untaken: Callable[[], int] | None = None,
    ) -> None:
        self._core, self._free = core, free
        self._news: SimpleQueue[None] = SimpleQueue()
        # holds no reference cycle, so that an abandoned core is freed
        self._notify = notify or partial(self._news.put, None)
        self._num_untaken = num_untaken or (lambda: len(core.outbox))
        self._lock = threading.Lock()  # guards the two flags below
        self.is_running = self._is_paused = False

    def start(self) -> None:
        """Start the thread, unless it runs, is paused or has no work.

        Raises:
            RuntimeError: the system has no more threads.
        """
        with self._lock:
            if self.is_running or self._is_paused or not self._core.has_work():
                return
            self.is_running = True
        try:
            threading.Thread(target=self._run, name="jaxserve core", daemon=True).start()
        except BaseException:
            self.is_running = False
            raise

    def wait(self, timeout_s: float | None) -> None:
        """Wait for deltas or the end of the thread, for at most `timeout_s` seconds."""
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout_s)

    def has_work(self) -> bool:
        return self._core.has_work()

    def pause(self) -> None:
        """Make the thread end after the current step, until `resume`."""
        with self._lock:
            self._is_paused = True

    def resume(self) -> None:
        """Allow the thread to be started again."""
        self._is_paused = False

    def _run(self) -> None:
        """Step the core until it has no work or is paused; the body of the thread."""
        core, runs = self._core, True
        while runs:
            try:
                while core.has_work() and not self._is_paused:
                    if self._num_untaken() > MAX_DELTAS:  # so that stop strings are found in time
                        time.sleep(LOOK_S)
                        continue
                    if core.step(time.monotonic()) or core.outbox:
                        self._notify()  # the next step replaces the statistics
                    else:  # no step is in flight: requests wait for an event
                        time.sleep(POLL_S if core.num_in_flight else LOOK_S)
            except BaseException as error:  # a defect: failed steps raise nothing here, their requests get the error
                logger.exception("all requests are ended: the engine's core has failed")
                self._recover(error)
            with self._lock:
                runs = core.has_work() and not self._is_paused
                self.is_running = runs
            self._notify()

    def _recover(self, error: BaseException) -> None:
        """End all requests, whatever the state of the core; if even that fails, close the engine."""
        try:
            self._core.recover(error)
        except BaseException:
            logger.exception("the engine is closed: it cannot continue")
            with contextlib.suppress(BaseException):
                self._free()
            self._core.lose_all(error)
