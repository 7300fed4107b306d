"""Rows and tables for sampling tests, in the host's memory: neutral, any field overridden by a scalar or an array."""

import jax
import numpy as np

from jaxserve.execution.sampling import SAMPLING_RECORD, SamplingRows, SlotTable
from jaxserve.execution.sampling.penalties import PROMPT
from jaxserve.execution.sampling.token_mask import pack_mask

CAPACITY = 200  # tokens per slot
VOCAB_SIZE = 300  # default of all tests

NEUTRAL = {"temperature": 1, "top_p": 1, "repetition_penalty": 1}


def make_rows(num_rows, seed=0, history_len=0, live=True, **fields):
    """Return SamplingRows that ask for plain sampling except for `fields`; row r has slot r."""
    records = np.zeros(num_rows, SAMPLING_RECORD)
    for name, value in {"slot": np.arange(num_rows), **NEUTRAL, **fields}.items():
        records[name] = value
    words = np.broadcast_to(np.asarray(seed, np.uint64), num_rows)
    records["seed"] = np.stack([words & 0xFFFFFFFF, words >> np.uint64(32)], 1)
    return SamplingRows(
        records=records.view(np.int32).reshape(num_rows, -1),
        history_len=np.broadcast_to(history_len, num_rows).astype(np.int32),
        live=np.broadcast_to(live, num_rows).astype(bool),
    )


def make_table(num_slots, vocab_size=VOCAB_SIZE, counts=None, bias=None, stop_ids=(), allowed=None):
    """Return a SlotTable with the same bias {id: value}, stop ids and allowed ids in every slot."""
    bias = bias or {}
    counts = np.zeros((num_slots, vocab_size)) if counts is None else counts
    return SlotTable(
        token_history=np.zeros((num_slots, CAPACITY), np.int32),
        token_counts=np.asarray(counts).astype(np.int32),
        prompt_len=np.zeros(num_slots, np.int32),
        allowed=np.tile(pack_mask(allowed, vocab_size), (num_slots, 1)),
        bad_words=np.full((num_slots, 5, 3), -1, np.int32),
        bias_ids=_padded(list(bias), num_slots, -1, np.int32),
        bias_values=_padded(list(bias.values()), num_slots, 0, np.float32),
        stop_ids=_padded(list(stop_ids), num_slots, -1, np.int32),
    )


def counts_of(prompts, outputs, vocab_size=VOCAB_SIZE):
    """Return the token counts of each slot's prompt and output, as penalties use them."""
    counts = np.zeros((len(prompts), vocab_size), np.int64)
    for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        counts[slot, np.asarray(prompt, int)] = PROMPT
        counts[slot, np.asarray(output, int)] = 0
        counts[slot] += np.bincount(np.asarray(output, int), minlength=vocab_size)
    return counts


def any_rows(rng, num_rows):
    """Return rows that ask for everything at random, greedy and padding rows included."""

    def maybe(off, values):
        return np.where(rng.random(num_rows) < 0.5, off, values)

    return make_rows(
        num_rows,
        seed=rng.integers(0, 2**63, num_rows),
        temperature=maybe(0, rng.uniform(0.1, 2, num_rows)),
        top_k=maybe(0, rng.integers(1, 50, num_rows)),
        top_p=maybe(1, rng.uniform(0.1, 1, num_rows)),
        min_p=maybe(0, rng.uniform(0, 0.3, num_rows)),
        history_len=rng.integers(1, CAPACITY, num_rows),
        min_history_len=maybe(0, CAPACITY),
        presence_penalty=maybe(0, rng.uniform(-2, 2, num_rows)),
        frequency_penalty=maybe(0, rng.uniform(-2, 2, num_rows)),
        repetition_penalty=maybe(1, rng.uniform(0.5, 2, num_rows)),
        use_bias=rng.random(num_rows) < 0.5,
        live=rng.random(num_rows) < 0.8,
    )


def any_table(rng, num_slots, vocab_size):
    """Return a SlotTable of random prompts and outputs, with some biases and stop ids."""
    prompts, outputs = rng.integers(0, vocab_size, (2, num_slots, CAPACITY // 4))
    counts = counts_of(prompts, outputs, vocab_size)
    allowed = rng.permutation(vocab_size)[: vocab_size * 3 // 4].tolist()
    return make_table(num_slots, vocab_size, counts, bias={1: 3.0, 7: -5.0}, stop_ids=[2, 5], allowed=allowed)


def take_rows(rows, index):
    """Return the rows at `index`, in that order."""
    return jax.tree.map(lambda x: x[np.asarray(index)], rows)


def _padded(values, num_slots, fill, dtype):
    row = np.full(4, fill, dtype)  # more than any test needs, so that padding is always exercised
    row[: len(values)] = values
    return np.tile(row, (num_slots, 1))
