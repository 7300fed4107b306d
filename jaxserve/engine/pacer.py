"""How many decode steps go in one dispatch: measured while serving, for each bucket by itself.

A burst saves the host's work between steps, and the device's start and end of a program. In exchange nothing but
another burst is planned while it runs, and a request that comes then waits for both. Which of the two weighs more
depends on device, model and host, and on what else runs there. So both ways are timed side by side, in rounds; the one
that was faster in most of the latest rounds is taken, until the next round. Tokens are the same either way.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from jaxserve.config import MAX_BURST_STEPS

BURST_S = 0.010  # that a burst may take; a new request may have to wait for two
STRETCH = 8  # single steps timed together: each overlaps its neighbours
BURSTS = 2  # timed together: where the host sees the end of one late, the next one looks short
ROUNDS = 5  # that decide; a noisy moment spoils one or two
REST_S = 2.0  # of decoding from one round to the next, which takes a fiftieth of it


@dataclass(slots=True)
class _Trial:
    """One bucket's rounds. A round is a stretch of single steps and then bursts, of a moment with equal noise."""

    gains: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # a single step's time by a burst's
    stretch: deque[float] = field(default_factory=lambda: deque(maxlen=STRETCH))  # seconds of the latest single steps
    bursts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=BURSTS))  # steps, seconds
    step_s: float = math.inf  # the latest, of either way
    rest_s: float = 0.0  # until the next round

    def max_steps(self) -> int:
        """Most steps of the next dispatch."""
        goes_single = median(self.gains) <= 1 if self.rest_s > 0 else len(self.stretch) < STRETCH
        return 1 if goes_single else self._burst_steps()

    def _burst_steps(self) -> int:
        return max(1, min(int(BURST_S / self.step_s), MAX_BURST_STEPS))

    def add_single(self, seconds: float) -> None:
        """Time one step that followed another one."""
        self.rest_s -= seconds
        if not self.stretch:
            self.bursts.clear()
        self.stretch.append(seconds)
        if len(self.stretch) == STRETCH:
            self.step_s = sum(self.stretch) / STRETCH

    def add_burst(self, num_steps: int, seconds: float) -> None:
        """Time a burst that followed another one; one cut short says nothing of the others."""
        self.rest_s -= seconds
        if 2 * num_steps < self._burst_steps():
            self.stretch.clear()
            return
        self.bursts.append((num_steps, seconds))
        if len(self.bursts) == BURSTS:
            single_s, self.step_s = self.step_s, sum(s for _, s in self.bursts) / sum(n for n, _ in self.bursts)
            if self.rest_s <= 0 and len(self.stretch) == STRETCH:
                self.gains.append(single_s / self.step_s)
                self.rest_s = REST_S if len(self.gains) == ROUNDS else 0.0
            self.stretch.clear()


class Pacer:
    """Chooses the length of bursts. Times come in as numbers, of any clock.

    Args:
        burst: EngineConfig's: "auto" measures; a number is taken as it is.
    """

    def __init__(self, burst: str | int) -> None:
        self._fixed = None if burst == "auto" else int(burst)
        self._trials: defaultdict[int, _Trial] = defaultdict(_Trial)
        self._last: tuple[int | None, int] = (None, 0)
        self._last_end_s = 0.0

    def max_steps(self, bucket: int) -> int:
        """Most steps of the next dispatch of rows in decode; 1 is no burst."""
        return self._trials[bucket].max_steps() if self._fixed is None else self._fixed

    def ended(self, bucket: int | None, num_steps: int, end_s: float) -> None:
        """Note the end of a dispatch of `num_steps` steps; `bucket` is None where not all rows were in decode.

        What counts is the time since the end before, so that whatever the host adds counts too.
        """
        if self._fixed is not None:
            return
        seconds, last = end_s - self._last_end_s, self._last
        self._last, self._last_end_s = (bucket, num_steps), end_s
        if bucket is None or bucket != last[0]:
            return
        trial = self._trials[bucket]
        if num_steps > 1 and last[1] > 1:
            trial.add_burst(num_steps, seconds)
        elif num_steps == last[1] == 1:
            trial.add_single(seconds)

    def pause(self) -> None:
        """Note that nothing runs any more: what ends next has no end before it to count from."""
        self._last = (None, 0)
