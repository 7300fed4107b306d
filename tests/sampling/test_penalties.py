"""Penalties against the definitions of OpenAI and vLLM, and against transformers."""

import jax
import numpy as np
import pytest
import torch
from sampling_cases import make_rows, make_table
from transformers import RepetitionPenaltyLogitsProcessor

from jaxserve.sampling.penalties import HISTORY_BLOCK, apply_penalties

penalise = jax.jit(apply_penalties)


def reference(logits, prompt, output, presence, frequency, repetition):
    out = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    return out


@pytest.mark.parametrize("capacity", [7, HISTORY_BLOCK, 3 * HISTORY_BLOCK + 5])
def test_matches_the_definitions_whatever_lies_beyond_position(capacity):
    rng = np.random.default_rng(capacity)
    num_rows, vocab_size = 40, 60
    logits = rng.normal(scale=3, size=(num_rows, vocab_size)).astype(np.float32)
    logits[:, 5] = -np.inf
    position = rng.integers(0, capacity + 1, num_rows)
    prompt_len = rng.integers(0, position + 1)
    history = rng.integers(0, vocab_size, (num_rows, capacity))
    stale = np.arange(capacity)[None, :] >= position[:, None]
    history = np.where(stale, rng.choice([-1, 3, 2**31 - 1, -(2**31)], history.shape), history)
    slot = rng.permutation(num_rows)
    fields = {
        "presence_penalty": rng.choice([0, -2, 0.5, 2], num_rows),
        "frequency_penalty": rng.choice([0, -2, 0.25, 2], num_rows),
        "repetition_penalty": rng.choice([1, 0.5, 1.2, 3], num_rows),
    }
    by_slot = np.empty_like(history)
    by_slot[slot] = history
    rows = make_rows(num_rows, position=position, prompt_len=prompt_len, slot=slot, **fields)
    result = np.asarray(penalise(logits, rows, make_table(num_rows, by_slot)))
    for r in range(num_rows):
        prompt, output = history[r, : prompt_len[r]].tolist(), history[r, prompt_len[r] : position[r]].tolist()
        expected = reference(logits[r], prompt, output, *(value[r] for value in fields.values()))
        np.testing.assert_allclose(result[r], expected, rtol=1e-5, atol=1e-5)


def test_same_as_transformers():
    rng = np.random.default_rng(1)
    logits = rng.normal(scale=3, size=(8, 100)).astype(np.float32)
    history = rng.integers(0, 100, (8, 30))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(history), torch.from_numpy(logits)).numpy()
    rows = make_rows(8, repetition_penalty=1.3, position=30, prompt_len=np.arange(8))
    np.testing.assert_allclose(penalise(logits, rows, make_table(8, history)), expected, rtol=1e-6)


def test_rows_without_penalties_keep_their_bits():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, 50)).astype(np.float32)
    history = rng.integers(0, 50, (6, 20))
    asks = np.array([True, False, True, False, False, False])
    rows = make_rows(6, frequency_penalty=np.where(asks, 1.0, 0.0), position=20)
    result = np.asarray(penalise(logits, rows, make_table(6, history)))
    assert np.array_equal(result[~asks], logits[~asks])
    assert (result[asks] != logits[asks]).any(1).all()


def test_a_padding_row_decides_neither_the_work_nor_the_result():
    logits = np.ones((2, 10), np.float32)
    rows = make_rows(2, presence_penalty=[1, 2], position=[3, 2**31 - 1], live=[True, False])
    result = np.asarray(penalise(logits, rows, make_table(2, [[4, 4, 6, 7], [1, 1, 1, 1]])))
    assert np.array_equal(result[0], np.where(np.isin(np.arange(10), [4, 6]), 0, 1))
    assert np.array_equal(result[1], logits[1])


def test_a_tiny_repetition_penalty_stays_finite():
    rows = make_rows(1, repetition_penalty=1e-38, position=1)
    result = np.asarray(penalise(np.full((1, 4), 20, np.float32), rows, make_table(1, [[2, 0]])))
    assert np.isfinite(result).all()
    assert result.argmax() == 2
