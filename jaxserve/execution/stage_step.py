"""Programs of pipeline stages: hidden states pass from stage to stage, sampled tokens from the last one to all others.

Every stage has the sequences' lengths and pages, and finds the step's rows by itself. Only the last one samples. The
others learn later which tokens it has sampled and which sequences these have ended, before they compute these
sequences' next tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.round import Model, StepOutput, begin, plain_round, run_model, with_counts
from jaxserve.execution.rows import planned_rows, round_tokens, state_rows
from jaxserve.execution.state import CLIPPED, DROPPED, ServeState
from jaxserve.models.params import Params

# (params, state, blob, hidden states unless it is the first) -> (state, hidden states)
StageStep = Callable[..., tuple[ServeState, Array]]

# (params, state, blob, hidden states) -> (state, (output, sampled tokens for the other stages))
LastStep = Callable[[Params, ServeState, Array, Array], tuple[ServeState, tuple[StepOutput, Array]]]

# ((stopped, token history), sampled tokens) -> (stopped, token history)
TakeSampled = Callable[[tuple[Array, Array], Array], tuple[Array, Array]]

SAMPLED_ROWS = 4  # slot, index in the history, token id, and whether it has ended the sequence


def make_stage_step(model: Model, layout: BatchLayout) -> StageStep:
    """Return the program of a stage before the last one.

    To be jitted with the state donated.

    Args:
        model: static parameters, with the stage's layers.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
    """
    first_round = jnp.int32(0)

    def stage_step(params: Params, state: ServeState, blob: Array, *before: Array) -> tuple[ServeState, Array]:
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        tokens = round_tokens(batch, rows, state.slots, first_round, model.arch.image_token_id)
        hidden, _, state = run_model(
            params,
            state,
            rows,
            tokens,
            batch.num_rows,
            model,
            state_rows=state_rows(batch, rows, tokens),
            before=before[0] if before else None,
        )
        sequences = state.sequences
        computed = jnp.where(rows.q_lens > 0, rows.slot, sequences.length.shape[0])
        length = sequences.length.at[computed].set(rows.end.history, **DROPPED)
        return dataclasses.replace(state, sequences=dataclasses.replace(sequences, length=length)), hidden

    return stage_step


def make_last_step(model: Model, layout: BatchLayout) -> LastStep:
    """Return the program of the last stage, which samples; see `make_stage_step`."""
    first_round = jnp.int32(0)

    def last_step(
        params: Params, state: ServeState, blob: Array, before: Float[Array, "T D"]
    ) -> tuple[ServeState, tuple[StepOutput, Array]]:
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        state, output = plain_round(params, state, batch, first_round, model, before=before)
        state, output = with_counts(state, output)
        return state, (output, _sampled(state, rows.slot, rows.end.history, output.sampled))

    return last_step


def _sampled(
    state: ServeState, slot: Int[Array, " R"], history: Int[Array, " R"], sampled: Int[Array, "R 2"]
) -> Int[Array, "4 S"]:
    """Return what other stages need of the sampled tokens, padded to one entry per slot.

    Args:
        state: state after the step.
        slot: slot per row.
        history: number of tokens before the sampled one.
        sampled: number of sampled tokens per row, 0 or 1, and the token.
    """
    S = state.sequences.stopped.shape[0]
    slots = jnp.where(sampled[:, 0] > 0, slot, S)
    stopped = state.sequences.stopped.at[slot].get(**CLIPPED).astype(jnp.int32)
    found = jnp.stack([slots, history, sampled[:, 1], stopped])
    return jnp.pad(found, ((0, 0), (0, S - found.shape[1])), constant_values=S)


def take_sampled(
    arrays: tuple[Bool[Array, " S"], Int[Array, "S C"]], sampled: Int[Array, "4 S"]
) -> tuple[Bool[Array, " S"], Int[Array, "S C"]]:
    """Return the mask of ended sequences and the token history, both to be donated, with sampled tokens added."""
    stopped, history = arrays
    slot, index, token_id, has_ended = sampled
    return (
        stopped.at[slot].set(has_ended > 0, **DROPPED),
        history.at[slot, index].set(token_id, **DROPPED),
    )


def stage_state_arrays(state: Any) -> tuple[Any, Any]:
    """Return the arrays, or shapes, of a state that `take_sampled` updates."""
    return state.sequences.stopped, state.slots.token_history


def with_stage_arrays(state: ServeState, arrays: tuple[Array, Array]) -> ServeState:
    """Return the state with the arrays that `take_sampled` has returned."""
    stopped, history = arrays
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(state.sequences, stopped=stopped),
        slots=dataclasses.replace(state.slots, token_history=history),
    )
