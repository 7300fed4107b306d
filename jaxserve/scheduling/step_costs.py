"""Step costs: device work, and attention work counted from a step's rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.kv_cache.sparsity import Sparsity

Ints = NDArray[np.int64]


class Costs(NamedTuple):
    """Costs per step on a device.

    Attributes:
        kv_token_bytes: bytes per token in the pool, over all layers and including scales.
        weight_bytes: function from token-axis length and live tokens to the weight bytes that a step reads.
        flops: function from token-axis length, rows with logits, and query-key pairs per head (summed over layers) to
            the floating-point operations of a step.
    """

    kv_token_bytes: int
    weight_bytes: Callable[[int, int], int]
    flops: Callable[[int, int, int], int]


class TokenChoice(NamedTuple):
    """Layers in which each query attends to the tokens with the highest index scores.

    Attributes:
        top_k: maximum tokens that a query attends to.
        key_bytes: fraction of a token's bytes that are its index key.
        score_flops: FLOPs per index score, relative to all heads' attention scores and values.
    """

    top_k: int
    key_bytes: float
    score_flops: float


class AttentionCost(NamedTuple):
    """Attention work in a step, over all rows and layers."""

    num_scores: int  # query-key pairs per head
    num_kv_tokens: int  # tokens whose keys and values are read or written


def attention_cost(
    start: Ints,
    num_tokens: Ints,
    windows: Sequence[int | None],
    sparsity: Sparsity | None = None,
    choice: TokenChoice | None = None,
) -> AttentionCost:
    """Return the work of causal attention in layers with these sliding windows (None: no window).

    A row's keys and values count as read once per layer, whatever the query tiling, and new ones as written. Rows with
    one token count as output tokens.

    Args:
        start: tokens before the computed ones; one entry per row, or per row and step.
        num_tokens: computed tokens, with the same shape, or one entry per row for all its steps.
        windows: one window per layer.
        sparsity: rule by which output tokens see fewer keys and values; None if they see all.
        choice: rule by which rows choose tokens in all layers, then without `windows` and `sparsity`; None to see all.
            Rows with several tokens read all latents, under a mask.
    """
    end = start + num_tokens
    if choice is not None:
        return _chosen_cost(start, num_tokens, len(windows), choice)
    num_scores = num_kv_tokens = 0
    counts = Counter(windows)
    if sparsity is not None:
        num_sparse = max(counts[None] - sparsity.num_dense_layers, 0)
        counts[None] -= num_sparse
        is_output = num_tokens == 1
        num_seen = np.where(is_output, sparsity.num_seen(end), _triangle(end) - _triangle(start))
        num_read = np.where(is_output, sparsity.num_read(end), end)
        num_scores, num_kv_tokens = num_sparse * int(num_seen.sum()), num_sparse * int((num_read + num_tokens).sum())
    for window, num_layers in counts.items():
        scores, unread = _triangle(end) - _triangle(start), 0 * start
        if window is not None:
            scores -= _triangle(end - window) - _triangle(start - window)
            unread = np.maximum(start - window + 1, 0)
        num_scores += num_layers * int(scores.sum())
        num_kv_tokens += num_layers * int((end - unread + num_tokens).sum())
    return AttentionCost(num_scores, num_kv_tokens)


def _chosen_cost(start: Ints, num_tokens: Ints, num_layers: int, choice: TokenChoice) -> AttentionCost:
    """Return the work in layers in which queries choose their tokens; see `attention_cost` for the arguments."""
    end, pairs = start + num_tokens, _triangle(start + num_tokens) - _triangle(start)
    chooses = end > choice.top_k
    gathers = chooses & (num_tokens == 1)
    scores = np.where(gathers, choice.top_k, pairs) + np.where(chooses, choice.score_flops * pairs, 0)
    gathered = (1 - choice.key_bytes) * choice.top_k + choice.key_bytes * end
    read = np.where(gathers, gathered, np.where(chooses, end, (1 - choice.key_bytes) * end))
    return AttentionCost(num_layers * int(scores.sum()), num_layers * int((read + num_tokens).sum()))


def _triangle(x: Ints) -> Ints:
    """Return 1 + 2 + ... + x: the keys that a sequence's first x queries see."""
    x = np.maximum(x, 0)
    return x * (x + 1) // 2
