"""Costs of steps: the work on a device, and the work of attention, counted from a step's rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Costs(NamedTuple):
    """Costs of a model's steps on a device.

    Attributes:
        kv_token_bytes: bytes of one token in the pool, all layers and what scales it included.
        weight_bytes: function that returns the bytes of weights that a step reads, of the number of tokens on the token
            axis, and of those that are live.
        flops: function that returns the floating-point operations of a step, of the numbers of tokens on the token
            axis, of rows whose logits are computed, and of query-key pairs of one head, summed over the layers.
    """

    kv_token_bytes: int
    weight_bytes: Callable[[int, int], int]
    flops: Callable[[int, int, int], int]


class AttentionCost(NamedTuple):
    """Counts over all rows and layers."""

    num_scores: int  # query-key pairs of one head
    num_kv_tokens: int  # tokens whose keys and values are read or written


def attention_cost(start: Ints, num_tokens: Ints, windows: Sequence[int | None]) -> AttentionCost:
    """Return the work of causal attention in layers of these sliding windows (None: no window).

    A row's keys and values count as read once per layer, however a kernel tiles its queries, and new ones as written.

    Args:
        start: tokens before those computed; an entry per row, or per row and step.
        num_tokens: computed, of the same shape, or an entry per row for all its steps.
        windows: one per layer.
    """
    end = start + num_tokens
    num_scores = num_kv_tokens = 0
    for window, num_layers in Counter(windows).items():
        scores, unread = _triangle(end) - _triangle(start), 0 * start
        if window is not None:
            scores -= _triangle(end - window) - _triangle(start - window)
            unread = np.maximum(start - window + 1, 0)
        num_scores += num_layers * int(scores.sum())
        num_kv_tokens += num_layers * int((end - unread + num_tokens).sum())
    return AttentionCost(num_scores, num_kv_tokens)


def _triangle(x: Ints) -> Ints:
    """1 + 2 + ... + x: the keys that the first x queries of a sequence see."""
    x = np.maximum(x, 0)
    return x * (x + 1) // 2
