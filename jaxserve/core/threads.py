"""EngineThreads: one thread each for the core and its frontend, as long as there is work.

The core's thread plans, launches and reads. The frontend's thread updates outputs, finds stop strings and calls
listeners while the device works. Callers on any thread submit, wait and cancel.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxserve.core.core_thread import LOOK_S
from jaxserve.core.stream_waker import StreamWaker

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.events import Event
    from jaxserve.core.frontend import Listener
    from jaxserve.core.growing_outputs import RequestGroup

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # maximum time to wait for the threads at process exit


class EngineThreads:
    """Drives an engine while requests are unfinished, for callers on any threads.

    A caller may be interrupted anywhere, these threads cannot. Callers therefore change shared state only by single
    operations on queues and dicts, and use locks that CPython releases on any interrupt. For the same reason callers
    start only the frontend's thread, which starts the core's.

    Args:
        engine: engine that nobody else steps while requests of these callers are unfinished.

    Attributes:
        waker: wakes streaming threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._driver = engine, engine.host.driver
        self._thread = 0  # id of the frontend's thread; 0 if there is none
        self._lock = threading.Lock()  # guards `_thread`, and the start of a pause
        self._pause = threading.Lock()  # held by the thread that has exclusive use of the engine
        self._pauser = 0  # id of the thread that took `_pause` last; 0 once it is released
        self.waker = StreamWaker()
        self._is_paused = self._is_stopped = False
        self._is_wanted = False  # True if requests of these callers are unfinished
        _stop_at_exit(self)

    def submit(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        """Queue requests from `RequestReader.read`; `listener` is called on another thread, and may submit more.

        Raises:
            RequestError: the engine is asleep or has no weights.
            RuntimeError: the engine is closed.
        """
        is_own = self._is_own_thread()  # a pause waits for this very thread, or belongs to it
        if self._is_stopped and not is_own:
            raise RuntimeError("the process is ending: no requests are served any more")
        with contextlib.nullcontext() if is_own else self._pause:
            if not is_own:
                self._is_paused, self._pauser = self._is_stopped, 0  # an interrupt may have come at the end of a pause
                self._driver.resume()
            self._engine.host.check_serve()
            try:
                for group in groups:
                    self._engine.frontend.start(group, listener)
            finally:  # requests queued before an interrupt can be cancelled
                self._is_wanted = True
                self._start()

    def send(self, event: Event) -> None:
        """Send an event to the core and start the threads if necessary; callable from any thread."""
        self._engine.host.send(event)
        self._is_wanted = True
        self._start()

    @contextmanager
    def paused(self, *, settles: bool = True) -> Iterator[Engine]:
        """Give the caller's thread exclusive use of the engine, between two steps. Requests that arrive meanwhile wait.

        Args:
            settles: True to take events and update outputs first, for which the core must respond.
        """
        if self._is_own_thread():
            raise RuntimeError("a listener must not wait for the engine's threads, as it runs on one; use another one")
        with self._pause:
            try:
                self._pauser = threading.get_ident()
                self._stop_threads()
                if settles:
                    self._engine.settle()
                yield self._engine
            finally:
                self._pauser = 0
                self._is_paused = self._is_stopped
                self._driver.resume()
                self._start()

    def _is_own_thread(self) -> bool:
        """Return whether the caller is the frontend's thread, or the thread with exclusive use of the engine."""
        own = threading.get_ident()
        return own == self._thread or (own == self._pauser and self._pause.locked())

    def stop(self) -> None:
        """Stop the threads for good, after the current step."""
        self._is_stopped = True
        self._stop_threads(PATIENCE_S)
        self._driver.resume()  # other engines may use it

    def _stop_threads(self, timeout_s: float = math.inf) -> None:
        """Pause both threads, and wait at most `timeout_s` seconds until they have ended."""
        with self._lock:
            self._is_paused = True
        self._driver.pause()
        until_s = time.monotonic() + timeout_s
        while (self._thread or self._driver.is_running) and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def _start(self) -> None:
        """Start the frontend's thread if there is work, unless it runs or is paused; a second one ends immediately."""
        if self._is_wanted and not self._is_paused and not self._thread:
            threading.Thread(target=self._run, name="jaxserve frontend", daemon=True).start()

    def _run(self) -> None:
        """Start the core's thread and deliver its deltas, until no work is left; the body of the frontend's thread."""
        with self._lock:
            if self._is_paused or self._thread:
                return
            self._thread = threading.get_ident()
        driver, frontend, outbox = self._driver, self._engine.frontend, self._engine.host.outbox
        wait_s: float | None = None
        runs = True
        while runs:
            is_alone = False  # True if the core's thread cannot be started
            try:
                is_alone = not self._drive()
                if driver.is_running:
                    driver.wait(wait_s)
                frontend.deliver()
            except BaseException:
                logger.exception("requests are ended: their outputs could not be assembled")
            with self._lock:
                has_work = frontend.has_unfinished() if is_alone else driver.has_work()
                runs = driver.is_running or bool(outbox) or (has_work and not self._is_paused)
                wait_s = self.waker.wake(is_last=not runs)
                if not runs:
                    self._is_wanted, self._thread = has_work, 0
        # A caller that queued a request meanwhile has not started another thread, because this one still ran.
        if frontend.has_unfinished() if is_alone else driver.has_work():
            self._is_wanted = True
            self._start()

    def _drive(self) -> bool:
        """Start the core's driver; if that is impossible, end all requests and return False."""
        try:
            self._driver.start()
        except RuntimeError as error:
            self._engine.frontend.abandon_all(error)
            return False
        return True


_threads: weakref.WeakSet[EngineThreads] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # a fork has no threads to wait for


def _stop_at_exit(threads: EngineThreads) -> None:
    """Make the interpreter stop `threads` at exit, before it closes runners and before jax's clean-up.

    Exit functions run in reverse order of registration, so the common one is registered anew for each engine.
    """
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)
    _threads.add(threads)


def _stop_all() -> None:
    for threads in list(_threads):
        threads.stop()
