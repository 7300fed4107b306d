"""Online softmax for both phases. See the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a query that has seen no key yet does not turn into NaN


class Softmax(NamedTuple):
    """State of an online softmax; scores in base 2."""

    max_score: Any  # f32[..., 128], the same in all columns
    denominator: Any
    values: Any  # f32[..., sums], weighted sum

    def absorb(self, at: Any, scores: Any, visible: Any, add_up: Callable[[Any], Any], is_live: Any) -> None:
        """Update the rows `at` with one more key block.

        Args:
          at: rows in the state.
          scores: scores for the block, `[..., keys]`.
          visible: mask of the scores that count.
          add_up: function from weights to the weighted sum of the block's values.
          is_live: True if the block's values are defined; None if they always are.
        """
        before = self.max_score[at][..., :1]
        scores = jnp.where(visible, scores, MASKED)
        after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp2(scores - after), 0)
        rescale = jnp.exp2(before - after)
        total = self.denominator[at][..., :1] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        values = add_up(weights)
        if is_live is not None:
            values = jnp.where(is_live, values, 0)
        columns = self.max_score[at].shape
        self.max_score[at] = jnp.broadcast_to(after, columns)
        self.denominator[at] = jnp.broadcast_to(total, columns)
        self.values[at] = self.values[at] * rescale + values

    def result(self, at: Any) -> Any:
        """Return the weighted mean of the values in the rows `at`, zeros for rows without any weight."""
        denominator = self.denominator[at][..., :1]
        return self.values[at] / jnp.where(denominator > 0, denominator, 1)
