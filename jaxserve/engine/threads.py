"""EngineThreads: the core and its frontend, each in a thread of its own, for as long as there is something to do.

The core's thread plans, launches and reads. The other one brings outputs up to date, finds stop strings and calls
listeners, while the device works. Callers on any thread submit, wait and cancel.
"""

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxserve.engine.core import Delta
from jaxserve.engine.engine import Engine
from jaxserve.engine.frontend import Listener
from jaxserve.engine.outputs import RequestGroup

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # that the end of the process, and who would step the engine by hand, wait for the threads
MAX_DELTAS = 8  # that the frontend may be behind
POLL_S = 1e-3  # between looks at whether threads have ended


class EngineThreads:
    """Drives an engine while requests are unfinished, for callers on any threads.

    A caller may be interrupted anywhere: what it shares with others changes by single calls of queues and dicts, and
    its locks are those that CPython releases whenever an interrupt comes, which those of Python's own conditions and
    events are not.

    Args:
        engine: stepped by nobody else while requests of these callers are unfinished.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, int] = {}  # threads by role
        self._lock = threading.Lock()  # of `_running`, and of the start of a pause
        self._pause = threading.Lock()  # held by whoever has the engine for itself
        self._is_paused = self._is_stopped = False
        self._is_wanted = False  # by requests of these callers
        engine.driven_by(self.wait_until_idle)
        _stop_at_exit(self)

    def submit(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        """Queue requests that `Frontend.prepare` has made; `listener` is called on another thread, and may submit more.

        Raises:
            RequestError: the engine sleeps or has no weights.
            RuntimeError: the engine is closed.
        """
        if threading.get_ident() in self._running.values():  # a pause waits for this very thread
            self._queue(groups, listener)
            return
        if self._is_stopped:
            raise RuntimeError("the process is ending: no requests are served any more")
        with self._pause:
            self._is_paused = self._is_stopped  # an interrupt may have come at the end of a pause
            self._queue(groups, listener)

    def _queue(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        self._engine.check_serves()
        try:
            for group in groups:
                self._engine.frontend.start(group, listener)
        finally:  # what was queued before an interrupt is there to be cancelled
            self._is_wanted = True
            self._start()

    @contextmanager
    def paused(self) -> Iterator[Engine]:
        """Have the engine for the caller's thread alone, between two steps. Requests that come meanwhile wait."""
        if threading.get_ident() in self._running.values():
            raise RuntimeError("a listener must not wait for the engine's threads, as it runs on one; use another one")
        with self._pause:
            try:
                with self._lock:
                    self._is_paused = True
                self._wait_for_threads()
                self._engine.settle()
                yield self._engine
            finally:
                self._is_paused = self._is_stopped
                self._start()

    def stop(self) -> None:
        """End the threads after the step at hand, for good."""
        with self._lock:
            self._is_paused = self._is_stopped = True
        self._wait_for_threads(PATIENCE_S)

    def wait_until_idle(self) -> None:
        """Wait for the requests of these callers to end; RuntimeError if they do not."""
        self._wait_for_threads(PATIENCE_S)
        if self._running:
            raise RuntimeError(
                f"an engine must not be stepped by hand while calls of its LLM run, which have not ended in "
                f"{PATIENCE_S:.0f} s; use the LLM's methods"
            )

    def _wait_for_threads(self, most_s: float = math.inf) -> None:
        until_s = time.monotonic() + most_s
        while self._running and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def _start(self) -> None:
        """Have a core's thread, unless there is one; one too many ends at once."""
        if self._is_wanted and not self._is_paused and "core" not in self._running:
            threading.Thread(target=self._run_core, name="jaxserve core", daemon=True).start()

    def _run_core(self) -> None:
        with self._lock:
            if self._is_paused or "core" in self._running:
                return
            self._running["core"] = threading.get_ident()
            if "frontend" not in self._running:  # it ends after the core alone
                self._running["frontend"] = 0
                threading.Thread(target=self._run_frontend, name="jaxserve frontend", daemon=True).start()
        core, runs = self._engine.core, True
        while runs:
            try:
                while core.has_work() and not self._is_paused:
                    if core.outbox.qsize() > MAX_DELTAS:  # so that stop strings are found in time
                        time.sleep(POLL_S)
                        continue
                    core.step(time.monotonic())
            except BaseException as error:  # a defect: errors of steps go to those whose requests they ended
                logger.exception("all requests are ended: the engine's core has failed")
                self._recover(error)
            with self._lock:
                runs = core.has_work() and not self._is_paused
                if not runs:
                    self._is_wanted = core.has_work()
                    core.outbox.put(None)
                    del self._running["core"]
        if core.has_work():  # which has come since, from who has seen this thread
            self._is_wanted = True
            self._start()

    def _run_frontend(self) -> None:
        self._running["frontend"] = threading.get_ident()
        core, frontend, runs = self._engine.core, self._engine.frontend, True
        while runs:
            try:
                match core.outbox.get():
                    case BaseException() as error:
                        frontend.abandon_all(error)
                    case Delta() as delta:
                        frontend.take(delta)
                    case None:
                        with self._lock:
                            # The core may have been started again, and even have ended again.
                            runs = "core" in self._running or not core.outbox.empty()
                            if not runs:
                                del self._running["frontend"]
            except BaseException:
                logger.exception("requests are ended: their outputs could not be assembled")

    def _recover(self, error: BaseException) -> None:
        """End all requests, whatever the core knows of them; where that does not help, nobody is served any more."""
        core = self._engine.core
        try:
            core.abort_all(error)
            for replica in core.replicas:
                replica.recover()
        except BaseException:
            logger.exception("the engine is closed: it cannot go on")
            with contextlib.suppress(BaseException):
                self._engine.close()
            core.lose_all()
        core.outbox.put(error)


_threads: weakref.WeakSet[EngineThreads] = weakref.WeakSet()


def _stop_at_exit(threads: EngineThreads) -> None:
    """Before runners are closed at exit, which are so anew with each that is made, and before jax cleans up."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)
    _threads.add(threads)


def _stop_all() -> None:
    for threads in list(_threads):
        threads.stop()
