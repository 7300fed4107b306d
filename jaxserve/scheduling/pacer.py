"""Pacer: chooses how many decode steps go in one dispatch, by measuring each program while serving.

A dispatch of several steps saves the host's work between steps, and the device's start and end of a program. In
exchange a request that comes meanwhile waits for it, and for the one planned behind it. Which of the two weighs more
depends on device, model and host, and on what else runs there. So both ways are timed side by side, in rounds; the one
that was faster in most of the latest rounds is taken, until the next round. Tokens are the same either way.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from jaxserve.scheduling.plan import StepShape

MAX_STEPS = 64  # most steps in one dispatch with multi_step="auto"
DISPATCH_S = 0.010  # time that several steps may take; a new request may have to wait for two dispatches
STRETCH = 8  # single steps timed together: each overlaps its neighbours
DISPATCHES = 2  # dispatches timed together: where the host sees the end of one late, the next one looks short
ROUNDS = 5  # measurements that decide; a noisy moment spoils one or two
REST_S = 2.0  # decoding between two rounds, which takes fifty times as long as they do


@dataclass(slots=True)
class _Trial:
    """One program's rounds: each a stretch of single steps, then dispatches of several, of one moment's noise."""

    limit: int  # steps that its program may go
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # time of a single step by one of several
    stretch: deque[float] = field(default_factory=lambda: deque(maxlen=STRETCH))  # seconds of the latest single steps
    multi: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=DISPATCHES))  # steps, seconds
    step_s: float = math.inf  # the latest, of either way
    rest_s: float = 0.0  # decoding time left until the next round

    def max_steps(self) -> int:
        """Most steps of the next dispatch."""
        goes_single = median(self.gains) <= 1 if self.rest_s > 0 else len(self.stretch) < STRETCH
        return 1 if goes_single else self._most_steps()

    def _most_steps(self) -> int:
        return max(1, min(int(DISPATCH_S / self.step_s), self.limit))

    def add_single(self, seconds: float) -> None:
        """Time one step that followed another one."""
        self.rest_s -= seconds
        if not self.stretch:
            self.multi.clear()
        self.stretch.append(seconds)
        if len(self.stretch) == STRETCH:
            self.step_s = sum(self.stretch) / STRETCH

    def add_multi(self, num_steps: int, seconds: float) -> None:
        """Time a dispatch of several steps that followed another one; one cut short says nothing of the others."""
        self.rest_s -= seconds
        if 2 * num_steps < self._most_steps():
            self.stretch.clear()
            return
        self.multi.append((num_steps, seconds))
        if len(self.multi) == DISPATCHES:
            single_s, self.step_s = self.step_s, sum(s for _, s in self.multi) / sum(n for n, _ in self.multi)
            if self.rest_s <= 0 and len(self.stretch) == STRETCH:
                self.gains.append(single_s / self.step_s)
                self.rest_s = REST_S if len(self.gains) == ROUNDS else 0.0
            self.stretch.clear()


class Pacer:
    """Chooses the number of steps of a dispatch. Times come in as numbers, of any clock.

    Args:
        multi_step: EngineConfig's: "auto" measures; a number is taken as far as programs go.
    """

    def __init__(self, multi_step: str | int) -> None:
        self._fixed = None if multi_step == "auto" else int(multi_step)
        self._trials: dict[StepShape, _Trial] = {}
        self._last: tuple[StepShape | None, int] = (None, 0)
        self._last_end_s = 0.0

    def max_steps(self, program: StepShape) -> int:
        """Return the most steps of the next dispatch, if all rows decode, by a program of several rounds."""
        return self._trial(program).max_steps() if self._fixed is None else min(self._fixed, program.num_rounds)

    def ended(self, program: StepShape | None, num_planned: int, num_steps: int, end_s: float) -> None:
        """Note the end of a dispatch in which all rows were in decode.

        Args:
            program: program of several rounds for so many rows; None if there is none.
            num_planned: steps that were planned.
            num_steps: steps that ran.
            end_s: time of the end.

        What counts is the time since the end before, so that whatever the host adds counts too.
        """
        if self._fixed is not None:
            return
        seconds, last = end_s - self._last_end_s, self._last
        self._last, self._last_end_s = (program, num_planned), end_s
        if program is None or program != last[0]:
            return
        trial = self._trial(program)
        if num_planned > 1 and last[1] > 1:
            trial.add_multi(num_steps, seconds)
        elif num_planned == last[1] == 1:
            trial.add_single(seconds)

    def _trial(self, program: StepShape) -> _Trial:
        if program not in self._trials:
            self._trials[program] = _Trial(program.num_rounds)
        return self._trials[program]

    def pause(self) -> None:
        """Note that nothing runs any more: what ends next has no end before it to count from."""
        self._last = (None, 0)
