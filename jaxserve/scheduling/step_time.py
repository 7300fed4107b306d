"""StepTime: predicts step times from the measured times of earlier steps.

`Rates`, fitted to all steps, predict a step with any rows and prompts. Dispatches with only decoding rows are also
timed by program and kind: the difference between kinds is smaller than the fit error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.step_plan import StepShape

SINGLE, SEVERAL = 0, -1  # plain dispatch kinds: one step, several; positive kinds count drafted tokens
STRETCH = {SINGLE: 8, SEVERAL: 3}  # steps, or dispatches, timed together: each overlaps its neighbours, or ends late
FRESH = 5  # usual samples between two probes, so that the machine's current speed is known
_TRIALS = 2  # samples per kind before it is judged
_MAX_TRIALS = 4  # the same for a kind measured only in short dispatches
_KEPT_SAMPLES = 0.85  # weight of earlier samples in a kind when another one arrives
_MAX_SLOWDOWN = 2.0  # maximum slowdown with which a sample counts, relative to earlier ones
_ROUND_PER_STEP = 3.0  # assumed time of a round, in plain steps
_KEPT = 0.99  # weight of earlier steps when another one arrives: a hundred steps dominate
_MIN_STEPS = 3.0  # minimum total weight for a prediction
_MAX_OVERRUN = 4.0  # maximum ratio of measured to predicted time with which a step counts: others may use the machine
_FIT_INTERVAL = 16  # measurements between two fits
# Standard deviations of the prior, relative to:
_NOISE = 0.3  # the step time: measurements
_TOKEN = 0.1  # the step time: a token, expected to take no time
_STEP = 0.3  # the step time: steps with and without prompt tokens, expected to take the same fixed time
_KIND = 0.5  # the token time: prompt tokens and rows, expected to differ as their FLOPs do
_MIN_S = 1e-9  # minimum dispatch time and mean step time
_MIN_TOKEN = 1 / 500  # minimum token time to which `_KIND` is relative, as a fraction of the step time


class Rates(NamedTuple):
    """Component times per step, and tokens per row.

    Attributes:
        prefill_step_s: fixed time per step with prompt tokens.
        decode_step_s: fixed time per step with only decoding rows.
        prefill_token_s: time per prompt token.
        decode_token_s: time per decoding row.
        tokens_per_row: tokens per decoding row and step; more than one with accepted drafts.
        drafting_rows: maximum decoding rows that recently got more than one token: with more rows, drafts may not pay.
    """

    prefill_step_s: float
    decode_step_s: float
    prefill_token_s: float
    decode_token_s: float
    tokens_per_row: float = 1.0
    drafting_rows: float = 0.0

    def row_tokens(self, num_rows: int | float) -> float:
        """Return the mean tokens per row in a step with `num_rows` decoding rows."""
        return self.tokens_per_row if num_rows <= self.drafting_rows else min(self.tokens_per_row, 1.0)

    def step_s(self, num_prefill_tokens: int | float, num_rows: int | float) -> float:
        """Return the predicted time in seconds of a step with these prompt tokens and decoding rows."""
        fixed_s = self.prefill_step_s if num_prefill_tokens else self.decode_step_s
        return fixed_s + num_prefill_tokens * self.prefill_token_s + num_rows * self.decode_token_s


@dataclass(slots=True)
class _Samples:
    """Decayed samples for one dispatch kind.

    Attributes:
        num: samples so far.
        max_rounds: maximum rounds per dispatch.
        rounds: decayed sum of rounds, weighted by the machine's slowness.
        seconds: decayed sum of times.
        measured_s: end time of the latest dispatch.
    """

    num: int = 0
    max_rounds: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0
    measured_s: float = -math.inf


@dataclass(slots=True)
class DispatchTimes:
    """Dispatch times for one program: seconds per round by draft length, and per plain step.

    A machine's speed varies, and a kind that is not in use is rarely measured. Samples of probes are therefore stored
    as multiples of `slowness`, and all other samples update `slowness`, so that the usual kind determines it when a
    probe begins. Samples of a kind that was usual until recently would be stored with an outdated slowness.

    A dispatch has fixed costs, so a round takes less time in a long dispatch than in a short one. A kind measured only
    in short dispatches, as happens before its time is known, is measured more often.

    Attributes:
        kinds: samples by kind.
        has_scouts: True if a few drafting rows suffice, and are needed, to measure acceptance.
        slowness: current dispatch time as a multiple of the stored time.
        num_usual: samples since the latest probe.
        stretch_kind: latest kind.
        stretch: number, rounds and seconds of the latest dispatches of that kind that are in no sample yet.
        several_s: seconds per step in each of the latest two dispatches with several steps.
    """

    kinds: defaultdict[int, _Samples] = field(default_factory=lambda: defaultdict(_Samples))
    has_scouts: bool = False
    slowness: float = 1.0
    num_usual: int = 0
    stretch_kind: int = SINGLE
    stretch: tuple[int, int, float] = (0, 0, 0.0)
    several_s: tuple[float, float] = (0.0, 0.0)

    def add(self, kind: int, num_rounds: int, seconds: float, now_s: float, *, is_probe: bool) -> bool:
        """Add a dispatch time; return whether it completes a sample: a draft round or a plain stretch.

        Args:
            kind: SINGLE, SEVERAL, or number of drafted tokens.
            num_rounds: executed rounds or steps.
            seconds: time of the dispatch.
            now_s: end time.
            is_probe: True if the dispatch is a probe, False if its kind is the usual one.
        """
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
        """Return the seconds per round of a dispatch kind; infinite before it was measured."""
        samples = self.kinds[kind]
        return samples.seconds / samples.rounds * self.slowness if samples.num else math.inf

    @property
    def step_s(self) -> float:
        """Seconds per plain step, with the faster of the two plain kinds."""
        return min(self.round_s(SINGLE), self.round_s(SEVERAL))

    def guess_s(self, num_drafts: int) -> float:
        """Return the seconds per round that drafts `num_drafts` tokens.

        Before that draft length was measured, this is the slowest measured round's time; before any was, a multiple
        of a plain step's time.
        """
        if self.kinds[num_drafts].num:
            return self.round_s(num_drafts)
        known = [self.round_s(k) for k, samples in self.kinds.items() if k > 0 and samples.num]
        return max(known) if known else _ROUND_PER_STEP * self.round_s(SINGLE)

    def is_tried(self, kind: int, num_rounds: int) -> bool:
        """Return whether a dispatch kind has enough samples to be judged.

        It needs more of them if its next dispatch, with `num_rounds` rounds, is over twice as long as any measured one.
        """
        samples = self.kinds[kind]
        return samples.num >= (_TRIALS if 2 * samples.max_rounds >= num_rounds else _MAX_TRIALS)

    def rounds_s(self, max_drafts: int, plain_s: float) -> list[float]:
        """Return the seconds per round for each draft length from 0 to `max_drafts`, if at least one was measured.

        Lengths with enough samples have their measured times. A least-squares line through all measured lengths
        estimates the others.

        Args:
            max_drafts: maximum draft length.
            plain_s: seconds per plain step: the result for length 0, and a lower bound for estimates.
        """
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
    """Dispatch times, and a non-negative least-squares fit of four rates to all steps. It has no clock.

    Steps like the latest ones are predicted well on any device; rates from an earlier load fade. Measurements are
    fitted in batches, because a fit takes as long as planning a step.

    A prior decides whatever the steps do not distinguish. Fixed times with and without prompt tokens are expected to be
    equal. The time per row follows from the time per prompt token and the FLOPs of both, because single requests never
    reveal a second row's cost. Without multi-token prompts, all time is the step's fixed time.

    Args:
        row_factor: FLOPs of a decoding row as a multiple of a prompt token's.
    """

    def __init__(self, row_factor: float = 1.0) -> None:
        self._row_factor = row_factor
        self._dispatches: defaultdict[StepShape, DispatchTimes] = defaultdict(DispatchTimes)
        self._products = np.zeros((4, 5))  # weighted products of a step's counts with each other and with its time
        # Sums: steps, step times, prompt tokens, decoding rows, sampled and cached tokens.
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
        """Record a dispatch.

        Args:
            wall_s: its duration, or the time since the end of the previous dispatch.
            num_prefill_tokens: prompt tokens.
            num_rows: decoding rows in its first step.
            num_steps: steps; several only if all rows are decoding.
            num_sampled: tokens sampled by the decoding rows; None for one per row and step.
            num_cached_tokens: cached tokens of the prompts that it started.
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
        """Add the measurements collected since the last call to the sums, and fit the rates anew."""
        measured = np.array(self._untaken, np.float64)
        counts, wall_s = measured[:, 1:5], measured[:, 0]
        typical_s = wall_s
        if self._rates is not None:
            predicted_s = counts @ np.array(self._rates[:4])
            typical_s = np.where(predicted_s > 0, predicted_s, wall_s)
        # Errors count relative to the predicted time: relative to the measured time, mean rates would be too low.
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
        """Return the four rates in `Rates`' order.

        Two rates, per step and per token, are fitted first. The four rates are expected to follow from these, and
        deviate as far as the measured steps show it.
        """
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
        """Return the dispatch times for a program without prompt tokens."""
        return self._dispatches[program]

    def rates(self) -> Rates | None:
        """Return the current rates; None after too few steps. Callable from any thread."""
        return self._rates

    @property
    def cached_fraction(self) -> float:
        """Fraction of prompt tokens found in the cache."""
        _, _, num_computed, _, _, num_cached = self._totals.tolist()
        return num_cached / (num_cached + num_computed) if num_cached else 0.0


def _non_negative_fit(products: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative least-squares solution of `products @ x = times`.

    Entries that would be negative are set to zero one by one.

    Args:
        products: matrix of the normal equations, [n, n].
        times: right-hand side, [n].
    """
    size = np.sqrt(np.maximum(products.diagonal(), 0.0))
    left = [index for index in range(len(times)) if size[index] > 0]
    solution = np.zeros(len(times))
    while left:
        # Scaled to a unit diagonal, so that rounding errors are alike for every count.
        scale = size[left]
        part = np.linalg.solve(products[np.ix_(left, left)] / np.outer(scale, scale), times[left] / scale) / scale
        if part.min() >= 0:
            solution[left] = part
            break
        del left[int((part * scale).argmin())]
    return solution
