"""Pages that rows choose by bounds of their keys, against numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from numpy.typing import NDArray

from jaxserve.api.sparsity_config import NUM_DENSE_LAYERS
from jaxserve.layers.kv_forms import NewTokens
from jaxserve.layers.page_bounds import BoundedHeads
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions, RaggedRows

R, M, P, K, G, H, L = 3, 7, 4, 2, 2, 8, 3
BUDGET = 3 * P + 1  # three pages fit
OPTIONS = AttentionOptions(scale=0.5)
LENGTHS = np.array([26, 11, 27], np.int32)  # tokens per row before the last one


def attention(q: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the output of one query over keys [tokens, K, H]."""
    scores = 0.5 * np.einsum("kgh,tkh->kgt", q.reshape(K, G, H), keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgt,tkh->kgh", weights / weights.sum(-1, keepdims=True), values).reshape(K * G, H)


def best_pages(q: NDArray[np.float32], keys: NDArray[np.float32]) -> list[int]:
    """Return the pages of a row that Quest chooses: the first and the last one, and that with the highest bound."""
    num_full = (len(keys) - 1) // P
    pages = keys[: num_full * P].reshape(num_full, P, K, 1, H)
    q = q.reshape(K, G, H)
    bound = np.maximum(q * pages.min(1), q * pages.max(1)).sum(-1)  # [pages, K, G]
    nearest = (bound - bound.max(0)).max((1, 2))
    return sorted({0, num_full, 1 + int(nearest[1:].argmax())})


FORM = BoundedHeads(K, H, budget=BUDGET)


@jax.jit
def attend(layer: Array, new: NewTokens, rows: RaggedRows, pool: Any) -> Any:
    return FORM.attend(new, rows, pool, layer, OPTIONS, backend="xla")


@pytest.mark.parametrize("layer", [pytest.param(NUM_DENSE_LAYERS - 1, marks=pytest.mark.long), NUM_DENSE_LAYERS])
def test_rows_attend_to_their_best_pages(layer: int) -> None:
    rng = np.random.default_rng(0)
    pool = FORM.new_pages("xla", num_layers=L, num_pages=R * M, page_size=P, dtype=jnp.dtype("float32"))
    table = rng.permutation(R * M).reshape(R, M).astype(np.int32)
    keys, values = rng.standard_normal((2, R, LENGTHS.max() + 1, K, H)).astype(np.float32)
    q = rng.standard_normal((R, K * G, H)).astype(np.float32)
    step = functools.partial(attend, jnp.int32(layer))
    start = np.zeros(R, np.int32)
    while (start < LENGTHS).any():  # chunks whose ends are not those of pages
        counts = np.minimum(LENGTHS - start, 5)
        flat = [(row, start[row] + i) for row in range(R) for i in range(counts[row])]
        new_keys, new_values = (np.array([x[at] for at in flat]) for x in (keys, values))
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = RaggedRows(start + counts, table, bounds, np.int32(R))
        _, pool = step(NewTokens(np.zeros((len(flat), K * G, H), np.float32), new_keys, new_values), rows, pool)
        start = start + counts
    last = np.arange(R), LENGTHS
    rows = RaggedRows(LENGTHS + 1, table, np.arange(R + 1, dtype=np.int32), np.int32(R))
    choosing = np.array([True, True, False])
    out, _ = step(NewTokens(q, keys[last], values[last], choosing=choosing), rows, pool)
    chosen = 0
    for row in range(R):
        num_tokens = LENGTHS[row] + 1
        seen = list(range(num_tokens))
        if choosing[row] and layer >= NUM_DENSE_LAYERS:
            pages = best_pages(q[row], keys[row, :num_tokens])
            seen = [token for token in seen if token // P in pages]
            chosen += len(seen) < num_tokens
        expected = attention(q[row], keys[row, seen], values[row, seen])
        np.testing.assert_allclose(out[row], expected, atol=1e-5, err_msg=str(row))
    assert chosen == (layer >= NUM_DENSE_LAYERS), "one row has more pages than the budget"
