"""Pooling model's step: chunks of prompts in, vectors out. No row ever samples or decodes.

A request has capacity for one token after its prompt. The step that computes the prompt's last token returns a vector
in place of that token, which ends the request.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.api.pooling_params import PoolingKind
from jaxserve.execution.round import Model, StepOutput, begin, run_model, with_counts
from jaxserve.execution.rows import Rows, Tokens, place_tokens, planned_rows, state_rows
from jaxserve.execution.state import CLIPPED, ServeState
from jaxserve.layers.linear import linear
from jaxserve.models.pooling_heads import HEAD

if TYPE_CHECKING:
    from jaxserve.execution.batch import BatchLayout
    from jaxserve.execution.step import Program
    from jaxserve.models.params import Params


def make_pooling_step(model: Model, layout: BatchLayout) -> Program:
    """Return the program (params, state, blob) -> (state, output) for a pooling model's step.

    To be jitted with `state` donated. `layout` has the bucket's sizes. A pipeline stage also takes the previous one's
    hidden states, unless it is the first one, and only the last one pools; the others return their hidden states.
    """
    assert model.arch.pooler is not None, "a model that pools has a pooler"
    kind, has_head = model.arch.pooler.kind, model.arch.pooler.num_labels > 0

    def pooling_step(params: Params, state: ServeState, blob: Array, *before: Array) -> tuple[ServeState, Any]:
        state, batch = begin(state, layout, blob)
        sequences = state.sequences
        rows = planned_rows(sequences, batch, jnp.int32(0))
        row, _, at, live = place_tokens(rows, layout.num_tokens)
        planned = jnp.arange(layout.num_tokens, dtype=jnp.int32)  # no row has stopped
        token_ids = jnp.maximum(batch.token_ids, 0)
        tokens = Tokens(row, at.history, at.position, live, planned, token_ids)
        hidden, _, state = run_model(
            params,
            state,
            rows,
            tokens,
            batch.num_rows,
            model,
            state_rows=state_rows(batch, rows, tokens),
            last_only=kind is PoolingKind.LAST and model.arch.stage.is_last,
            before=before[0] if before else None,
        )
        S = sequences.length.shape[0]  # out of range, dropped
        length = sequences.length.at[jnp.where(rows.q_lens > 0, rows.slot, S)].set(rows.end.history, mode="drop")
        state = dataclasses.replace(state, sequences=dataclasses.replace(sequences, length=length))
        if not model.arch.stage.is_last:
            return state, (hidden,)
        with jax.named_scope("pool"):
            pooled, kept = pool(hidden, rows, tokens, state.pooled, kind)
            if has_head:
                pooled = linear(pooled.astype(hidden.dtype), params[HEAD], dtype=jnp.float32)
        state = dataclasses.replace(state, pooled=kept)
        counted = jnp.stack([rows.samples.astype(jnp.int32), jnp.zeros_like(rows.slot)], axis=1)
        empty = jnp.zeros((0, 0), jnp.int32)
        return with_counts(state, StepOutput(counted, empty[:, None], empty, pooled))

    return pooling_step


def pool(
    hidden: Float[Array, "T D"], rows: Rows, tokens: Tokens, kept: Float[Array, "S D"] | None, kind: PoolingKind
) -> tuple[Float[Array, "R D"], Float[Array, "S D"] | None]:
    """Pool each row's hidden states; return a vector per row, and `kept` with this step's chunks included.

    A vector is final if its row has computed the prompt's last token.

    Args:
        hidden: hidden states from the step's tokens.
        rows: the step's rows.
        tokens: the step's tokens.
        kept: results from earlier chunks by slot: sums for MEAN, the first hidden state for CLS; None for LAST.
        kind: tokens that count.
    """
    if kept is None:
        return hidden.at[rows.cu_q_lens[1:] - 1].get(**CLIPPED).astype(jnp.float32), None
    first, earlier = rows.start.history == 0, kept.at[rows.slot].get(**CLIPPED)
    if kind is PoolingKind.CLS:
        own = hidden.at[rows.cu_q_lens[:-1]].get(**CLIPPED).astype(jnp.float32)
        total = jnp.where(first[:, None], own, earlier)
    else:
        R = rows.slot.shape[0]
        is_in_row = (jnp.arange(R)[:, None] == tokens.row[None, :]) & tokens.live[None, :]
        # A matmul, because the order of additions in a scatter varies on a GPU.
        own = jnp.dot(is_in_row.astype(jnp.float32), hidden.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        total = own + jnp.where(first[:, None], 0.0, earlier)
    slot = jnp.where(rows.q_lens > 0, rows.slot, kept.shape[0])
    kept = kept.at[slot].set(total, mode="drop")
    return total if kind is PoolingKind.CLS else total / jnp.maximum(rows.end.history, 1)[:, None], kept
