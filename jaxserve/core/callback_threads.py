"""Wakes: when threads that stream are told of their tokens."""

import time
from queue import SimpleQueue

from jaxserve.core.frontend import Listener
from jaxserve.core.growing_outputs import RequestGroup

WAKE_S = 4e-3  # time between two wakes: each takes the interpreter for about 0.1 ms, so all take 2.5% of the time
LONGEST_WAIT_S = 1.0  # time that a thread with news waits for its turn at most, about
MAX_AT_ONCE = 8  # threads woken at once; more would keep the engine's own threads from the interpreter


class Wakes:
    """Wakes streaming threads, one every WAKE_S on average, and at once for a request's first and last tokens.

    Where so many threads stream that each would wait longer than LONGEST_WAIT_S, wakes come more often.

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
        wake_s = min(WAKE_S, LONGEST_WAIT_S / max(len(self._asleep), 1))
        self._due_s = max(self._due_s, now_s - (MAX_AT_ONCE - 1) * wake_s)
        while self._asleep and (is_last or self._due_s <= now_s):
            news = next(iter(self._asleep))
            del self._asleep[news]
            self._due_s += 0 if is_last else wake_s
            if news.empty():
                news.put(None)
        return self._due_s + (MAX_AT_ONCE - 1) * wake_s - now_s if self._asleep else None
