"""Temperature, min_p, top_k and top_p: which tokens stay, and how likely they are."""

import jax
import numpy as np
import pytest
from sampling_cases import make_rows
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxserve.execution.sampling.sampler import token_weights
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED

weigh = jax.jit(token_weights, compiler_options=UNOPTIMIZED)


def reference_probs(logits, temperature, top_k, top_p, min_p):
    """Compute probabilities in float64 over a sorted vocabulary, straight from the definitions."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    kept = probs >= max(min_p, np.finfo(np.float32).tiny)
    if 0 < top_k < len(probs):
        kept &= probs >= np.sort(probs)[-top_k]
    probs = np.where(kept, probs, 0)
    if top_p < 1:
        levels = np.unique(probs[kept])[::-1]
        mass = np.array([probs[probs >= level].sum() for level in levels])
        probs = np.where(probs >= levels[np.argmax(mass >= top_p * probs.sum())], probs, 0)
    return probs / probs.sum()


def random_rows(rng, num_rows):
    def maybe(off, values):
        return np.where(rng.random(num_rows) < 0.4, off, values)

    return {
        "temperature": rng.choice([0.05, 0.5, 0.7, 1.0, 1.3, 5.0], num_rows).astype(np.float32),
        "top_k": maybe(rng.integers(-1, 1, num_rows), rng.integers(1, 300, num_rows)).astype(np.int32),
        "top_p": maybe(1.0, rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], num_rows)).astype(np.float32),
        "min_p": maybe(0.0, rng.choice([1e-4, 0.01, 0.1, 0.5, 1.0], num_rows)).astype(np.float32),
    }


@pytest.mark.parametrize("ties", [True, False])
def test_support_and_probabilities_match_the_definitions(ties):
    rng = np.random.default_rng(ties)
    num_rows, vocab_size = 1000, 257
    logits = rng.normal(scale=3, size=(num_rows, vocab_size)).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    fields = random_rows(rng, num_rows)
    weights = np.asarray(weigh(logits, make_rows(num_rows, **fields)))
    for r in range(num_rows):
        expected = reference_probs(logits[r], *(fields[name][r] for name in ("temperature", "top_k", "top_p", "min_p")))
        assert np.array_equal(weights[r] > 0, expected > 0), (r, {name: value[r] for name, value in fields.items()})
        np.testing.assert_allclose(weights[r] / weights[r].sum(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 50}, [TopKLogitsWarper(50)]),
        ({"top_p": 0.05}, [TopPLogitsWarper(0.05)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 40, "top_p": 0.8},
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(40), TopPLogitsWarper(0.8)],
        ),
        (
            {"temperature": 0.8, "min_p": 0.02, "top_p": 0.9},
            [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.02), TopPLogitsWarper(0.9)],
        ),
    ],
)
def test_same_distribution_as_transformers(fields, warpers):
    logits = np.random.default_rng(3).normal(scale=2, size=(50, 1000)).astype(np.float32)
    scores = torch.from_numpy(logits)
    for warper in warpers:
        scores = warper(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    weights = np.asarray(weigh(logits, make_rows(50, **fields)))
    assert np.array_equal(weights > 0, expected > 0)
    np.testing.assert_allclose(weights / weights.sum(1, keepdims=True), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-30}])
def test_ties_stay_together(fields):
    weights = weigh(np.array([[1, 5, 5, 5, 5, 2]], np.float32), make_rows(1, **fields))
    assert np.array_equal(weights[0], [0, 1, 1, 1, 1, 0])


def test_a_dominant_token_stays_alone():
    logits = np.zeros((4, 500), np.float32)
    logits[:, 123] = [20, 60, 200, 3e38]
    weights = np.asarray(weigh(logits, make_rows(4, top_p=0.9, top_k=[0, 1, 500, 7])))
    assert np.array_equal(np.nonzero(weights)[1], [123] * 4)


def test_one_row_does_not_move_another():
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=2, size=(64, 777)).astype(np.float32)
    fields = random_rows(rng, 64)
    together = np.asarray(weigh(logits, make_rows(64, **fields)))
    for r in range(0, 64, 7):
        alone = weigh(logits[r : r + 1], make_rows(1, **{name: value[r] for name, value in fields.items()}))
        assert np.array_equal(np.asarray(alone[0]) > 0, together[r] > 0)
