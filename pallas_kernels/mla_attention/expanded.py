"""Attention over the keys and values that heads' matrices make of latents, for rows of many new tokens, in plain XLA.

A block of latents is expanded once for all queries of its row, which then pass a tile at a time. A query-key pair costs
n + d products for its score and v for its value, where latents cost 2r + d; a key costs r (n + v) to expand. Trip
counts follow the lengths of the rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.mla_attention.interface import HeadMatrices
from jaxserve.pallas_kernels.ragged_paged_attention.blocks import LayerPages, Softmax, absorb
from jaxserve.pallas_kernels.ragged_paged_attention.interface import RaggedRows
from jaxtyping import Array, Float, Float32, Int32

TILE_QUERIES = 128
BLOCK_TOKENS = 256


def fewest_queries(matrices: HeadMatrices) -> int | None:
    """Return the new tokens from which on a row of any length is cheaper in this form; None if it never is.

    For q of them and k keys, the latents themselves cost q r (n + v) products with the matrices, and q k (2r + d) in
    scores and values; this form costs k r (n + v) and q k (n + d + v).
    """
    _, nope_dim, rank = matrices.to_keys.shape
    expanded = nope_dim + matrices.to_values.shape[1]
    spared = 2 * rank - expanded
    return -(-rank * expanded // spared) if spared > 0 else None


def attend(
    q: Float[Array, "T Q H"],
    matrices: HeadMatrices,
    pages: LayerPages,
    rows: RaggedRows,
    scale: float,
    fewest: int,
    out: Float[Array, "T Q V"],
) -> Float[Array, "T Q V"]:
    """Return the outputs of rows of at least `fewest` new tokens; those of the others are in `out`.

    Args:
        q: queries of heads, whose last elements are rotated.
        matrices: matrices of the heads.
        pages: pages of the layer, with the new latents.
        rows: rows of the step.
        scale: factor on the scores.
        fewest: fewest new tokens of a row.
        out: outputs so far.
    """
    (T, Q, _), V = q.shape, out.shape[2]
    tile, block_pages = min(TILE_QUERIES, T), max(1, BLOCK_TOKENS // pages.page_size)
    block = block_pages * pages.page_size
    q_lens = rows.live_q_lens()
    is_long = q_lens >= fewest
    longest_first = jnp.argsort(q_lens, descending=True).astype(jnp.int32)
    # The last tile of a row may go on behind its tokens, those of the step included.
    heads_q = jnp.pad(q, ((0, tile), (0, 0), (0, 0))).swapaxes(0, 1)[None, :, None]
    state = Softmax.empty((1, Q, 1, T + tile, V))

    def attend_row(index: Int32[Array, ""], state: Softmax) -> Softmax:
        row_id = longest_first[index]
        q_len, kv_len, first_token = q_lens[row_id], rows.kv_lens[row_id], rows.cu_q_lens[row_id]
        page_table, num_cached = rows.page_table[rows.table_rows(row_id)], kv_len - q_len

        def absorb_block(number: Int32[Array, ""], state: Softmax) -> Softmax:
            column = number * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            page_id = jnp.where(column * pages.page_size < kv_len, page_table.at[column].get(mode="clip"), 0)
            key_position = number * block + jnp.arange(block, dtype=jnp.int32)
            latents = pages.read(page_id[None])[0][0, 0]
            keys, values = _expand(jnp.where(key_position[:, None] < kv_len, latents, 0), matrices)  # no stale NaN

            def absorb_tile(number: Int32[Array, ""], state: Softmax) -> Softmax:
                place = number * tile + jnp.arange(tile, dtype=jnp.int32)
                visible = (num_cached + place)[:, None] >= key_position[None]
                visible &= (place < q_len)[:, None]
                start = first_token + number * tile
                tile_q = lax.dynamic_slice_in_dim(heads_q, start, tile, 3).astype(jnp.float32) * scale
                after = absorb(state.part(start, tile), tile_q, keys[None], values[None], visible[None])
                return state.with_part(start, after)

            first_tile = jnp.maximum(number * block - num_cached, 0) // tile
            return lax.fori_loop(first_tile, (q_len + (tile - 1)) // tile, absorb_tile, state)

        return lax.fori_loop(0, (kv_len + (block - 1)) // block, absorb_block, state)

    state = lax.fori_loop(0, jnp.sum(is_long, dtype=jnp.int32), attend_row, state)
    token_id = jnp.arange(T, dtype=jnp.int32)
    is_own = is_long[rows.row_ids(token_id)] & (token_id < rows.cu_q_lens[rows.num_rows])
    found = state.result()[0, :, 0, :T].swapaxes(0, 1)
    return jnp.where(is_own[:, None, None], found.astype(out.dtype), out)


def _expand(
    latents: Float32[Array, "S W"], matrices: HeadMatrices
) -> tuple[Float32[Array, "Q S H"], Float32[Array, "Q S V"]]:
    """Return the keys and values of every head, rotated parts included."""
    (Q, _, rank), (S, W) = matrices.to_keys.shape, latents.shape
    own, shared = latents[:, :rank], jnp.broadcast_to(latents[:, rank:], (Q, S, W - rank))
    keys, values = (
        jnp.einsum("sr,qhr->qsh", own, matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        for matrix in matrices
    )
    return jnp.concatenate([keys, shared], axis=-1), values
