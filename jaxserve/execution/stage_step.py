"""Programs of pipeline stages: hidden states pass from stage to stage, sampled tokens from the last one to all others.

Every stage has the sequences' lengths and pages, and finds the step's rows by itself. Only the last one samples. The
others learn later which tokens it has sampled and which sequences these have ended, before they compute these
sequences' next tokens.

With speculative decoding the first stage begins with drafts, they pass from stage to stage with the hidden states, and
the last one verifies them. The first stage drafts by its copy of the token histories, or the last one has drafted after
the row's previous round and sent the drafts with the sampled tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.proposer import BothParams, Drafts, Observer, Proposer, StageProposer
from jaxserve.execution.round import Model, StepOutput, begin, plain_round, run_model, with_counts
from jaxserve.execution.rows import Rows, planned_rows, remember_unsampled, round_tokens, state_rows
from jaxserve.execution.state import CLIPPED, DROPPED, ServeState
from jaxserve.execution.verification import Before, draft, place_nodes, run_rounds, with_sent_tokens
from jaxserve.models.params import Params

# (params, state, blob, what the previous stage has returned) -> (state, what the next stage takes, hidden states first)
StageStep = Callable[..., tuple[ServeState, tuple[Array, ...]]]

# (params, state, blob, hidden states) -> (state, (output, sampled tokens for the other stages))
LastStep = Callable[[Any, ServeState, Array, Array], tuple[ServeState, tuple[StepOutput, Array]]]

StageArrays = tuple[Array, Array, Array, Any]  # ended sequences' mask, lengths, token history, proposer's state
TakeSampled = Callable[[StageArrays, Array], StageArrays]

# slot, index in the history, number of tokens, whether they have ended the sequence, number of drafts to follow them
_SAMPLED_ROWS = 5


def num_sampled_rows(max_drafts: int) -> int:
    """Count the rows in the array for `take_sampled`, with ids for all tokens that a row can sample, and for drafts."""
    return _SAMPLED_ROWS + 1 + 2 * max_drafts


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
        proposer: drafts tokens in the first stage, or has the other stages' ones.
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
        # The proposer computes up to here; `take_sampled` will tell it which drafts were accepted.
        lengths = state.sequences.length.at[rows.slot].set(all_rows.end.history, **DROPPED)
        ahead = dataclasses.replace(state, sequences=dataclasses.replace(state.sequences, length=lengths))
        path = jnp.broadcast_to(jnp.arange(proposer.max_nodes + 1), (layout.num_rows, proposer.max_nodes + 1))
        state = dataclasses.replace(state, draft=proposer.settle(ahead, rows, drafts, path))
        return state, (hidden, drafts.token_ids, drafts.count)

    return stage_step


def make_speculative_last_step(model: Model, layout: BatchLayout, proposer: Proposer, page_size: int) -> Any:
    """Return the last stage's program for a speculative round; see `make_speculative_stage_step`.

    If the proposer observes hidden states, it drafts the tokens for the rows' next round.
    """
    first_round = jnp.int32(0)

    def last_step(
        params: BothParams, state: ServeState, blob: Array, *before: Array
    ) -> tuple[ServeState, tuple[StepOutput, Array]]:
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        state, output = run_rounds(params, state, batch, layout, model, proposer, 1, (before[0], before[1], before[2]))
        drafts = None
        if isinstance(proposer, Observer):
            num_drafts = _num_next(state, rows, jnp.minimum(batch.num_drafts, batch.max_new - 1), proposer, page_size)
            with jax.named_scope("propose"):
                drafts, draft_state = proposer.propose(
                    params, state, _next_rows(state, rows), num_drafts, batch.base_seed
                )
            state = dataclasses.replace(state, draft=draft_state)
        sampled = _sampled(state, rows.slot, rows.end.history, output.sampled, proposer.max_drafts, drafts)
        return state, (output, sampled)

    return last_step


def _next_rows(state: ServeState, rows: Rows) -> Rows:
    """Return the rows of the next round: sequences that have not ended, with one token each."""
    live = rows.samples & ~state.sequences.stopped.at[rows.slot].get(**CLIPPED)
    return Rows.packed(rows.slot, state.sequences.lengths(rows.slot), live.astype(jnp.int32), live)


def _num_next(
    state: ServeState, rows: Rows, planned: Int[Array, " R"], proposer: Proposer, page_size: int
) -> Int[Array, " R"]:
    """Return how many tokens to draft for each row's next round; 0 for sequences that have ended.

    A draft layer writes an entry for each token but the last one, and the sequences have the pages of this round only.

    Args:
        state: state after the round.
        rows: rows of the round.
        planned: tokens that were planned to be drafted in it.
        proposer: drafts the tokens.
        page_size: tokens per page.
    """
    after = _next_rows(state, rows)
    num_entries = ((rows.start.cached + jnp.maximum(planned, 0)) // page_size + 1) * page_size
    limit = jnp.clip(num_entries - after.start.cached + 1, 0, proposer.max_drafts)
    return jnp.where(after.samples, limit, 0)


def make_last_step(model: Model, layout: BatchLayout, max_drafts: int) -> LastStep:
    """Return the last stage's program, which samples; see `make_stage_step`.

    Speculative rounds draft up to `max_drafts` tokens.
    """
    first_round = jnp.int32(0)

    def last_step(
        all_params: Any, state: ServeState, blob: Array, before: Float[Array, "T before"]
    ) -> tuple[ServeState, tuple[StepOutput, Array]]:
        params, observe = model.observing(all_params)
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        state, output = plain_round(params, state, batch, first_round, model, observe, before)
        state, output = with_counts(state, output)
        return state, (output, _sampled(state, rows.slot, rows.end.history, output.sampled, max_drafts))

    return last_step


def _sampled(
    state: ServeState,
    slot: Int[Array, " R"],
    history: Int[Array, " R"],
    sampled: Int[Array, "R columns"],
    max_drafts: int,
    drafts: Drafts | None = None,
) -> Int[Array, "rows S"]:
    """Return the sampled tokens for other stages, and drafts to follow them, padded to one entry per slot.

    Args:
        state: state after the step.
        slot: slot per row.
        history: how many tokens come before the sampled ones.
        sampled: number of sampled tokens per row, then their ids, and perhaps more.
        max_drafts: maximum number of drafted tokens, one less than a row can sample.
        drafts: drafts for each row's next round; None for none.
    """
    S = state.sequences.stopped.shape[0]
    count, token_ids = sampled[:, 0], sampled[:, 1 : 2 + max_drafts].T
    slots = jnp.where(count > 0, slot, S)
    stopped = state.sequences.stopped.at[slot].get(**CLIPPED).astype(jnp.int32)
    num_drafts = jnp.zeros_like(count) if drafts is None else drafts.count
    token_ids = jnp.pad(token_ids, ((0, 1 + max_drafts - token_ids.shape[0]), (0, 0)))
    drafted = [] if drafts is None else [drafts.token_ids.T]
    found = jnp.concatenate([jnp.stack([slots, history, count, stopped, num_drafts]), token_ids, *drafted])
    num_rows = num_sampled_rows(max_drafts)
    return jnp.pad(found, ((0, num_rows - found.shape[0]), (0, S - found.shape[1])), constant_values=S)


def make_take_sampled(proposer: Proposer | None) -> TakeSampled:
    """Return the program of a stage before the last one that takes the sampled tokens.

    Its first argument, the mask of ended sequences, the lengths, the token history and the proposer's state, is to be
    donated.
    """

    def take_sampled(arrays: StageArrays, sampled: Int[Array, "rows S"]) -> StageArrays:
        stopped, length, history, draft = arrays
        (slot, index, count, has_ended, num_drafts), token_ids = sampled[:_SAMPLED_ROWS], sampled[_SAMPLED_ROWS:]
        num_tokens = 1 + token_ids.shape[0] // 2
        token_ids, drafted = token_ids[:num_tokens], token_ids[num_tokens:]
        column, known = jnp.arange(num_tokens)[:, None], index + count - 1
        slots = jnp.where(column < count[None], slot[None], stopped.shape[0])
        if proposer is not None:
            assert isinstance(proposer, StageProposer), "proposers that observe hidden states are in the last stage"
            draft = proposer.take(draft, slot, known, num_drafts, drafted.T)
        return (
            stopped.at[slot].set(has_ended > 0, **DROPPED),
            length.at[slot].set(known, **DROPPED),
            history.at[slots, index[None] + column].set(token_ids, **DROPPED),
            draft,
        )

    return take_sampled


def set_history(history: Int[Array, "S C"], slot: Int[Array, ""], token_ids: Int[Array, " C"]) -> Int[Array, "S C"]:
    """Return the token history, to be donated, with a new sequence of which cached pages have the beginning."""
    return history.at[slot].set(jnp.maximum(token_ids, 0))


def stage_state_arrays(state: Any) -> tuple[Any, Any, Any, Any]:
    """Return the arrays, or shapes, of a state that `take_sampled` updates."""
    return state.sequences.stopped, state.sequences.length, state.slots.token_history, state.draft


def with_stage_arrays(state: ServeState, arrays: StageArrays) -> ServeState:
    """Return the state with the arrays that `take_sampled` has returned."""
    stopped, length, history, draft = arrays
    return dataclasses.replace(
        state,
        draft=draft,
        sequences=dataclasses.replace(state.sequences, stopped=stopped, length=length),
        slots=dataclasses.replace(state.slots, token_history=history),
    )
