"""Penalties against the definitions of OpenAI and vLLM, and against transformers; and their token counts."""

import jax
import numpy as np
import pytest
from sampling_cases import counts_of, make_rows, make_table
from transformers import RepetitionPenaltyLogitsProcessor

from jaxserve.execution.sampling import count_sampled, count_tokens
from jaxserve.execution.sampling.penalties import HISTORY_BLOCK, apply_penalties
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED

penalise = jax.jit(apply_penalties, compiler_options=UNOPTIMIZED)
count = jax.jit(count_tokens, static_argnums=3, compiler_options=UNOPTIMIZED)
count_one = jax.jit(count_sampled, compiler_options=UNOPTIMIZED)


def reference(logits, prompt, output, presence, frequency, repetition):
    out = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    return out


def test_matches_the_definitions():
    rng = np.random.default_rng(7)
    num_rows, vocab_size = 40, 60
    logits = rng.normal(scale=3, size=(num_rows, vocab_size)).astype(np.float32)
    logits[:, 5] = -np.inf
    prompts = [rng.integers(0, vocab_size, rng.integers(0, 100)).tolist() for _ in range(num_rows)]
    outputs = [rng.integers(0, vocab_size, rng.integers(0, 100)).tolist() for _ in range(num_rows)]
    slot = rng.permutation(num_rows)
    fields = {
        "presence_penalty": rng.choice([0, -2, 0.5, 2], num_rows),
        "frequency_penalty": rng.choice([0, -2, 0.25, 2], num_rows),
        "repetition_penalty": rng.choice([1, 0.5, 1.2, 3], num_rows),
    }
    by_slot = np.empty((num_rows, vocab_size))
    by_slot[slot] = counts_of(prompts, outputs, vocab_size)
    result = np.asarray(
        penalise(logits, make_rows(num_rows, slot=slot, **fields), make_table(num_rows, counts=by_slot))
    )
    for r in range(num_rows):
        expected = reference(logits[r], prompts[r], outputs[r], *(value[r] for value in fields.values()))
        np.testing.assert_allclose(result[r], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity", [7, HISTORY_BLOCK, 3 * HISTORY_BLOCK + 5])
def test_counts_of_an_admitted_request(capacity):
    rng = np.random.default_rng(capacity)
    for num_tokens in (0, 1, capacity // 2, capacity):
        tokens = rng.integers(0, 60, num_tokens)
        prompt_len = int(rng.integers(0, num_tokens + 1))
        expected = counts_of([tokens[:prompt_len]], [tokens[prompt_len:]], 60)[0]
        padded = np.full(capacity, -1, np.int32)
        padded[:num_tokens] = tokens
        assert np.array_equal(count(padded, np.int32(prompt_len), 0, 60), expected)
        part = count(padded, np.int32(prompt_len), np.int32(25), 20)  # one of several devices' part
        assert np.array_equal(part, expected[25:45])


def test_sampled_tokens_are_counted_for_rows_with_penalties():
    asks, live = [True, True, False, True, True], [True, True, True, False, True]
    rows = make_rows(5, frequency_penalty=np.where(asks, 0.5, 0), slot=[4, 3, 2, 1, 0], live=live)
    counts = counts_of([[9], [9], [9], [9], [9]], [[9], [], [], [], []], 12)
    sampled = np.array([9, 3, 3, 3, 0], np.int32)
    expected = counts.copy()
    expected[[4, 3, 0], [9, 3, 0]] += 1
    assert np.array_equal(count_one(counts.astype(np.int32), rows, sampled), expected)
    part = count_one(counts[:, 2:8].astype(np.int32), rows, sampled, 2)
    assert np.array_equal(part, expected[:, 2:8])


def test_same_as_transformers():
    rng = np.random.default_rng(1)
    logits = rng.normal(scale=3, size=(8, 100)).astype(np.float32)
    history = rng.integers(0, 100, (8, 30))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(history), torch.from_numpy(logits)).numpy()
    counts = counts_of([row[:n] for n, row in enumerate(history)], [row[n:] for n, row in enumerate(history)], 100)
    rows = make_rows(8, repetition_penalty=1.3)
    np.testing.assert_allclose(penalise(logits, rows, make_table(8, counts=counts)), expected, rtol=1e-6)


def test_rows_without_penalties_keep_their_bits():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, 50)).astype(np.float32)
    asks = np.array([True, False, True, False, False, False])
    rows = make_rows(6, frequency_penalty=np.where(asks, 1.0, 0.0))
    counts = counts_of([[]] * 6, rng.integers(0, 50, (6, 20)), 50)
    result = np.asarray(penalise(logits, rows, make_table(6, counts=counts)))
    assert np.array_equal(result[~asks], logits[~asks])
    assert (result[asks] != logits[asks]).any(1).all()


def test_a_tiny_repetition_penalty_stays_finite():
    rows = make_rows(1, repetition_penalty=1e-38)
    counts = counts_of([[]], [[2]], 4)
    result = np.asarray(penalise(np.full((1, 4), 20, np.float32), rows, make_table(1, counts=counts)))
    assert np.isfinite(result).all()
    assert result.argmax() == 2
