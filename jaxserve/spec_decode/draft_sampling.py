"""Draft sampling for proposers that sample their tokens."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.execution.sampling import DRAFT, SamplingRows, draw_by_weight, token_weights
from jaxserve.execution.state import CLIPPED


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
