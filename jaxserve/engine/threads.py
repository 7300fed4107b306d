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
from queue import Empty, SimpleQueue

from jaxserve.engine.engine import POLL_S, Engine
from jaxserve.engine.events import Event
from jaxserve.engine.frontend import Listener
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.wakes import Wakes

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # time that the end of the process waits for the threads
MAX_DELTAS = 8  # deltas that the frontend may be behind
LOOK_S = 1e-3  # time between looks at whether threads have ended, or the frontend has come after


class EngineThreads:
    """Drives an engine while requests are unfinished, for callers on any threads.

    A caller may be interrupted anywhere, these threads are not: what a caller shares with others changes by single
    calls of queues and dicts, and its locks are those that CPython releases whenever an interrupt comes.

    Args:
        engine: engine that nobody else steps while requests of these callers are unfinished.

    Attributes:
        wakes: turns of the threads that stream.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, int] = {}  # threads by role
        self._lock = threading.Lock()  # guards `_running`, and the start of a pause
        self._pause = threading.Lock()  # held by whoever has the engine for itself
        self._pauser = 0  # thread that did so last
        self._news: SimpleQueue[None] = SimpleQueue()  # wakes the frontend: there are deltas, or the core has ended
        self.wakes = Wakes()
        self._is_paused = self._is_stopped = False
        self._is_wanted = False  # True if requests of these callers are unfinished
        _stop_at_exit(self)

    def submit(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        """Queue requests from `RequestReader.read`; `listener` is called on another thread, and may submit more.

        Raises:
            RequestError: the engine sleeps or has no weights.
            RuntimeError: the engine is closed.
        """
        if self._is_own_thread():  # a pause waits for this very thread, or is its own
            self._queue(groups, listener)
            return
        if self._is_stopped:
            raise RuntimeError("the process is ending: no requests are served any more")
        with self._pause:
            self._is_paused, self._pauser = self._is_stopped, 0  # an interrupt may have come at the end of a pause
            self._queue(groups, listener)

    def _queue(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        self._engine.devices.check_serve()
        try:
            for group in groups:
                self._engine.frontend.start(group, listener)
        finally:  # requests queued ahead of an interrupt are there to be cancelled
            self._is_wanted = True
            self._start()

    def send(self, event: Event) -> None:
        """Leave an event for the core. From any thread."""
        self._engine.core.inbox.append(event)
        self._is_wanted = True
        self._start()

    @contextmanager
    def paused(self) -> Iterator[Engine]:
        """Have the engine for the caller's thread alone, between two steps. Requests that come meanwhile wait."""
        if self._is_own_thread():
            raise RuntimeError("a listener must not wait for the engine's threads, as it runs on one; use another one")
        with self._pause:
            try:
                self._pauser = threading.get_ident()
                with self._lock:
                    self._is_paused = True
                self._wait_for_threads()
                self._engine.settle()
                yield self._engine
            finally:
                self._pauser = 0
                self._is_paused = self._is_stopped
                self._start()

    def _is_own_thread(self) -> bool:
        own = threading.get_ident()
        return own in self._running.values() or (own == self._pauser and self._pause.locked())

    def stop(self) -> None:
        """End the threads after the step at hand, for good."""
        with self._lock:
            self._is_paused = self._is_stopped = True
        self._wait_for_threads(PATIENCE_S)

    def _wait_for_threads(self, most_s: float = math.inf) -> None:
        until_s = time.monotonic() + most_s
        while self._running and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def _start(self) -> None:
        """Have a core's thread, unless there is one; one too many ends at once."""
        if self._is_wanted and not self._is_paused and "core" not in self._running:
            threading.Thread(target=self._run_core, name="jaxserve core", daemon=True).start()

    def _run_core(self) -> None:
        with self._lock:
            if self._is_paused or "core" in self._running:
                return
            self._running["core"] = threading.get_ident()
            failure = self._start_frontend()
        if failure is not None:
            self._abandon(failure)
            return
        core, runs = self._engine.core, True
        while runs:
            try:
                while core.has_work() and not self._is_paused:
                    if len(core.outbox) > MAX_DELTAS:  # so that stop strings are found in time
                        time.sleep(LOOK_S)
                        continue
                    if not core.step(time.monotonic()):
                        time.sleep(POLL_S)
                    if core.outbox:
                        self._news.put(None)
            except BaseException as error:  # a defect: errors of steps go to those whose requests they ended
                logger.exception("all requests are ended: the engine's core has failed")
                self._recover(error)
                self._news.put(None)
            with self._lock:
                runs = core.has_work() and not self._is_paused
                if not runs:
                    self._is_wanted = core.has_work()
                    del self._running["core"]
        self._news.put(None)
        if core.has_work():  # work has come since, from a caller who has seen this thread
            self._is_wanted = True
            self._start()

    def _start_frontend(self) -> RuntimeError | None:
        """Have a frontend's thread; returns the error of a system that has no more threads."""
        if "frontend" not in self._running:  # it ends after the core alone
            self._running["frontend"] = 0
            try:
                threading.Thread(target=self._run_frontend, name="jaxserve frontend", daemon=True).start()
            except RuntimeError as error:
                del self._running["frontend"]
                return error
        return None

    def _abandon(self, failure: RuntimeError) -> None:
        """End all requests, on the core's thread, as no other one tells of them."""
        frontend = self._engine.frontend
        try:
            frontend.abandon_all(failure)
        finally:
            del self._running["core"]
        if frontend.has_unfinished():  # listeners and other threads have submitted more since
            self._start()

    def _run_frontend(self) -> None:
        self._running["frontend"] = threading.get_ident()
        outbox, frontend, runs = self._engine.core.outbox, self._engine.frontend, True
        wait_s: float | None = None
        while runs:
            with contextlib.suppress(Empty):
                self._news.get(timeout=wait_s)
            try:
                frontend.deliver()
            except BaseException:
                logger.exception("requests are ended: their outputs could not be assembled")
            with self._lock:
                runs = "core" in self._running or bool(outbox)
                wait_s = self.wakes.wake(is_last=not runs)
                if not runs:
                    del self._running["frontend"]

    def _recover(self, error: BaseException) -> None:
        """End all requests, whatever the core knows of them; where that does not help, nobody is served any more."""
        core = self._engine.core
        try:
            core.recover(error)
        except BaseException:
            logger.exception("the engine is closed: it cannot go on")
            with contextlib.suppress(BaseException):
                self._engine.free()
            core.lose_all(error)


_threads: weakref.WeakSet[EngineThreads] = weakref.WeakSet()


def _stop_at_exit(threads: EngineThreads) -> None:
    """Stop threads ahead of runners, which are closed at exit, and of jax's clean-up."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)
    _threads.add(threads)


def _stop_all() -> None:
    for threads in list(_threads):
        threads.stop()
