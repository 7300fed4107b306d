"""Allowed tokens and bad words on the device, against the semantics of vLLM written out in numpy."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from sampling_cases import make_rows, make_table

from jaxserve.execution.sampling.sampler import adjust_logits
from jaxserve.execution.sampling.token_mask import bad_word_ends, mask_part, mask_size, pack_mask, unpack_mask
from tests.own_programs import UNOPTIMIZED

VOCAB = 77
unpack = jax.jit(unpack_mask, static_argnums=1, compiler_options=UNOPTIMIZED)
adjust = jax.jit(adjust_logits, compiler_options=UNOPTIMIZED)


@pytest.mark.parametrize("vocab_size", [1, 32, 77])
def test_masks_are_bits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for allowed in ([0], [vocab_size - 1], rng.permutation(vocab_size)[: vocab_size // 2 + 1].tolist()):
        words = pack_mask(allowed, vocab_size)
        assert words.shape == (mask_size(vocab_size),)
        expected = np.isin(np.arange(vocab_size), allowed)
        bits = [bool(words[i // 32] >> np.uint32(i % 32) & 1) for i in range(vocab_size)]
        assert bits == expected.tolist()
        assert np.array_equal(unpack(words[None], vocab_size)[0], expected)
    assert np.asarray(unpack(pack_mask(None, vocab_size)[None], vocab_size)).all()


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_each_device_gets_its_part_of_a_mask(num_parts: int) -> None:
    allowed = np.random.default_rng(0).permutation(VOCAB)[:30]
    expected = np.isin(np.arange(VOCAB + num_parts), allowed)
    size = -(-VOCAB // num_parts)
    part = jax.jit(mask_part, static_argnums=2, compiler_options=UNOPTIMIZED)
    for first_id in range(0, VOCAB, size):
        words = part(pack_mask(allowed.tolist(), VOCAB), np.int32(first_id), size)
        assert words.shape == (mask_size(size),)
        assert np.array_equal(unpack(np.asarray(words)[None], size)[0], expected[first_id : first_id + size])


def vllm_mask(logits: np.ndarray, allowed: Any, bad_words: list[list[int]], output: list[int]) -> np.ndarray:
    out = logits.copy()
    if allowed is not None:
        out[~np.isin(np.arange(len(out)), allowed)] = -np.inf
    for word in bad_words:
        begin = word[:-1]
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            out[word[-1]] = -np.inf
    return out


def padded(words: list[list[int]], num_words: int, num_ids: int) -> np.ndarray:
    out = np.full((num_words, num_ids), -1, np.int32)
    for row, word in zip(out, words, strict=False):
        row[-len(word) :] = word
    return out


def test_rows_forbid_the_same_tokens_as_vllm() -> None:
    """The vocabulary is small: beginnings of bad words occur in prompts, in outputs and across their border."""
    rng, num_rows, num_words, num_ids = np.random.default_rng(1), 64, 6, 4
    small = 4
    table = make_table(num_rows, VOCAB)
    prompts = [rng.integers(0, small, rng.integers(1, 6)).tolist() for _ in range(num_rows)]
    outputs = [rng.integers(0, small, rng.integers(0, 6)).tolist() for _ in range(num_rows)]
    words = [
        [rng.integers(0, small, rng.integers(1, num_ids + 1)).tolist() for _ in range(rng.integers(0, num_words + 1))]
        for _ in range(num_rows)
    ]
    allowed = [None if row % 3 == 0 else rng.permutation(VOCAB)[:60].tolist() for row in range(num_rows)]
    history = np.array(table.token_history)
    for row in range(num_rows):
        known = prompts[row] + outputs[row]
        history[row, : len(known)] = known
        history[row, len(known) :] = rng.integers(0, small)  # stale
    table = dataclasses.replace(
        table,
        token_history=history,
        prompt_len=np.array([len(p) for p in prompts], np.int32),
        allowed=np.stack([pack_mask(a, VOCAB) for a in allowed]),
        bad_words=np.stack([padded(w, num_words, num_ids) for w in words]),
    )
    asks = rng.random(num_rows) < 0.8
    kinds = np.where(asks, [1 if each else 2 for each in words], 0)
    position = np.array([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
    logits = rng.normal(size=(num_rows, VOCAB)).astype(np.float32)
    order = rng.permutation(num_rows)  # rows are not in the order of their slots
    rows = make_rows(num_rows, history_len=position[order], use_bias=kinds[order], slot=order)
    out = np.asarray(adjust(logits, rows, table))
    num_forbidden = 0
    for row, slot in enumerate(order):
        expected = vllm_mask(logits[row], allowed[slot], words[slot], outputs[slot]) if asks[slot] else logits[row]
        np.testing.assert_array_equal(out[row], expected)
        num_forbidden += len(words[slot]) > 0 and np.isneginf(expected[:small]).any()
    assert num_forbidden > 10


def test_an_id_forbidden_twice_and_biased_is_forbidden() -> None:
    table = make_table(1, VOCAB, bias={5: 100.0}, stop_ids=[5])
    table = dataclasses.replace(table, bad_words=padded([[5]] * 5, 5, 3)[None])
    rows = make_rows(1, use_bias=1, min_history_len=10)
    out = np.asarray(adjust(np.full((1, VOCAB), 1e9, np.float32), rows, table))
    assert np.isneginf(out[0, 5])
    assert (np.delete(out[0], 5) == np.float32(1e9)).all()


def test_an_unused_word_forbids_nothing() -> None:
    ends = jax.jit(bad_word_ends)(np.full((1, 3, 4), -1, np.int32), np.full((1, 3), -2, np.int32))
    assert (np.asarray(ends) == -1).all()
