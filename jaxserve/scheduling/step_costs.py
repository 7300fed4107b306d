"""StepCosts: what steps take, fitted to those that were measured, for whoever has to foretell the next ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_KEPT = 0.99  # weight of all earlier steps when another one comes: some hundred steps count
_MIN_STEPS = 3.0  # sum of the weights below which nothing is foretold
_MOST_OVER = 4.0  # a step counts as at most so many times longer than it was foretold: others may use the machine
_RIDGE = 1e-6


class Rates(NamedTuple):
    """Times of the parts of a step, and what it comes to.

    Attributes:
        prefill_step_s: time of a step with prompt tokens, before it computes any.
        decode_step_s: time of a step of rows in decode alone, before it computes any.
        prefill_token_s: time of a prompt token.
        decode_token_s: time of a row in decode.
        tokens_per_row: tokens that a row in decode gets in a step; more than one with accepted drafts.
    """

    prefill_step_s: float
    decode_step_s: float
    prefill_token_s: float
    decode_token_s: float
    tokens_per_row: float = 1.0

    def step_s(self, num_prefill_tokens: int | float, num_rows: int | float) -> float:
        """Return the time of a step of so many prompt tokens and rows in decode."""
        fixed_s = self.prefill_step_s if num_prefill_tokens else self.decode_step_s
        return fixed_s + num_prefill_tokens * self.prefill_token_s + num_rows * self.decode_token_s


class StepCosts:
    """Least squares over the latest steps, with none of the four times below zero. It reads no clock.

    A step that is like the latest ones is foretold well, whatever the device: rates of a load that has passed fade.
    """

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))  # of the counts of a step with each other
        self._times = np.zeros(4)  # of the counts of a step with its time
        self._weight = 0.0
        self._num_row_steps = self._num_sampled = 0.0
        self._num_prefill_tokens = self._num_cached_tokens = 0.0
        self._rates: Rates | None = None

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
        has_prefill = num_prefill_tokens > 0
        counts = np.array(
            [float(has_prefill), 0.0 if has_prefill else float(num_steps), num_prefill_tokens, num_rows * num_steps]
        )
        rates = self.rates()
        typical_s = 0.0 if rates is None else float(counts @ rates[:4])
        wall_s = min(wall_s, _MOST_OVER * typical_s) if typical_s else wall_s
        # Relative errors count, by the time foretold: by the time measured, mean rates would be too low.
        weight, scale = 1.0 / max(typical_s or wall_s, 1e-6) ** 2, _KEPT
        self._products = scale * self._products + weight * np.outer(counts, counts)
        self._times = scale * self._times + weight * wall_s * counts
        self._weight = scale * self._weight + 1.0
        self._num_row_steps = scale * self._num_row_steps + num_rows * num_steps
        self._num_sampled = scale * self._num_sampled + (num_rows * num_steps if num_sampled is None else num_sampled)
        if has_prefill:
            self._num_prefill_tokens = scale * self._num_prefill_tokens + num_prefill_tokens
            self._num_cached_tokens = scale * self._num_cached_tokens + num_cached_tokens
        self._rates = None

    def rates(self) -> Rates | None:
        """Return the times by the latest steps; None as long as there were too few."""
        if self._weight < _MIN_STEPS:
            return None
        if self._rates is None:
            times = _non_negative_fit(self._products, self._times)
            per_row = self._num_sampled / self._num_row_steps if self._num_row_steps else 1.0
            prefill_step, decode_step, prefill_token, decode_token = times.tolist()
            self._rates = Rates(prefill_step, decode_step, prefill_token, decode_token, max(per_row, 1e-3))
        return self._rates

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that were found in the cache."""
        total = self._num_cached_tokens + self._num_prefill_tokens
        return self._num_cached_tokens / total if total else 0.0


def _non_negative_fit(products: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares' solution without negative entries: those that would be are left out, one by one."""
    size = np.sqrt(np.maximum(products.diagonal(), 0.0))
    left = [index for index in range(len(times)) if size[index] > 0]
    solution = np.zeros(len(times))
    while left:
        # Scaled to a diagonal of ones, so that the ridge means the same for every count.
        scale = size[left]
        matrix = products[np.ix_(left, left)] / np.outer(scale, scale) + _RIDGE * np.eye(len(left))
        part = np.linalg.solve(matrix, times[left] / scale) / scale
        if part.min() >= 0:
            solution[left] = part
            break
        del left[int((part * scale).argmin())]
    return solution
