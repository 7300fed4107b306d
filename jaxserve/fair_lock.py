"""FairLock: threads get it in the order in which they asked for it."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that is handed to the thread that has waited longest.

    With `threading.Lock`, a thread that releases it and asks again at once mostly gets it before those that wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: deque[int] = deque()  # the holder first, then those that wait

    def __enter__(self) -> None:
        own = threading.get_ident()
        try:
            with self._changed:
                if own in self._threads:  # left there by an interrupt: threads do not ask for it twice
                    self._threads.remove(own)
                self._threads.append(own)
                self._changed.wait_for(lambda: self._threads[0] == own)
        except BaseException:  # an interrupt: the others must not wait for this thread
            self._release(own)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release(threading.get_ident())

    def is_wanted_here(self) -> bool:
        """Whether the calling thread has the lock or waits for it, so that asking again would wait for ever."""
        return threading.get_ident() in tuple(self._threads)

    def _release(self, thread: int) -> None:
        """Let the next thread have its turn; an interrupt meanwhile is raised afterwards."""
        interrupt: KeyboardInterrupt | None = None
        while thread in self._threads:
            try:
                with self._changed:
                    if thread in self._threads:
                        self._threads.remove(thread)
                    self._changed.notify_all()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
