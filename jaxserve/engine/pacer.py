"""How many decode steps go in one dispatch: measured while serving, for each bucket by itself.

A burst saves the host's work between steps, and the device's start and end of a program. In exchange nothing is
planned while it runs, and a request that comes then waits for its end. Which of the two weighs more depends on device,
model and host, so both ways are timed in turn, a few times, and the faster one stays. Tokens are the same either way.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from jaxserve.config import MAX_BURST_STEPS

BURST_S = 0.020  # that a burst may take
SAMPLES = 3  # of each way before one is chosen
STRETCH = 8  # single steps in one sample: each overlaps its neighbours


@dataclass(slots=True)
class _Trial:
    """Seconds per step of one bucket, going step by step and in bursts."""

    single_s: list[float] = field(default_factory=list)
    burst_s: list[float] = field(default_factory=list)
    latest_s: float = math.inf  # of either
    stretch: list[float] = field(default_factory=list)  # of the sample of single steps in the making

    def goes_single(self) -> bool:
        """Whether single steps are to be timed next, or have been found the faster way."""
        if len(self.burst_s) < SAMPLES:
            return len(self.single_s) <= len(self.burst_s)
        return median(self.single_s) <= median(self.burst_s)

    def num_steps(self) -> int:
        """Steps that fit the time of a burst."""
        return max(1, min(int(BURST_S / self.latest_s), MAX_BURST_STEPS))

    def add_single(self, seconds: float) -> None:
        """Time one step that followed another one."""
        self.stretch.append(seconds)
        if len(self.stretch) == STRETCH:
            self.latest_s = sum(self.stretch) / STRETCH
            self.single_s = [*self.single_s, self.latest_s][-SAMPLES:]
            self.stretch = []

    def add_burst(self, num_steps: int, seconds: float) -> None:
        """Time a burst; one cut short says nothing of the others."""
        if 2 * num_steps >= self.num_steps():
            self.latest_s = seconds / num_steps
            if len(self.burst_s) < min(SAMPLES, len(self.single_s)):
                self.burst_s.append(self.latest_s)


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
        if self._fixed is not None:
            return self._fixed
        trial = self._trials[bucket]
        return 1 if trial.goes_single() else trial.num_steps()

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
        if num_steps > 1:
            trial.add_burst(num_steps, seconds)
        elif last[1] == 1:
            trial.add_single(seconds)
