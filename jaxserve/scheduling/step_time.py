"""StepTime: how long steps take, fitted to those that were measured, for whoever has to foretell the next ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_KEPT = 0.99  # weight of all earlier steps when another one comes: some hundred steps count
_MIN_STEPS = 3.0  # sum of the weights below which nothing is foretold
_MOST_OVER = 4.0  # a step counts as at most so many times longer than it was foretold: others may use the machine
_AT_ONCE = 16  # measurements taken at once
# Spread of what is expected before any step is measured, by which it weighs less than steps, relative to:
_NOISE = 0.3  # the time of a step: that of measurements
_TOKEN = 0.1  # the time of a step: a token, expected to take none
_STEP = 0.3  # the time of a step without tokens: steps with prompt tokens and those without, expected to be the same
_KIND = 0.5  # the time of a token: prompt tokens and rows, expected to differ as their FLOPs do
_LEAST_S = 1e-9  # mean time of a step on a device that takes none
_LEAST_TOKEN = 1 / 500  # the time of a step: the least time of a token to which `_KIND` is relative


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


class StepTime:
    """Least squares over the latest steps, with none of the four times below zero. It reads no clock.

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
        if len(self._untaken) >= _AT_ONCE or self._totals[0] < _AT_ONCE:
            self._take()

    def _take(self) -> None:
        """Take the measurements so far, and fit the rates."""
        measured = np.array(self._untaken, np.float64)
        counts, wall_s = measured[:, 1:5], measured[:, 0]
        typical_s = wall_s
        if self._rates is not None:
            foretold_s = counts @ np.array(self._rates[:4])
            typical_s = np.where(foretold_s > 0, foretold_s, wall_s)
        # Relative errors count, by the time foretold: by the time measured, mean rates would be too low.
        decay, kept = _KEPT ** np.arange(len(measured))[::-1], _KEPT ** len(measured)
        weights = (decay / np.maximum(typical_s, 1e-6) ** 2)[:, None] * counts
        wall_s = np.minimum(wall_s, _MOST_OVER * typical_s)
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
        mean_s = max(self._totals[1] / self._totals[0], _LEAST_S)
        few = np.diag([0.0, (_NOISE / (_TOKEN * mean_s)) ** 2])
        step_s, token_s = _non_negative_fit(common.T @ products @ common + few, common.T @ times)
        least_s = max(token_s, _LEAST_TOKEN * step_s, _LEAST_TOKEN * _LEAST_S)
        expected = common @ np.array([step_s, token_s])
        spread = common @ np.array([_STEP * max(step_s, mean_s / 10), _KIND * least_s])
        weights = (_NOISE / spread) ** 2
        return _non_negative_fit(products + np.diag(weights), times + weights * expected)

    def rates(self) -> Rates | None:
        """Return the times by the latest steps; None as long as there were too few. From any thread."""
        return self._rates

    @property
    def cached_share(self) -> float:
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
