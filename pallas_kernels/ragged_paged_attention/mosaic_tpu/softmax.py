"""Online softmax for both phases. See the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a query that has seen no key yet does not turn into NaN


class Softmax(NamedTuple):
    """Online softmax state in VMEM, for queries over the keys seen so far; scores are in base 2."""

    max_score: Ref  # f32[..., 128], the same in all columns
    denominator: Ref  # f32[..., 128], sum of the weights, the same in all columns
    values: Ref  # f32[..., sums], sum of the values times their weights

    def absorb(
        self,
        at: Any,
        scores: Registers,
        visible: Registers,
        weighted_sum: Callable[[Registers], Registers],
        is_live: Scalar | None,
    ) -> None:
        """Add one more key block to the state.

        Args:
          at: index or slice on the state's first axis: the queries that attend.
          scores: their scores for the block's keys, f32 `[..., keys]`.
          visible: mask of the keys that each query sees, shaped like `scores`.
          weighted_sum: function that returns the block values' sums, `[..., sums]`, for weights `[..., keys]`.
          is_live: False if the block's values are undefined and must not be added; None if they never are.
        """
        before = self.max_score[at][..., :1]
        scores = jnp.where(visible, scores, MASKED)
        after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp2(scores - after), 0)
        rescale = jnp.exp2(before - after)
        total = self.denominator[at][..., :1] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        values = weighted_sum(weights)
        if is_live is not None:
            values = jnp.where(is_live, values, 0)
        columns = self.max_score[at].shape
        self.max_score[at] = jnp.broadcast_to(after, columns)
        self.denominator[at] = jnp.broadcast_to(total, columns)
        self.values[at] = self.values[at] * rescale + values

    def result(self, at: Any) -> Registers:
        """Return the attention outputs f32 `[..., sums]` for the queries at index `at` on the state's first axis.

        Queries that have seen no key get zeros.
        """
        denominator = self.denominator[at][..., :1]
        return self.values[at] / jnp.where(denominator > 0, denominator, 1)
