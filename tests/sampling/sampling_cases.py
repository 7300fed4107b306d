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


def take_rows(rows, index):
    """The rows at `index`, in that order."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[np.asarray(index)]), rows)


def _padded(values, num_slots, fill, dtype):
    row = np.full(4, fill, dtype)  # more than any test needs, so that padding is always exercised
    row[: len(values)] = values
    return jnp.asarray(np.tile(row, (num_slots, 1)))
