"""Rows of a round: their lengths, and where their sequences end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.rows import Rows, ends_sequence
from jaxserve.execution.state import new_sequences, new_slots
from jaxserve.models import registry
from jaxserve.schedule_config import ScheduleConfig
from tests.checkpoints import hf_dict

STOP_ID = 5


@pytest.mark.parametrize("offset", [0, 9])
def test_sequences_end_by_position_and_stop_ids_wait_for_the_history(offset: int) -> None:
    """Rows of 10 tokens compute one: the history then has 11, and the position is `offset` beyond that."""
    end_position = np.array([12, 13, 12 + offset, 13 + offset, 99, 99])
    min_history_len = jnp.array([0, 0, 0, 0, 11, 12])
    sampled = jnp.array([0, 0, 0, 0, STOP_ID, STOP_ID])
    R = len(sampled)
    new = new_sequences(ScheduleConfig(R, R, 64, 4, 16))
    offsets = np.broadcast_to([[offset], [-4]], (2, R))
    sequences = dataclasses.replace(
        new,
        length=jnp.full(R, 10, jnp.int32),
        admitted=jnp.asarray(np.concatenate([end_position[None], offsets]), jnp.int32),
    )
    slots = new_slots(registry.from_hf_config(hf_dict("llama")), R, 64)
    slots = dataclasses.replace(slots, stop_ids=slots.stop_ids.at[:].set(STOP_ID))

    @jax.jit
    def end(slot):
        rows = Rows.of(slot, sequences.lengths(slot), jnp.ones(R, jnp.int32), slot >= 0)
        return rows.end, ends_sequence(sequences, slot, rows.end, min_history_len, slots, sampled)

    lengths, is_last = end(jnp.arange(R))
    np.testing.assert_array_equal(lengths, np.broadcast_to([[11], [11 + offset], [7]], (3, R)))
    position = 11 + offset
    np.testing.assert_array_equal(is_last, [*(position + 1 >= end_position[:4]), True, False])
