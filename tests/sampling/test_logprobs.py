"""Log probabilities and ranks against torch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.sampling import LogprobLayout, token_logprobs
from jaxserve.execution.sampling.log_sum_exp import log_sum_exp
from jaxserve.execution.sampling.token_gather import top_one_by_one
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED

NUM_TOP = 20
compute = jax.jit(token_logprobs, static_argnums=2, compiler_options=UNOPTIMIZED)

normalise = jax.jit(lambda x: log_sum_exp(x + 0.0), compiler_options=UNOPTIMIZED)


@partial(jax.jit, static_argnums=2, compiler_options=UNOPTIMIZED)
def pack(logits, token_ids, num_top):
    return token_logprobs(logits, token_ids, num_top).pack()


@pytest.mark.parametrize(("scale", "num_top"), [(1.0, 20), (30.0, 20), (1.0, 1), (3.0, 999), (3.0, 1000)])
def test_matches_log_softmax(scale, num_top):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=scale, size=(33, 1000)).astype(np.float32)
    token_ids = rng.integers(0, 1000, 33)
    packed = pack(logits, token_ids.astype(np.int32), num_top)
    layout = LogprobLayout.from_sizes(num_top, 1000)
    assert packed.shape == (33, layout.num_words)
    out = layout.unpack(np.asarray(packed))
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    np.testing.assert_allclose(out.logprob, expected[np.arange(33), token_ids], rtol=1e-5, atol=1e-5)
    if num_top < 1000:
        top = expected.topk(num_top)
        np.testing.assert_allclose(out.top_logprobs, top.values, rtol=1e-5, atol=1e-5)
        if num_top <= 20:  # less likely tokens have ties in float32
            assert np.array_equal(out.top_ids, top.indices)
    else:
        np.testing.assert_allclose(out.top_logprobs, expected, rtol=1e-5, atol=1e-5)
        assert out.top_ids.shape == (33, 0)
    assert np.array_equal(out.rank, [1 + (row > row[t]).sum() for row, t in zip(logits, token_ids, strict=True)])


def test_ranks_begin_at_one_and_ties_share_them():
    logits = np.tile(np.array([[3, 5, 5, 1, -np.inf]], np.float32), (5, 1))
    out = compute(logits, np.arange(5, dtype=np.int32), 3)
    assert out.rank.tolist() == [3, 1, 1, 4, 5]
    assert out.logprob[4] == -jnp.inf


def test_the_best_tokens_are_consistent_with_single_ones():
    logits = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    top = compute(logits, np.zeros(4, np.int32), NUM_TOP)
    for place in range(NUM_TOP):
        out = compute(logits, top.top_ids[:, place], NUM_TOP)
        assert np.array_equal(out.logprob, top.top_logprobs[:, place])
        assert (out.rank == place + 1).all()


def test_a_small_vocabulary_is_sent_whole():
    layout = LogprobLayout.from_sizes(NUM_TOP, 7)
    assert layout == LogprobLayout.from_sizes(-1, 7) == LogprobLayout.from_sizes(7, 7)
    out = compute(np.zeros((2, 7), np.float32), np.zeros(2, np.int32), layout.num_top)
    assert out.top_ids.shape == (2, 0)
    np.testing.assert_allclose(out.top_logprobs, np.full((2, 7), -np.log(7)), rtol=1e-6)


def test_many_are_found_one_by_one_too():
    """The TPU implementation finds them, with ties."""
    logits = np.random.default_rng(2).integers(-40, 40, (3, 500)).astype(np.float32)
    values, ids = jax.jit(top_one_by_one, static_argnums=1)(logits, 400)
    expected = jax.lax.top_k(logits, 400)
    assert np.array_equal(values, expected[0])
    assert np.array_equal(ids, expected[1])


def test_shapes_can_be_asked_without_arrays():
    shapes = jax.eval_shape(compute, jnp.zeros((3, 50)), jnp.zeros(3, jnp.int32), NUM_TOP)
    assert shapes.top_ids == jax.ShapeDtypeStruct((3, NUM_TOP), jnp.int32)


@pytest.mark.parametrize("size", [1, 7, 320, 4097])
def test_a_row_is_normalised_to_the_same_bits_in_all_programs(size):
    x = np.random.default_rng(0).normal(scale=5, size=(33, size)).astype(np.float32)
    whole = np.asarray(log_sum_exp(jnp.asarray(x)))
    np.testing.assert_allclose(whole, torch.logsumexp(torch.from_numpy(x).double(), 1), rtol=1e-6, atol=1e-6)
    for count in (1, 2, 5):
        assert np.array_equal(whole[:count], normalise(x[:count]))
    assert np.array_equal(whole[::-1], normalise(x[::-1]))


def test_normalisers_of_rows_that_are_not_finite():
    x = np.zeros((5, 40), np.float32)
    x[0], x[1, 3], x[2, 3], x[3, :39], x[4, 39] = -np.inf, np.inf, np.nan, -np.inf, np.nan
    np.testing.assert_array_equal(log_sum_exp(jnp.asarray(x)), jax.nn.logsumexp(x, axis=1))
