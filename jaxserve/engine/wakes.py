"""Wakes: when threads that stream get to know of their tokens."""

import time
from queue import SimpleQueue

from jaxserve.engine.outputs import RequestGroup

WAKE_S = 2e-3  # of time for each thread that is woken: some twenty times as long as that takes


class Wakes:
    """Wakes the threads that stream: one each WAKE_S on average, but for the first tokens and the last of a request.

    To wake a thread for a token takes longer than all else that the host does for it, and what the threads of a process
    do in Python the engine's own cannot do meanwhile. So the more threads there are, the more tokens come at once.
    """

    def __init__(self) -> None:
        self._asleep: dict[SimpleQueue[None], None] = {}  # that have news, longest first
        self._due_s = 0.0

    def note(self, news: SimpleQueue[None], group: RequestGroup) -> None:
        """Have whoever waits for `news` of a request woken: now, or by `wake`."""
        if group.output.finished or len(group.output.outputs[0].token_ids) <= 1:
            self._asleep.pop(news, None)
            news.put(None)
        else:
            self._asleep[news] = None

    def wake(self, *, is_last: bool = False) -> float | None:
        """Wake whoever may be woken, and the last time all; returns the seconds to wait where some may not be yet."""
        if not self._asleep:
            return None
        if (left_s := self._due_s - time.monotonic()) > 0.0 and not is_last:
            return left_s
        self._due_s = time.monotonic() + len(self._asleep) * WAKE_S
        for waiting in self._asleep:
            if waiting.empty():
                waiting.put(None)
        self._asleep.clear()
        return None
