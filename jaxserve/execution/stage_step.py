"""Programs of pipeline stages: hidden states pass from stage to stage, sampled tokens from the last one to all others.

Every stage has the sequences' lengths and pages, and finds the step's rows by itself. Only the last one samples. The
others learn later which tokens it has sampled and which sequences these have ended, before they compute these
sequences' next tokens.

With speculative decoding the first stage finds the drafts in its copy of the token histories, they pass from stage to
stage with the hidden states, and the last one verifies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.proposer import BothParams, Proposer
from jaxserve.execution.round import Model, StepOutput, begin, plain_round, run_model, with_counts
from jaxserve.execution.rows import planned_rows, remember_unsampled, round_tokens, state_rows
from jaxserve.execution.state import CLIPPED, DROPPED, ServeState
from jaxserve.execution.verification import Before, draft, place_nodes, run_rounds, with_sent_tokens
from jaxserve.models.params import Params

# (params, state, blob, what the previous stage has returned) -> (state, what the next stage takes, hidden states first)
StageStep = Callable[..., tuple[ServeState, tuple[Array, ...]]]

# (params, state, blob, hidden states) -> (state, (output, sampled tokens for the other stages))
LastStep = Callable[[Params, ServeState, Array, Array], tuple[ServeState, tuple[StepOutput, Array]]]

StageArrays = tuple[Array, Array, Array]  # ended sequences' mask, lengths, token history
TakeSampled = Callable[[StageArrays, Array], StageArrays]

_SAMPLED_ROWS = 4  # slot, index in the history, number of tokens, and whether they have ended the sequence


def num_sampled_rows(max_drafts: int) -> int:
    """Count the rows in the array for `take_sampled`, with ids for as many tokens as a row can sample."""
    return _SAMPLED_ROWS + 1 + max_drafts


def make_stage_step(model: Model, layout: BatchLayout) -> StageStep:
    """Return the program of a stage before the last one.

    To be jitted with the state donated.

    Args:
        model: static parameters, with the stage's layers.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
    """
    first_round = jnp.int32(0)

    def stage_step(params: Params, state: ServeState, blob: Array, *before: Array) -> tuple[ServeState, tuple[Array]]:
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
        state = dataclasses.replace(
            state,
            sequences=dataclasses.replace(sequences, length=length),
            slots=remember_unsampled(state.slots, rows, tokens),
        )
        return state, (hidden,)

    return stage_step


def make_speculative_stage_step(model: Model, layout: BatchLayout, proposer: Proposer) -> StageStep:
    """Return the program of a stage before the last one for a speculative round; see `make_stage_step`.

    The sequences get their lengths by `take_sampled`.

    Args:
        model: static parameters, with the stage's layers.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
        proposer: drafts tokens by the token histories only, in the first stage.
    """

    def stage_step(params: BothParams, state: ServeState, blob: Array, *before: Array) -> tuple[ServeState, Before]:
        state, batch = begin(state, layout, blob)
        state = with_sent_tokens(state, batch)
        none_sampled = jnp.zeros(layout.num_rows, jnp.int32)
        given = (before[0], before[1], before[2]) if before else None
        state, rows, drafts, _ = draft(params, state, batch, none_sampled, model, proposer, given)
        all_rows, tokens, tree_mask = place_nodes(state, rows, drafts)
        hidden, _, state = run_model(
            params[0],
            state,
            all_rows,
            tokens,
            batch.num_rows,
            model,
            tree_mask,
            before=before[0] if before else None,
        )
        return state, (hidden, drafts.token_ids, drafts.count)

    return stage_step


def make_speculative_last_step(model: Model, layout: BatchLayout, proposer: Proposer) -> Any:
    """Return the last stage's program for a speculative round; see `make_speculative_stage_step`."""
    first_round = jnp.int32(0)

    def last_step(
        params: BothParams, state: ServeState, blob: Array, *before: Array
    ) -> tuple[ServeState, tuple[StepOutput, Array]]:
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        state, output = run_rounds(params, state, batch, layout, model, proposer, 1, (before[0], before[1], before[2]))
        return state, (output, _sampled(state, rows.slot, rows.end.history, output.sampled, proposer.max_drafts))

    return last_step


def make_last_step(model: Model, layout: BatchLayout, max_drafts: int) -> LastStep:
    """Return the last stage's program, which samples; see `make_stage_step`.

    Speculative rounds draft up to `max_drafts` tokens.
    """
    first_round = jnp.int32(0)

    def last_step(
        params: Params, state: ServeState, blob: Array, before: Float[Array, "T D"]
    ) -> tuple[ServeState, tuple[StepOutput, Array]]:
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        state, output = plain_round(params, state, batch, first_round, model, before=before)
        state, output = with_counts(state, output)
        return state, (output, _sampled(state, rows.slot, rows.end.history, output.sampled, max_drafts))

    return last_step


def _sampled(
    state: ServeState,
    slot: Int[Array, " R"],
    history: Int[Array, " R"],
    sampled: Int[Array, "R columns"],
    max_drafts: int,
) -> Int[Array, "rows S"]:
    """Return the sampled tokens for other stages, padded to one entry per slot.

    Args:
        state: state after the step.
        slot: slot per row.
        history: how many tokens come before the sampled ones.
        sampled: number of sampled tokens per row, then their ids, and perhaps more.
        max_drafts: maximum number of drafted tokens, one less than a row can sample.
    """
    S = state.sequences.stopped.shape[0]
    count, token_ids = sampled[:, 0], sampled[:, 1 : 2 + max_drafts].T
    slots = jnp.where(count > 0, slot, S)
    stopped = state.sequences.stopped.at[slot].get(**CLIPPED).astype(jnp.int32)
    found = jnp.concatenate([jnp.stack([slots, history, count, stopped]), token_ids])
    num_rows = num_sampled_rows(max_drafts)
    return jnp.pad(found, ((0, num_rows - found.shape[0]), (0, S - found.shape[1])), constant_values=S)


def take_sampled(arrays: StageArrays, sampled: Int[Array, "rows S"]) -> StageArrays:
    """Return the mask of ended sequences, the lengths and the token history, all to be donated, with sampled tokens
    added.
    """
    stopped, length, history = arrays
    (slot, index, count, has_ended), token_ids = sampled[:_SAMPLED_ROWS], sampled[_SAMPLED_ROWS:]
    column = jnp.arange(token_ids.shape[0])[:, None]
    slots = jnp.where(column < count[None], slot[None], stopped.shape[0])
    return (
        stopped.at[slot].set(has_ended > 0, **DROPPED),
        length.at[slot].set(index + count - 1, **DROPPED),
        history.at[slots, index[None] + column].set(token_ids, **DROPPED),
    )


def stage_state_arrays(state: Any) -> tuple[Any, Any, Any]:
    """Return the arrays, or shapes, of a state that `take_sampled` updates."""
    return state.sequences.stopped, state.sequences.length, state.slots.token_history


def with_stage_arrays(state: ServeState, arrays: StageArrays) -> ServeState:
    """Return the state with the arrays that `take_sampled` has returned."""
    stopped, length, history = arrays
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(state.sequences, stopped=stopped, length=length),
        slots=dataclasses.replace(state.slots, token_history=history),
    )
