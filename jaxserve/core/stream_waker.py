"""StreamWaker: decides when streaming threads wake up for their tokens."""

import time
from queue import SimpleQueue

from jaxserve.core.frontend import Listener
from jaxserve.core.growing_outputs import RequestGroup

# mean time between two wake-ups: each takes the interpreter for about 0.1 ms, so all take 2.5% of the time
WAKE_S = 4e-3
MAX_WAIT_S = 1.0  # approximate maximum time that a thread with new tokens waits for its turn
MAX_SIMULTANEOUS = 8  # threads woken together; more would keep the engine's own threads from the interpreter


class StreamWaker:
    """Wakes streaming threads, one per WAKE_S on average; immediately for a request's first and last tokens.

    Wake-ups come more often if so many threads stream that each would wait longer than MAX_WAIT_S.

    Waking a thread for a token takes longer than all other host work for it, and blocks Python in the engine's threads.
    The more threads stream, the more tokens each therefore gets per wake-up.
    """

    def __init__(self) -> None:
        self._asleep: dict[SimpleQueue[None], None] = {}  # queues of threads with new tokens, longest wait first
        self._due_s = 0.0  # time of the next wake-up

    def listener(self, news: SimpleQueue[None]) -> Listener:
        """Return a request listener that wakes the thread blocked on the queue `news` when the request has new output.

        It wakes the thread immediately for the first and last output; later ones wait for `wake`, which limits the
        rate.
        """
        is_notified = False

        def listener(group: RequestGroup) -> None:
            nonlocal is_notified
            if is_notified and not group.output.finished:
                self._asleep.setdefault(news)
                return
            is_notified = True
            self._asleep.pop(news, None)
            if news.empty():
                news.put(None)

        return listener

    def wake(self, *, is_last: bool = False) -> float | None:
        """Wake as many waiting threads as are due, the longest wait first; all of them if `is_last`.

        Returns:
            Seconds until MAX_SIMULTANEOUS wake-ups are due, unless the next step comes sooner; None if no thread waits.
            Checking for each single wake-up would cost about as much as the wake-up.
        """
        now_s = time.monotonic()
        wake_s = min(WAKE_S, MAX_WAIT_S / max(len(self._asleep), 1))
        self._due_s = max(self._due_s, now_s - (MAX_SIMULTANEOUS - 1) * wake_s)
        while self._asleep and (is_last or self._due_s <= now_s):
            news = next(iter(self._asleep))
            del self._asleep[news]
            self._due_s += 0 if is_last else wake_s
            if news.empty():
                news.put(None)
        return self._due_s + (MAX_SIMULTANEOUS - 1) * wake_s - now_s if self._asleep else None
