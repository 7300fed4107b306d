"""Acceptance of drafted tokens: samples each row's tokens, and keeps them as long as they match the draft.

All tokens are sampled together if each depends on earlier ones only through its logits. Otherwise they are sampled one
after the other, each exactly as in a plain round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.batch import SpeculativeBatch
from jaxserve.execution.proposer import Drafts
from jaxserve.execution.round import Model, StepOutput
from jaxserve.execution.rows import Rows, advance, ends_sequence
from jaxserve.execution.sampling import DraftedTokens, SamplingRows, count_sampled, sample
from jaxserve.execution.state import CLIPPED, ServeState


def accept(
    state: ServeState,
    batch: SpeculativeBatch,
    rows: Rows,
    drafts: Drafts,
    logits: Float[Array, "N1 R V"],
    out: StepOutput,
    model: Model,
) -> tuple[ServeState, StepOutput, Int[Array, "R N1"], Int[Array, " R"]]:
    """Sample each row's tokens up to the first one that was not drafted.

    All are sampled together if each depends on earlier ones only through its logits, and one after the other if
    penalties, masks or log probabilities are wanted.

    Args:
        state: device state.
        batch: inputs of the step.
        rows: rows of the round.
        drafts: drafted tokens.
        logits: logits at each node of the drafts, per row.
        out: output of earlier rounds in the step.
        model: static parameters.

    Returns:
        The state and the output with the sampled tokens, the node taken by each row at each depth, and the number of
        drafted tokens that each row keeps.
    """
    together = _SampledTogether.from_logits(state, batch, rows, drafts, logits, model)
    state, out = together.write(state, rows, out)
    live = rows.samples & ~together.is_done
    state, out, path, num_accepted = _accept_in_turn(
        state, batch, rows, drafts, logits, out, model, live, together.path
    )
    return state, out, path, together.num_accepted + num_accepted


class _SampledTogether(NamedTuple):
    """Tokens for all nodes in a round, sampled independently.

    Attributes:
        is_done: False if the tokens depend on each other; then none is kept.
        token_ids: token sampled by each row at each depth.
        num_kept: number of tokens kept by each row.
        path: node taken by each row at each depth; the depth itself after its end.
        ends: True for rows whose last token ends the sequence.
        num_accepted: number of drafted tokens kept by each row.
    """

    is_done: Bool[Array, ""]
    token_ids: Int[Array, "R N1"]
    num_kept: Int[Array, " R"]
    path: Int[Array, "R N1"]
    ends: Bool[Array, " R"]
    num_accepted: Int[Array, " R"]

    @staticmethod
    def from_logits(
        state: ServeState,
        batch: SpeculativeBatch,
        rows: Rows,
        drafts: Drafts,
        logits: Float[Array, "N1 R V"],
        model: Model,
    ) -> _SampledTogether:
        """Sample a token at every node of each row's drafts, and keep those on one path.

        The path begins at node 0 and continues to a child whenever the child's draft token equals the token sampled at
        its parent; it stops if that token ends the sequence.
        """
        R, N = drafts.token_ids.shape
        draw = model.split.sample if model.split else sample

        def flat(values: Array) -> Array:
            return jnp.broadcast_to(values, (N + 1, *values.shape)).reshape(-1, *values.shape[1:])

        depth = drafts.depth
        history_len = rows.end.history[None] + depth.T
        records = flat(state.sequences.records.at[rows.slot].get(**CLIPPED))
        sampling = SamplingRows(records, history_len.reshape(-1), flat(rows.samples))
        depends = sampling.is_masked | sampling.is_biased | sampling.is_penalised
        is_done = ~(jnp.any(depends) | (batch.wants_logprobs > 0))
        drawn = None
        if drafts.weights is not None:
            token_ids = jnp.pad(drafts.token_ids.T, ((0, 1), (0, 0))).reshape(-1)
            is_there = (jnp.arange(N + 1)[:, None] < drafts.count[None]) & rows.samples[None]
            weights = jnp.pad(drafts.weights, ((0, 1), (0, 0), (0, 0)))
            drawn = DraftedTokens(token_ids, is_there.reshape(-1), weights.reshape(-1, weights.shape[2]))
        sampled = lax.cond(
            is_done,
            lambda: draw(logits.reshape((N + 1) * R, -1), sampling, state.slots, batch.base_seed, drawn),
            lambda: jnp.zeros((N + 1) * R, jnp.int32),
        )
        is_last = ends_sequence(
            state.sequences, flat(rows.slot), sampling.history_len, sampling.min_history_len, state.slots, sampled
        )
        sampled, is_last = (x.reshape(N + 1, R).T for x in (sampled, is_last))
        parent, words = drafts.parent, drafts.words
        is_child = drafts.children(sampled)
        goes_on = is_child & ~jnp.take_along_axis(is_last, parent, axis=1)
        bits = jnp.asarray(1 << np.arange(N + 1), jnp.int32)  # N is at most 31
        reached = jnp.pad(goes_on, ((0, 0), (1, 0)), constant_values=True)
        seen = jnp.sum(jnp.where(reached, bits[None], 0), axis=1, keepdims=True, dtype=jnp.int32)
        live = reached & (words & ~seen == 0) & rows.samples[:, None] & is_done
        level = jnp.arange(N + 1)[None]
        at_level = live[:, None] & (depth[:, None] == level[:, :, None])  # [R, N1, N1], at most one node per level
        num_kept = jnp.sum(live, axis=1, dtype=jnp.int32)
        path = jnp.sum(jnp.where(at_level, jnp.arange(N + 1)[None, None], 0), axis=2, dtype=jnp.int32)
        path = jnp.where(level < num_kept[:, None], path, level)
        return _SampledTogether(
            is_done,
            jnp.take_along_axis(sampled, path, axis=1),
            num_kept,
            path,
            jnp.any(live & is_last, axis=1),
            jnp.sum(is_child & jnp.take_along_axis(live, parent, axis=1), axis=1, dtype=jnp.int32),
        )

    def write(self, state: ServeState, rows: Rows, out: StepOutput) -> tuple[ServeState, StepOutput]:
        """Return the state after the kept tokens, and `out` with these tokens appended per row."""
        sequences, slots, S = state.sequences, state.slots, state.sequences.length.shape[0]
        R, num_levels = self.token_ids.shape
        index = jnp.arange(num_levels)[None]
        is_kept = index < self.num_kept[:, None]
        slot = jnp.where(is_kept, rows.slot[:, None], S)  # out of range, dropped
        end = rows.end.history
        history = slots.token_history.at[slot, end[:, None] + index].set(self.token_ids, mode="drop")
        length = sequences.length.at[slot[:, 0]].set(end + self.num_kept - 1, mode="drop")
        stopped = sequences.stopped.at[jnp.where(self.ends, rows.slot, S)].set(True, mode="drop")
        state = dataclasses.replace(
            state,
            sequences=dataclasses.replace(sequences, length=length, stopped=stopped),
            slots=dataclasses.replace(slots, token_history=history),
        )
        row = jnp.where(is_kept, jnp.arange(R)[:, None], R)
        sampled = out.sampled.at[row, 1 + out.sampled[:, :1] + index].set(self.token_ids, mode="drop")
        return state, dataclasses.replace(out, sampled=sampled.at[:, 0].add(self.num_kept))


def _accept_in_turn(
    state: ServeState,
    batch: SpeculativeBatch,
    rows: Rows,
    drafts: Drafts,
    logits: Float[Array, "N1 R V"],
    out: StepOutput,
    model: Model,
    live: Bool[Array, " R"],
    path: Int[Array, "R N1"],
) -> tuple[ServeState, StepOutput, Int[Array, "R N1"], Int[Array, " R"]]:
    """Sample the `live` rows' tokens one after the other, each with the counts and stops that earlier ones cause.

    Arguments and results as in `accept`; `path` has the nodes of the other rows.
    """
    R, N = drafts.token_ids.shape
    split = model.split
    draw = split.sample if split else sample
    records = state.sequences.records.at[rows.slot].get(**CLIPPED)
    S = state.slots.token_history.shape[0]  # out of range, dropped
    row = jnp.arange(R)

    def goes_on(carry: tuple[Any, ...]) -> Bool[Array, ""]:
        return jnp.any(carry[1])

    def sample_next(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, live, state, out, path, num_accepted = carry
        node = lax.dynamic_index_in_dim(path, index, axis=1, keepdims=False)
        at = dataclasses.replace(rows, q_lens=jnp.where(live, rows.q_lens + index, 0), samples=live)
        logits_at = logits[node, row]
        drawn = None
        if drafts.weights is not None:
            following = jnp.minimum(index, N - 1)
            weights = lax.dynamic_index_in_dim(drafts.weights, following, 0, keepdims=False)
            drawn = DraftedTokens(drafts.token_ids[:, following], live & (index < drafts.count), weights)
        sampling = SamplingRows(records, rows.end.history + index, live)
        sampled = draw(logits_at, sampling, state.slots, batch.base_seed, drawn)
        history = state.slots.token_history.at[jnp.where(live, rows.slot, S), sampling.history_len]
        slots = dataclasses.replace(state.slots, token_history=history.set(sampled, mode="drop"))
        counts = count_sampled(slots.token_counts, sampling, sampled, split.first_id if split else 0)
        sequences = advance(state.sequences, at, sampling, slots, sampled)
        state = dataclasses.replace(state, sequences=sequences, slots=dataclasses.replace(slots, token_counts=counts))
        column = out.sampled[:, 0]
        to_row = jnp.where(live, row, R)
        words = lax.cond(
            batch.wants_logprobs > 0,
            lambda: model.read_logprobs(logits_at, sampled, model.logprobs.num_top).pack(),
            lambda: jnp.zeros((R, model.logprobs.num_words), jnp.int32),
        )
        out = dataclasses.replace(
            out,
            sampled=out.sampled.at[to_row, 1 + column].set(sampled, mode="drop").at[:, 0].add(live.astype(jnp.int32)),
            logprobs=out.logprobs.at[to_row, column].set(words, mode="drop"),
        )
        is_child = drafts.children(jnp.broadcast_to(sampled[:, None], (R, N + 1))) & (drafts.parent == node[:, None])
        is_accepted = live & jnp.any(is_child, axis=1)
        child = jnp.where(is_accepted, 1 + jnp.argmax(is_child, axis=1), index + 1)
        path = path.at[:, index + 1].set(jnp.where(live, child, path.at[:, index + 1].get(**CLIPPED)), mode="drop")
        stopped = sequences.stopped.at[rows.slot].get(**CLIPPED)
        return index + 1, is_accepted & ~stopped, state, out, path, num_accepted + is_accepted

    start = (jnp.int32(0), live, state, out, path, jnp.zeros(R, jnp.int32))
    _, _, state, out, path, num_accepted = lax.while_loop(goes_on, sample_next, start)
    return state, out, path, num_accepted
