"""StepTime: how long steps take, learnt from those that have ended, for whoever has to foretell the next ones.

Steps of any rows and prompts are foretold by `Rates`, which are fitted to all. Of dispatches that only the rows in
decode take part in, the times are kept by program and kind, too: which kind is faster depends on less than a fit tells.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.step_plan import StepShape

SINGLE, SEVERAL = 0, -1  # kinds of plain dispatches by their steps, beside numbers of drafted tokens
STRETCH = {SINGLE: 8, SEVERAL: 3}  # steps, or dispatches, timed together: each overlaps its neighbours, or ends late
FRESH = 5  # samples of the usual kind between two probes, so that how fast the machine is now is known
_TRIALS = 2  # samples of a kind before it is judged
_MAX_TRIALS = 4  # samples of a kind whose dispatches are shorter than they may be
_KEPT_SAMPLES = 0.85  # weight of all earlier samples of a kind when another one comes
_MAX_SLOWDOWN = 2.0  # a sample counts as at most so many times slower than those before
_ROUND_PER_STEP = 3.0  # plain steps in the time of a round, before that is known
_KEPT = 0.99  # weight of all earlier steps when another one comes: some hundred steps count
_MIN_STEPS = 3.0  # sum of the weights below which nothing is foretold
_MAX_OVERRUN = 4.0  # a step counts as at most so many times longer than it was foretold: others may use the machine
_FIT_INTERVAL = 16  # measurements taken at once
# Spread of what is expected before any step is measured, by which it weighs less than steps, relative to:
_NOISE = 0.3  # the time of a step: that of measurements
_TOKEN = 0.1  # the time of a step: a token, expected to take none
_STEP = 0.3  # the time of a step without tokens: steps with prompt tokens and those without, expected to be the same
_KIND = 0.5  # the time of a token: prompt tokens and rows, expected to differ as their FLOPs do
_MIN_S = 1e-9  # time of a dispatch, and mean time of a step, on a device that takes none
_MIN_TOKEN = 1 / 500  # the time of a step: the least time of a token to which `_KIND` is relative


class Rates(NamedTuple):
    """Times of the parts of a step, and what it comes to.

    Attributes:
        prefill_step_s: time of a step with prompt tokens, before it computes any.
        decode_step_s: time of a step of rows in decode alone, before it computes any.
        prefill_token_s: time of a prompt token.
        decode_token_s: time of a row in decode.
        tokens_per_row: tokens that a row in decode gets in a step; more than one with accepted drafts.
        drafting_rows: most rows in decode that lately got more than one: with more rows, drafts may not pay.
    """

    prefill_step_s: float
    decode_step_s: float
    prefill_token_s: float
    decode_token_s: float
    tokens_per_row: float = 1.0
    drafting_rows: float = 0.0

    def row_tokens(self, num_rows: int | float) -> float:
        """Return the tokens that each of `num_rows` decoding rows gets in a step."""
        return self.tokens_per_row if num_rows <= self.drafting_rows else min(self.tokens_per_row, 1.0)

    def step_s(self, num_prefill_tokens: int | float, num_rows: int | float) -> float:
        """Return the time of a step of so many prompt tokens and rows in decode."""
        fixed_s = self.prefill_step_s if num_prefill_tokens else self.decode_step_s
        return fixed_s + num_prefill_tokens * self.prefill_token_s + num_rows * self.decode_token_s


@dataclass(slots=True)
class _Samples:
    """Latest samples of one kind of dispatch, each of less weight than those after it.

    Attributes:
        num: samples so far.
        max_rounds: most rounds of a dispatch among them.
        rounds: sum of their rounds, by how slow the machine was.
        seconds: sum of their times.
        measured_s: time of the latest dispatch.
    """

    num: int = 0
    max_rounds: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0
    measured_s: float = -math.inf


@dataclass(slots=True)
class DispatchTimes:
    """Times of one program's dispatches: seconds per round by the number of drafted tokens, and of plain steps.

    A machine is now faster, now slower, and a kind that is not in use is measured seldom. So what is kept are the
    samples of probes, as multiples of `slowness`, and all others tell `slowness`: it is known from the usual kind when
    a probe begins. Samples of a kind that was usual just before would be kept with the slowness of another moment.

    A dispatch has a start and an end, so that a round of a long dispatch takes less than one of a short dispatch. Of a
    kind that was measured in short dispatches only, as at first, before its time is known, more are measured.

    Attributes:
        kinds: samples by kind.
        has_scouts: True if a few of the rows can show the acceptance of drafts, and need to.
        slowness: time that a dispatch takes now, as a multiple of what is kept.
        num_usual: samples since the latest one of a probe.
        stretch_kind: kind of the latest dispatch.
        stretch: number, rounds and seconds of the latest dispatches, all of that kind, that are in no sample yet.
        several_s: seconds of a step in each of the latest two dispatches of several.
    """

    kinds: defaultdict[int, _Samples] = field(default_factory=lambda: defaultdict(_Samples))
    has_scouts: bool = False
    slowness: float = 1.0
    num_usual: int = 0
    stretch_kind: int = SINGLE
    stretch: tuple[int, int, float] = (0, 0, 0.0)
    several_s: tuple[float, float] = (0.0, 0.0)

    def add(self, kind: int, num_rounds: int, seconds: float, now_s: float, *, is_probe: bool) -> bool:
        """Add the time of a dispatch; return whether it ends a sample: one of drafts, or a stretch of plain ones."""
        samples, seconds = self.kinds[kind], max(seconds, _MIN_S)
        samples.measured_s = now_s
        if kind == SEVERAL:
            self.several_s = (self.several_s[1], seconds / num_rounds)
        length, earlier, earlier_s = self.stretch if kind == self.stretch_kind else (0, 0, 0.0)
        length, num_rounds, seconds = length + 1, earlier + num_rounds, earlier_s + seconds
        if (num_rounds if kind == SINGLE else length) < STRETCH.get(kind, 1):
            self.stretch_kind, self.stretch = kind, (length, num_rounds, seconds)
            return False
        self.stretch = (0, 0, 0.0)
        if samples.num >= _TRIALS:
            seconds = min(seconds, _MAX_SLOWDOWN * num_rounds * self.round_s(kind))
        self.num_usual = 0 if is_probe else self.num_usual + 1
        if samples.num >= _MAX_TRIALS and not is_probe:
            self.slowness += (seconds / num_rounds * samples.rounds / samples.seconds - self.slowness) / FRESH
        else:
            samples.num += 1
            samples.max_rounds = max(samples.max_rounds, num_rounds / length)
            samples.rounds = _KEPT_SAMPLES * samples.rounds + num_rounds * self.slowness
            samples.seconds = _KEPT_SAMPLES * samples.seconds + seconds
        return True

    def round_s(self, kind: int) -> float:
        """Return the seconds per round of a kind of dispatch; infinite for one that was not measured."""
        samples = self.kinds[kind]
        return samples.seconds / samples.rounds * self.slowness if samples.num else math.inf

    @property
    def step_s(self) -> float:
        """Seconds of a plain step of the faster kind."""
        return min(self.round_s(SINGLE), self.round_s(SEVERAL))

    def guess_s(self, num_drafts: int) -> float:
        """Return the seconds per round of a number of drafts, or an estimate before any was measured."""
        if self.kinds[num_drafts].num:
            return self.round_s(num_drafts)
        known = [self.round_s(k) for k, samples in self.kinds.items() if k > 0 and samples.num]
        return max(known) if known else _ROUND_PER_STEP * self.round_s(SINGLE)

    def is_tried(self, kind: int, num_rounds: int) -> bool:
        """Return whether a kind of dispatch, that would have so many rounds now, was measured enough to judge it."""
        samples = self.kinds[kind]
        return samples.num >= (_TRIALS if 2 * samples.max_rounds >= num_rounds else _MAX_TRIALS)

    def rounds_s(self, max_drafts: int, plain_s: float) -> list[float]:
        """Return the seconds per round for each k from 0; where k was measured little, on a line by least squares."""
        k = np.array([k for k, samples in self.kinds.items() if k > 0 and samples.num], np.float64)
        seconds = np.array([self.round_s(int(each)) for each in k])
        weights = np.array([self.kinds[int(each)].rounds for each in k])
        mean_k, mean_s = np.average(k, weights=weights), np.average(seconds, weights=weights)
        spread = float(np.sum(weights * (k - mean_k) ** 2))
        slope = float(np.sum(weights * (k - mean_k) * (seconds - mean_s))) / spread if spread else mean_s / k[0] / 2
        line = [max(float(mean_s + (each - mean_k) * max(slope, 0.0)), plain_s) for each in range(1, max_drafts + 1)]
        well_known = {each: self.round_s(each) for each, samples in self.kinds.items() if samples.num >= _MAX_TRIALS}
        return [plain_s, *(well_known.get(each, s) for each, s in enumerate(line, 1))]


class StepTime:
    """Times of dispatches, and of all steps by least squares, with none of the four times below zero. It has no clock.

    A step that is like the latest ones is foretold well, whatever the device: rates of a load that has passed fade.
    Steps are taken several at once, as a fit takes as long as planning a step.

    What the steps so far do not tell apart is what they have in common. A step with prompt tokens and one without take
    the same time before they compute any. The time of a prompt token shows the time of a row, by the FLOPs of both, as
    single requests never show the time of a second row. Without prompts of several tokens all time is that of the step.

    Args:
        row_factor: FLOPs of a row in decode as a multiple of those of a prompt token.
    """

    def __init__(self, row_factor: float = 1.0) -> None:
        self._row_factor = row_factor
        self._dispatches: defaultdict[StepShape, DispatchTimes] = defaultdict(DispatchTimes)
        self._products = np.zeros((4, 5))  # products of the counts of a step with each other and its time
        # Sums: steps, times like those of the latest, prompt tokens, rows in decode, sampled and cached tokens.
        self._totals = np.zeros(6)
        self._drafting_rows = 0.0
        self._rates: Rates | None = None
        self._untaken: list[tuple[float, ...]] = []

    def ended(
        self,
        wall_s: float,
        *,
        num_prefill_tokens: int,
        num_rows: int,
        num_steps: int = 1,
        num_sampled: int | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Take the measurement of a dispatch.

        Args:
            wall_s: time that it took, or by which it ended later than the one before.
            num_prefill_tokens: prompt tokens.
            num_rows: rows in decode in its first step.
            num_steps: steps, all of rows in decode if there are several.
            num_sampled: tokens that the rows in decode sampled; None for one each and step.
            num_cached_tokens: tokens of the prompts it started that were cached.
        """
        row_steps = num_rows * num_steps
        prefill_steps, decode_steps = (1, 0) if num_prefill_tokens else (0, num_steps)
        sampled = row_steps if num_sampled is None else num_sampled
        self._drafting_rows = max(_KEPT * self._drafting_rows, num_rows if sampled > row_steps else 0)
        counts = (prefill_steps, decode_steps, num_prefill_tokens, row_steps, sampled, num_cached_tokens)
        self._untaken.append((wall_s, *counts))
        if len(self._untaken) >= _FIT_INTERVAL or self._totals[0] < _FIT_INTERVAL:
            self._take()

    def _take(self) -> None:
        """Take the measurements so far, and fit the rates."""
        measured = np.array(self._untaken, np.float64)
        counts, wall_s = measured[:, 1:5], measured[:, 0]
        typical_s = wall_s
        if self._rates is not None:
            predicted_s = counts @ np.array(self._rates[:4])
            typical_s = np.where(predicted_s > 0, predicted_s, wall_s)
        # Relative errors count, by the time foretold: by the time measured, mean rates would be too low.
        decay, kept = _KEPT ** np.arange(len(measured))[::-1], _KEPT ** len(measured)
        weights = (decay / np.maximum(typical_s, 1e-6) ** 2)[:, None] * counts
        wall_s = np.minimum(wall_s, _MAX_OVERRUN * typical_s)
        self._products = kept * self._products + weights.T @ np.column_stack([counts, wall_s])
        ones, step_s = np.ones(len(measured)), wall_s / counts[:, :2].sum(axis=1)
        self._totals = kept * self._totals + decay @ np.column_stack([ones, step_s, measured[:, 3:]])
        self._untaken.clear()
        if self._totals[0] >= _MIN_STEPS:
            _, _, _, num_rows, num_sampled, _ = self._totals.tolist()
            per_row = num_sampled / num_rows if num_rows else 1.0
            self._rates = Rates._make([*self._fit().tolist(), max(per_row, 1e-3), self._drafting_rows])

    def _fit(self) -> NDArray[np.float64]:
        """Return the four times: of what all steps have in common, then moved as far as steps tell them apart."""
        common = np.array([[1, 0], [1, 0], [0, 1], [0, self._row_factor]], np.float64)
        products, times = self._products[:, :4], self._products[:, 4]
        mean_s = max(self._totals[1] / self._totals[0], _MIN_S)
        few = np.diag([0.0, (_NOISE / (_TOKEN * mean_s)) ** 2])
        step_s, token_s = _non_negative_fit(common.T @ products @ common + few, common.T @ times)
        least_s = max(token_s, _MIN_TOKEN * step_s, _MIN_TOKEN * _MIN_S)
        expected = common @ np.array([step_s, token_s])
        spread = common @ np.array([_STEP * max(step_s, mean_s / 10), _KIND * least_s])
        weights = (_NOISE / spread) ** 2
        return _non_negative_fit(products + np.diag(weights), times + weights * expected)

    def dispatches(self, program: StepShape) -> DispatchTimes:
        """Return the times of a program's dispatches without prompt tokens."""
        return self._dispatches[program]

    def rates(self) -> Rates | None:
        """Return the times by the latest steps; None as long as there were too few. From any thread."""
        return self._rates

    @property
    def cached_fraction(self) -> float:
        """Share of prompt tokens that were found in the cache."""
        _, _, num_computed, _, _, num_cached = self._totals.tolist()
        return num_cached / (num_cached + num_computed) if num_cached else 0.0


def _non_negative_fit(products: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares' solution without negative entries: those that would be are left out, one by one."""
    size = np.sqrt(np.maximum(products.diagonal(), 0.0))
    left = [index for index in range(len(times)) if size[index] > 0]
    solution = np.zeros(len(times))
    while left:
        # Scaled to a diagonal of ones, so that rounding is the same for every count.
        scale = size[left]
        part = np.linalg.solve(products[np.ix_(left, left)] / np.outer(scale, scale), times[left] / scale) / scale
        if part.min() >= 0:
            solution[left] = part
            break
        del left[int((part * scale).argmin())]
    return solution
