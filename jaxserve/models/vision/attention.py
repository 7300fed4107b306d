"""Attention in vision towers: each token attends to its image or window, before and after it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK_QUERIES, BLOCK_KEYS = 256, 512
_MASKED = -1e30  # finite, so that blocks without a visible key do not give NaN


def attend(
    q: Float[Array, "T heads H"],
    k: Float[Array, "T heads H"],
    v: Float[Array, "T heads H"],
    spans: Int[Array, "2 T"],
    scale: float,
) -> Float[Array, "T heads H"]:
    """Return softmax attention between each query and the keys in its span, zeros for empty spans.

    Scores are computed blockwise (Dao et al. 2022). A block of queries only visits key blocks in its spans, so that
    several images in one program cost no more than in several programs.

    Args:
        q: queries.
        k: keys.
        v: values.
        spans: each query's first key, and the one after its last.
        scale: factor on scores.
    """
    T, heads, head_dim = q.shape
    num_blocks = -(-T // BLOCK_QUERIES)
    num_keys = -(-T // BLOCK_KEYS) * BLOCK_KEYS
    queries = jnp.pad(q, ((0, num_blocks * BLOCK_QUERIES - T), (0, 0), (0, 0)))
    queries = jnp.swapaxes(queries.reshape(num_blocks, BLOCK_QUERIES, heads, head_dim), 1, 2)
    keys, values = (jnp.swapaxes(jnp.pad(x, ((0, num_keys - T), (0, 0), (0, 0))), 0, 1) for x in (k, v))
    # Padding has the last token's span, so that it does not extend a block's keys.
    padding = ((0, 0), (0, num_blocks * BLOCK_QUERIES - T))
    block_spans = jnp.pad(spans, padding, mode="edge").reshape(2, num_blocks, BLOCK_QUERIES).swapaxes(0, 1)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def attend_block(block: tuple[Array, Array]) -> Array:
        """Return the outputs [heads, BLOCK_QUERIES, H] for one block's queries and spans."""
        queries, (first, end) = block

        def add(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """Add a key block to the running maximum, sum and outputs."""
            top, total, out = state
            start = index * BLOCK_KEYS
            own_keys, own_values = (lax.dynamic_slice_in_dim(x, start, BLOCK_KEYS, axis=1) for x in (keys, values))
            key = start + jnp.arange(BLOCK_KEYS)
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
            dot = {"precision": precision, "preferred_element_type": jnp.float32}
            scores = jnp.where(seen[None], jnp.einsum("hqd,hkd->hqk", queries, own_keys, **dot) * scale, _MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen[None], jnp.exp(scores - new_top), 0)
            kept = jnp.exp(top - new_top)
            added = jnp.einsum("hqk,hkd->hqd", weights.astype(own_values.dtype), own_values, **dot)
            return new_top, total * kept + weights.sum(axis=-1, keepdims=True), out * kept + added

        shape = (heads, BLOCK_QUERIES, 1)
        state = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((heads, BLOCK_QUERIES, head_dim)))
        low, high = first.min() // BLOCK_KEYS, -(-end.max() // BLOCK_KEYS)
        _, total, out = lax.fori_loop(low, high, add, state)
        return out / jnp.maximum(total, 1e-30)

    out = lax.map(attend_block, (queries, block_spans))
    with jax.named_scope("join"):
        return jnp.swapaxes(out, 1, 2).reshape(-1, heads, head_dim)[:T].astype(q.dtype)
