"""EngineThreads: the core and its frontend, each in a thread of its own, for as long as there is something to do.

The core's thread plans, launches and reads. The other one brings outputs up to date, finds stop strings and calls
listeners, while the device works. Callers on any thread submit, wait and cancel.
"""

import atexit
import contextlib
import logging
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

EXIT_S = 30.0  # that the end of the process waits for a step


class EngineThreads:
    """Drives an engine while requests are unfinished, for callers on any threads.

    Args:
        engine: stepped by nobody else while requests of these callers are unfinished.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._running: dict[str, int] = {}  # threads by their role, which they leave under the condition's lock
        self._is_paused = False
        _stop_at_exit(self)

    def submit(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        """Queue requests that `Frontend.prepare` has made; `listener` is called on another thread.

        Raises:
            RequestError: the engine sleeps or has no weights.
            RuntimeError: the engine is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._engine.check_serves()
            try:
                for group in groups:
                    self._engine.frontend.start(group, listener)
            finally:  # what was queued before an interrupt can be cancelled
                self._start()

    @contextmanager
    def paused(self) -> Iterator[Engine]:
        """Have the engine for the caller's thread alone, between two steps. Requests that come meanwhile wait."""
        if threading.get_ident() in self._running.values():
            raise RuntimeError(
                "a listener must not wait for the engine's threads, as it runs on one; use another thread"
            )
        was_running = True
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._is_paused = True
        try:
            with self._changed:
                was_running = bool(self._running)
                self._changed.wait_for(lambda: not self._running)
            self._engine.settle()
            yield self._engine
        finally:
            with self._changed:
                self._is_paused = False
                if was_running:
                    self._start()
                self._changed.notify_all()

    def stop(self) -> None:
        """End the threads after the step at hand, for good."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: not self._running, EXIT_S)

    def _start(self) -> None:
        for role, run in (("core", self._run_core), ("frontend", self._run_frontend)):
            if role not in self._running and self._engine.core.has_work():
                thread = threading.Thread(target=run, name=f"jaxserve {role}", daemon=True)
                thread.start()
                self._running[role] = thread.ident or 0

    def _run_core(self) -> None:
        core = self._engine.core
        while True:
            try:
                while core.has_work() and not self._is_paused:
                    core.step(time.monotonic())
            except BaseException as error:  # a defect: errors of steps go to those whose requests they ended
                logger.exception("all requests are ended: the engine's core has failed")
                self._recover(error)
            with self._changed:
                if self._is_paused or not core.has_work():
                    core.outbox.put(None)
                    del self._running["core"]
                    return

    def _run_frontend(self) -> None:
        core, frontend = self._engine.core, self._engine.frontend
        while True:
            try:
                match core.outbox.get():
                    case BaseException() as error:
                        frontend.abandon_all(error)
                    case Delta() as delta:
                        frontend.take(delta)
                    case None:
                        with self._changed:
                            if "core" not in self._running:  # else it was started again
                                del self._running["frontend"]
                                self._changed.notify_all()
                                return
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
