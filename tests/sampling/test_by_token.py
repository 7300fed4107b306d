"""Token-wise operations on logits, in the implementations of all kinds of devices, against numpy."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.execution.sampling.token_gather import (
    ARGMAX_BLOCK,
    ARGMAX_ROWS,
    add_at,
    add_by_matmul,
    argmax_by_blocks,
    first_argmax,
    top_one_by_one,
    top_tokens,
)
from tests.own_programs import UNOPTIMIZED
from tests.random_runs import examples


def logits_with_ties(seed, num_rows, vocab_size):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-5, 6, (num_rows, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    return logits


@pytest.mark.parametrize("argmax", [first_argmax, argmax_by_blocks])
@pytest.mark.parametrize("num_rows", [1, ARGMAX_ROWS])
@pytest.mark.parametrize("vocab_size", [3, 3 * ARGMAX_BLOCK, 1000])
def test_the_first_of_the_largest(argmax, num_rows, vocab_size):
    logits = logits_with_ties(vocab_size, num_rows, vocab_size)
    logits[0] = -np.inf
    assert np.array_equal(jax.jit(argmax, compiler_options=UNOPTIMIZED)(logits), logits.argmax(1))


ADDING = {add: jax.jit(add, compiler_options=UNOPTIMIZED) for add in (add_at, add_by_matmul)}


@pytest.mark.parametrize("add", ADDING)
@settings(max_examples=examples(20))
@given(
    num_rows=st.just(4),
    vocab_size=st.sampled_from([1, 60, 128, 300]),
    num_ids=st.just(9),
    seed=st.integers(0, 99),
)
@example(num_rows=1, vocab_size=60, num_ids=40, seed=0)
@example(num_rows=5, vocab_size=300, num_ids=1, seed=0)
def test_values_are_added_at_the_ids_of_each_row(add, num_rows, vocab_size, num_ids, seed):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    # Small integers times a power of two: their sums are exact in any order.
    values = rng.integers(-100, 100, (num_rows, num_ids)).astype(np.float32) * 2.0**-3
    ids = rng.integers(-2, vocab_size + 3, (num_rows, num_ids))
    ids[rng.random(ids.shape) < 0.1] = 2**31 - 1
    added = np.zeros(table.shape, np.float32)
    for row, token_id, value in zip(np.repeat(np.arange(num_rows), num_ids), ids.ravel(), values.ravel(), strict=True):
        if 0 <= token_id < vocab_size:
            added[row, token_id] += value
    add = ADDING[add]
    assert np.allclose(add(table, ids.astype(np.int32), values), table + added, rtol=0, atol=1e-5)
    assert np.array_equal(add(np.zeros_like(table), ids.astype(np.int32), values), added)


def test_any_number_survives_the_products():
    values = np.random.default_rng(0).normal(scale=10, size=(4, 300)).astype(np.float32)
    ids = np.stack([np.random.default_rng(row).permutation(500)[:300] for row in range(4)]).astype(np.int32)
    added = jax.jit(add_by_matmul, compiler_options=UNOPTIMIZED)(np.zeros((4, 500), np.float32), ids, values)
    assert np.array_equal(np.take_along_axis(np.asarray(added), ids, 1), values)


@pytest.mark.parametrize("top", [top_tokens, top_one_by_one])
@pytest.mark.parametrize(("vocab_size", "count"), [(5, 5), (1000, 20)])
def test_the_largest_and_of_equal_ones_the_first(top, vocab_size, count):
    logits = logits_with_ties(count, 7, vocab_size)
    logits[0] = -np.inf
    values, ids = jax.jit(top, static_argnums=1, compiler_options=UNOPTIMIZED)(logits, count)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(logits, order, 1))
