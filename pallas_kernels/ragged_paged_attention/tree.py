"""Draft trees: visibility between a row's last tokens. See `AttentionInputs.tree_mask`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows

MAX_NODES = 32  # bits per word


def tree_starts(rows: RaggedRows) -> Int32[Array, "R"]:
    """Return the position of each row's first token that may be a draft-tree node: it is among the last 32 new ones."""
    return rows.kv_lens - jnp.minimum(rows.live_q_lens(), MAX_NODES)


def visible_nodes(tree_mask: Int32[Array, "T"], rows: RaggedRows, window: int | None) -> Int32[Array, "T columns"]:
    """Return which draft-tree nodes each token sees, as bits in a word, and with a window also the token's position by
    depth.

    Args:
        tree_mask: bits of each token's ancestors; see `AttentionInputs.tree_mask`.
        rows: the step's rows.
        window: number of tokens that a query sees, or None.

    Returns:
        One or two columns per token. The word has the token's own bit, no later bits, and only nodes inside the window.
        The position by depth counts ancestors instead of tokens in the pool; the window over the tokens before the tree
        is counted from there.
    """
    token_id = jnp.arange(tree_mask.shape[0], dtype=jnp.int32)
    row_id = rows.row_ids(token_id)
    position = token_id + (rows.kv_lens - rows.cu_q_lens[1:])[row_id]
    start = tree_starts(rows)[row_id]
    token_bit = lax.shift_left(jnp.ones_like(token_id), jnp.clip(position - start, 0, MAX_NODES - 1))
    words = (tree_mask & (token_bit - 1)) | token_bit
    if window is None:
        return words[:, None]
    depth_position = jnp.where(position < start, position, start + lax.population_count(words) - 1)
    if window < MAX_NODES:
        node = jnp.arange(MAX_NODES, dtype=jnp.int32)
        distance = lax.population_count(lax.shift_right_logical(*jnp.broadcast_arrays(words[:, None], node))) - 1
        words &= jnp.sum(jnp.where(distance < window, lax.shift_left(jnp.ones_like(node), node), 0), axis=1)
    return jnp.stack([words, depth_position], axis=1)
