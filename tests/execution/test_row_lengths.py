"""Rows of a round: their lengths, and where their sequences end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxserve.execution.batch import admission_layout
from jaxserve.execution.rows import Rows, ends_sequence
from jaxserve.execution.state import ServeState, new_state
from jaxserve.execution.step import make_admit
from jaxserve.models import registry
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests.checkpoints import hf_dict

R, STOP_ID = 6, 5


@pytest.mark.parametrize("offset", [0, 9])
def test_sequences_end_by_position_and_stop_ids_wait_for_the_history(offset: int) -> None:
    """Rows of 10 tokens compute one: the history then has 11, and the position is `offset` beyond that."""
    schedule = ScheduleConfig(R, R, 64, 4, 16)
    state = new_state(registry.from_hf_config(hf_dict("llama")), schedule, kv_dtype=jnp.float32, backend="xla")
    layout = admission_layout(schedule)
    blob, to = layout.new()
    end_position = np.array([12, 13, 12 + offset, 13 + offset, 99, 99])
    columns = {"slot": range(R), "start": 10, "end_position": end_position}
    for name, values in (columns | {"position_offset": offset, "cache_offset": -4}).items():
        to[name][:] = values
    to["stop_ids"][:] = STOP_ID
    min_history_len = jnp.array([0, 0, 0, 0, 11, 12])
    sampled = jnp.array([0, 0, 0, 0, STOP_ID, STOP_ID])

    @jax.jit
    def end(state: ServeState, blob: Array) -> tuple[tuple[Array, ...], Array]:
        state, slot = make_admit(layout)(state, blob), jnp.arange(R)
        sequences = state.sequences
        rows = Rows.packed(slot, sequences.lengths(slot), jnp.ones(R, jnp.int32), slot >= 0)
        return rows.end, ends_sequence(sequences, slot, rows.end.history, min_history_len, state.slots, sampled)

    lengths, is_last = end(state, blob)
    np.testing.assert_array_equal(lengths, np.broadcast_to([[11], [11 + offset], [7]], (3, R)))
    np.testing.assert_array_equal(is_last, [*(12 + offset >= end_position[:4]), True, False])
