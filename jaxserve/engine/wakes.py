"""Wakes: when threads that stream are told of their tokens."""

import time
from queue import SimpleQueue

from jaxserve.engine.frontend import Listener
from jaxserve.engine.outputs import RequestGroup

WAKE_S = 4e-3  # time between two wakes: each takes the interpreter for about 0.1 ms, so all take 3% of the time
MAX_AT_ONCE = 8  # threads woken at once; more would keep the engine's own threads from the interpreter


class Wakes:
    """Wakes streaming threads, one every WAKE_S on average, and at once for a request's first and last tokens.

    Waking a thread for a token takes longer than all other host work for it, and the engine's threads cannot run Python
    meanwhile. So the more threads stream, the more tokens each gets at once.
    """

    def __init__(self) -> None:
        self._asleep: dict[SimpleQueue[None], None] = {}  # queues of threads with news, longest wait first
        self._due_s = 0.0  # time of the next wake

    def listener(self, news: SimpleQueue[None]) -> Listener:
        """Return a listener of one request that wakes the thread which waits for `news`, at once or through `wake`."""
        is_told = False

        def listener(group: RequestGroup) -> None:
            nonlocal is_told
            if is_told and not group.output.finished:
                self._asleep.setdefault(news)
                return
            is_told = True
            self._asleep.pop(news, None)
            if news.empty():
                news.put(None)

        return listener

    def wake(self, *, is_last: bool = False) -> float | None:
        """Wake the threads whose turn it is, or all for the last time.

        Returns:
            Seconds until MAX_AT_ONCE wakes are due, unless the next step comes sooner; None where nobody waits for it.
            A look for each single wake would cost about as much as the wake.
        """
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - (MAX_AT_ONCE - 1) * WAKE_S)
        while self._asleep and (is_last or self._due_s <= now_s):
            news = next(iter(self._asleep))
            del self._asleep[news]
            self._due_s += 0 if is_last else WAKE_S
            if news.empty():
                news.put(None)
        return self._due_s + (MAX_AT_ONCE - 1) * WAKE_S - now_s if self._asleep else None
