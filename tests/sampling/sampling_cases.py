"""Rows and tables for sampling tests: neutral by default, any field overridden by a scalar or an array."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling import SamplingRows, SlotTable

CAPACITY = 200  # tokens per slot

DEFAULTS = {
    "temperature": np.float32(1),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "position": np.int32(0),
    "prompt_len": np.int32(0),
    "min_position": np.int32(0),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "repetition_penalty": np.float32(1),
    "use_bias": np.bool_(False),
    "live": np.bool_(True),
}


def make_rows(num_rows, seed=0, **fields):
    """SamplingRows that ask for plain sampling except for `fields`; row r has slot r."""
    values = {name: np.broadcast_to(fields.pop(name, value), num_rows) for name, value in DEFAULTS.items()}
    arrays = {name: jnp.asarray(value, DEFAULTS[name].dtype) for name, value in values.items()}
    words = np.broadcast_to(np.asarray(seed, np.uint64), num_rows)
    arrays["seed"] = jnp.asarray(np.stack([words & 0xFFFFFFFF, words >> np.uint64(32)], 1).astype(np.uint32))
    arrays["slot"] = jnp.asarray(fields.pop("slot", np.arange(num_rows)), jnp.int32)
    assert not fields, f"unknown fields {list(fields)}"
    return SamplingRows(**arrays)


def make_table(num_slots, history=None, bias=None, stop_ids=()):
    """SlotTable with the same bias {id: value} and stop ids in every slot."""
    bias = bias or {}
    history = np.zeros((num_slots, CAPACITY)) if history is None else history
    return SlotTable(
        token_history=jnp.asarray(history, jnp.int32),
        bias_ids=_padded(list(bias), num_slots, -1, np.int32),
        bias_values=_padded(list(bias.values()), num_slots, 0, np.float32),
        stop_ids=_padded(list(stop_ids), num_slots, -1, np.int32),
    )


def any_rows(rng, num_rows):
    """Rows that ask for everything at random, greedy and padding rows included."""

    def maybe(off, values):
        return np.where(rng.random(num_rows) < 0.5, off, values)

    prompt_len = rng.integers(1, CAPACITY // 2, num_rows)
    return make_rows(
        num_rows,
        seed=rng.integers(0, 2**63, num_rows),
        temperature=maybe(0, rng.uniform(0.1, 2, num_rows)),
        top_k=maybe(0, rng.integers(1, 50, num_rows)),
        top_p=maybe(1, rng.uniform(0.1, 1, num_rows)),
        min_p=maybe(0, rng.uniform(0, 0.3, num_rows)),
        prompt_len=prompt_len,
        position=prompt_len + rng.integers(0, CAPACITY // 2, num_rows),
        min_position=maybe(0, CAPACITY),
        presence_penalty=maybe(0, rng.uniform(-2, 2, num_rows)),
        frequency_penalty=maybe(0, rng.uniform(-2, 2, num_rows)),
        repetition_penalty=maybe(1, rng.uniform(0.5, 2, num_rows)),
        use_bias=rng.random(num_rows) < 0.5,
        live=rng.random(num_rows) < 0.8,
    )


def any_table(rng, num_slots, vocab_size):
    """A SlotTable of random history, with some biases and stop ids."""
    history = rng.integers(0, vocab_size, (num_slots, CAPACITY))
    return make_table(num_slots, history, bias={1: 3.0, 7: -5.0}, stop_ids=[2, 5])


def take_rows(rows, index):
    """The rows at `index`, in that order."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[np.asarray(index)]), rows)


def _padded(values, num_slots, fill, dtype):
    row = np.full(4, fill, dtype)  # more than any test needs, so that padding is always exercised
    row[: len(values)] = values
    return jnp.asarray(np.tile(row, (num_slots, 1)))
