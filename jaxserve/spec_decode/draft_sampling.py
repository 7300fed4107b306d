"""Draft sampling for proposers that sample their tokens."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.proposer import Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.sampling import DRAFT, SamplingRows, draw_by_weight, token_weights
from jaxserve.execution.state import CLIPPED, ServeState

Carry = TypeVar("Carry")


def over_vocabulary(
    logits: Float[Array, "R own"], vocab_size: int, outputs: Int[Array, " V"] | None
) -> Float[Array, "R V"]:
    """Return a proposer's logits over the model's vocabulary, -inf for tokens that the proposer lacks.

    Args:
        logits: logits over the proposer's vocabulary.
        vocab_size: model vocabulary size, V.
        outputs: the proposer's id for each token of the model, -1 if it has none; None if ids are the same.
    """
    if outputs is not None:
        return jnp.where(outputs[None] >= 0, logits.at[:, outputs].get(**CLIPPED), -jnp.inf)
    missing = max(vocab_size - logits.shape[1], 0)
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)[:, :vocab_size]


def draft_chain(
    state: ServeState,
    rows: Rows,
    num_drafts: Int[Array, " R"],
    base_seed: UInt32[Array, ""],
    compute: Callable[[Int[Array, ""], Bool[Array, " R"], Int[Array, "R K"], Carry], tuple[Float[Array, "R V"], Carry]],
    carry: Carry,
    *,
    max_drafts: int,
    vocab_size: int | None,
) -> tuple[Drafts, Carry]:
    """Draft a chain for each row, token by token, each sampled with the row's parameters.

    Args:
        state: state with all sequences.
        rows: rows in the round.
        num_drafts: tokens to draft per row.
        base_seed: engine seed.
        compute: function that returns the draft logits of the next token and a new carry. Its arguments are the token's
            index in the chain, a mask of the rows that draft it, the tokens drafted so far, and the last carry.
        carry: carry for the first token: any pytree.
        max_drafts: maximum drafts per row, K.
        vocab_size: vocabulary size, V; None to draft the most likely tokens, without weights.

    Returns:
        The drafts, and the last carry.
    """
    R = rows.slot.shape[0]
    token_ids = jnp.zeros((R, max_drafts), jnp.int32)
    if vocab_size is None:

        def draft_likely(index: Int[Array, ""], so_far: tuple[Array, Carry]) -> tuple[Array, Carry]:
            token_ids, carry = so_far
            logits, carry = compute(index, index < num_drafts, token_ids, carry)
            likely = jnp.argmax(logits, axis=1).astype(jnp.int32)
            return lax.dynamic_update_slice(token_ids, likely[:, None], (0, index)), carry

        token_ids, carry = lax.fori_loop(0, jnp.max(num_drafts), draft_likely, (token_ids, carry))
        return Drafts(token_ids, num_drafts, None), carry
    records = state.sequences.records.at[rows.slot].get(**CLIPPED)

    def draft(index: Int[Array, ""], so_far: tuple[Array, Array, Carry]) -> tuple[Array, Array, Carry]:
        token_ids, weights, carry = so_far
        live = index < num_drafts
        logits, carry = compute(index, live, token_ids, carry)
        sampling = SamplingRows(records, rows.start.history + 1 + index, live)
        drawn, weights = draw_draft(logits, sampling, index, weights, base_seed)
        return lax.dynamic_update_slice(token_ids, drawn[:, None], (0, index)), weights, carry

    weights = jnp.zeros((max_drafts, R, vocab_size), jnp.float32)
    token_ids, weights, carry = lax.fori_loop(0, jnp.max(num_drafts), draft, (token_ids, weights, carry))
    return Drafts(token_ids, num_drafts, weights), carry


def draw_draft(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    index: Int[Array, ""],
    weights: Float[Array, "K R V"],
    base_seed: UInt32[Array, ""],
) -> tuple[Int[Array, " R"], Float[Array, "K R V"]]:
    """Sample one draft token per row.

    Args:
        logits: the draft model's logits.
        rows: row sampling parameters.
        index: number of tokens drafted before, from 0 to K - 1.
        weights: unnormalised draft probabilities for all K positions, filled in before `index`.
        base_seed: engine seed.

    Returns:
        Token ids, and `weights` with position `index` filled in for all rows; unchanged if all rows are greedy.
    """

    def draw() -> tuple[Array, Array]:
        own = token_weights(logits, rows)
        token_ids = draw_by_weight(own, rows, base_seed, DRAFT)
        return token_ids, lax.dynamic_update_slice(weights, own[None], (index, 0, 0))

    drawn: tuple[Array, Array] = lax.cond(
        jnp.any(rows.is_sampled), draw, lambda: (jnp.argmax(logits, axis=1).astype(jnp.int32), weights)
    )
    return drawn
