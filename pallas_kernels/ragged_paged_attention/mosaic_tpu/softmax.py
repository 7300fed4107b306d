"""The online softmax of lanes and tiles. See the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite: a query that has seen no key yet must not turn into NaN


class State(NamedTuple):
    """Of an online softmax; scores in base 2."""

    max_score: Any  # f32[..., 128], the same in all columns
    denominator: Any
    values: Any  # f32[..., width], weighted sum


def absorb(state: State, at: Any, scores: Any, visible: Any, add_up: Callable[[Any], Any], is_live: Any) -> None:
    """Takes one more block of keys into the rows `at` of a state.

    Args:
      state: where the softmax stands.
      at: which part of it.
      scores: `[..., keys]`.
      visible: which of them count.
      add_up: the weighted sum of the block's values, of the weights.
      is_live: whether the values of the block are numbers at all.
    """
    before = state.max_score[at][..., :1]
    scores = jnp.where(visible, scores, MASKED)
    after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp2(scores - after), 0)
    rescale = jnp.exp2(before - after)
    total = state.denominator[at][..., :1] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    values = add_up(weights)
    if is_live is not None:
        values = jnp.where(is_live, values, 0)
    columns = state.max_score[at].shape
    state.max_score[at] = jnp.broadcast_to(after, columns)
    state.denominator[at] = jnp.broadcast_to(total, columns)
    state.values[at] = state.values[at] * rescale + values


def result(state: State, at: Any) -> Any:
    """The weighted mean of the values; of rows without any weight, zeros."""
    denominator = state.denominator[at][..., :1]
    return state.values[at] / jnp.where(denominator > 0, denominator, 1)
