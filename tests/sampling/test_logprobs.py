"""Log probabilities and ranks against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling import token_logprobs

compute = jax.jit(token_logprobs)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_matches_log_softmax(scale):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=scale, size=(33, 1000)).astype(np.float32)
    token_ids = rng.integers(0, 1000, 33)
    out = compute(logits, jnp.asarray(token_ids, jnp.int32))
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    top = expected.topk(MAX_LOGPROBS)
    np.testing.assert_allclose(out.logprob, expected[np.arange(33), token_ids], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.top_logprobs, top.values, rtol=1e-5, atol=1e-5)
    assert np.array_equal(out.top_ids, top.indices)
    assert np.array_equal(out.rank, [1 + (row > row[t]).sum() for row, t in zip(logits, token_ids, strict=True)])


def test_ranks_begin_at_one_and_ties_share_them():
    logits = np.tile(np.array([[3, 5, 5, 1, -np.inf]], np.float32), (5, 1))
    out = compute(logits, jnp.arange(5, dtype=jnp.int32))
    assert out.rank.tolist() == [3, 1, 1, 4, 5]
    assert out.logprob[4] == -jnp.inf


def test_the_best_tokens_are_consistent_with_single_ones():
    logits = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    top = compute(logits, jnp.zeros(4, jnp.int32))
    for place in range(MAX_LOGPROBS):
        out = compute(logits, top.top_ids[:, place])
        assert np.array_equal(out.logprob, top.top_logprobs[:, place])
        assert (out.rank == place + 1).all()


def test_a_small_vocabulary_is_padded():
    out = compute(np.zeros((2, 7), np.float32), jnp.zeros(2, jnp.int32))
    assert out.top_ids.shape == (2, MAX_LOGPROBS)
    assert np.array_equal(out.top_ids[:, 7:], np.full((2, 13), -1))
    assert np.isneginf(out.top_logprobs[:, 7:]).all()
    np.testing.assert_allclose(out.top_logprobs[:, :7], -np.log(7), rtol=1e-6)


def test_shapes_can_be_asked_without_arrays():
    shapes = jax.eval_shape(token_logprobs, jnp.zeros((3, 50)), jnp.zeros(3, jnp.int32))
    assert shapes.top_ids == jax.ShapeDtypeStruct((3, MAX_LOGPROBS), jnp.int32)
