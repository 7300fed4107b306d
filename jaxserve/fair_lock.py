"""FairLock: threads get it in the order in which they asked for it."""

import contextlib
import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that is handed to the thread that has waited longest.

    With `threading.Lock`, a thread that releases it and asks again at once mostly gets it before those that wait. An
    interrupt at any point leaves it whole: what threads share changes by single calls of a deque or a lock.
    """

    def __init__(self) -> None:
        self._threads: deque[tuple[int, threading.Lock]] = deque()  # with their gates: the holder, then those that wait

    def __enter__(self) -> None:
        own, gate = threading.get_ident(), threading.Lock()
        try:
            self._remove(own)  # left there by an interrupt: threads do not ask for it twice
            gate.acquire()
            self._threads.append((own, gate))
            self._open_first()
            gate.acquire()
        except BaseException:  # an interrupt: the others must not wait for this thread
            self.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def is_wanted_here(self) -> bool:
        """Whether the calling thread has the lock or waits for it, so that asking again would wait for ever."""
        return threading.get_ident() in [thread for thread, _ in tuple(self._threads)]

    def release(self) -> None:
        """Let the next thread have its turn, if this one has it; an interrupt meanwhile is raised afterwards."""
        try:
            self._remove(threading.get_ident())
            self._open_first()
        except BaseException:
            self._remove(threading.get_ident())
            self._open_first()
            raise

    def _remove(self, thread: int) -> None:
        for entry in tuple(self._threads):
            if entry[0] == thread:
                self._threads.remove(entry)

    def _open_first(self) -> None:
        """Let the first thread pass its gate; to open that again later changes nothing."""
        with contextlib.suppress(IndexError, RuntimeError):  # nobody is there; it is open
            self._threads[0][1].release()
