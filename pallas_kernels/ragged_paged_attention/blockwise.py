"""Blockwise attention to paged keys and values in plain XLA.

Decode rows (one token) are sorted by length and processed in groups with similar lengths; prefill rows are cut into
query tiles. Either way, a few queries for each of a few rows attend to one key block after the other with an online
softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Trip counts follow the lengths: a step without
prefill rows, or without decode rows, spends no time on them. A decode row's result does not depend on its neighbours:
blocks past its end leave its state bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind, Latents
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, decode, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tiles import ceil_div
from jaxserve.pallas_kernels.ragged_paged_attention.tree import MAX_NODES, tree_starts

OutputsT = TypeVar("OutputsT")  # an array with an entry per token, or several
DECODE_GROUP_ROWS = 16
DECODE_BLOCK_TOKENS = 64
PREFILL_TILE_QUERIES = 64
PREFILL_BLOCK_TOKENS = 128

# Finite stand-in for minus infinity: the difference between two must be 0, not NaN.
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class LayerPages:
    """One layer of a head-major pool, whose pages have a matrix `[P, H]` for each key and value head, or for latents.

    Attributes:
        kv_pages: pool with all layers.
        layer: layer to read.
        kind: vectors that the pool stores for a token.
    """

    kv_pages: Pages
    layer: int | Int32[Array, ""]
    kind: KVKind

    @property
    def page_size(self) -> int:
        """Number of tokens per page."""
        return int(values_of(self.kv_pages).shape[-2])

    def read(self, page_id: Int32[Array, "B b"]) -> tuple[Float32[Array, "B K S H"], Float32[Array, "B K S V"]]:
        """Return the keys and values in b pages for each of B sequences, as float32, with one token axis S.

        For latents, the values are the first elements of the keys.
        """
        page_id = self.layer * values_of(self.kv_pages).shape[1] + page_id
        if isinstance(self.kind, Latents):
            latents = self._gather(page_id[:, None, :])
            return latents, latents[..., : self.kind.rank]
        key = 2 * jnp.arange(self.kind.num_kv_heads, dtype=jnp.int32)[None, :, None]
        ids = 2 * self.kind.num_kv_heads * page_id[:, None, :] + key
        return self._gather(ids), self._gather(ids + 1)

    def _gather(self, ids: Int32[Array, "B K b"]) -> Float32[Array, "B K S H"]:
        """Gather b matrices for each of B sequences and K heads, join them along the token axis S, and decode them.

        An id is an index among the matrices of all layers, pages and heads.
        """
        token_axis = values_of(self.kv_pages).ndim - 2

        def gather(pages: Shaped[Array, "L N *rest"]) -> Shaped[Array, "B K S *H"]:
            matrices = pages.reshape(-1, *pages.shape[token_axis:])
            blocks = matrices.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
            return blocks.reshape(*ids.shape[:2], -1, *pages.shape[token_axis + 1 :])

        return decode(jax.tree.map(gather, self.kv_pages))


def attend(attention: Attention, q: Float[Array, "T Q H"], rows: RaggedRows) -> Float[Array, "T Q V"]:
    """Return the attention outputs of all new tokens over their rows' pages, zeros for padding tokens.

    Args:
        attention: pages and options.
        q: queries after RoPE.
        rows: the step's rows.
    """

    def attend_queries(queries: Queries, block_tokens: int) -> Float[Array, "B X Q V"]:
        return attend_blocks(attention, queries.take(q), queries, block_tokens)

    q_lens, max_queries = rows.live_q_lens(), attention.options.max_queries
    out = jnp.zeros((*q.shape[:2], attention.pages.kind.value_dim), q.dtype)
    out = fill_decode_rows(lambda queries: attend_queries(queries, DECODE_BLOCK_TOKENS), out, rows, q_lens == 1)
    if q.shape[0] == 1:
        return out
    attends = q_lens > 1 if max_queries is None else (q_lens > 1) & (q_lens <= max_queries)
    return fill_prefill_rows(
        lambda queries: attend_queries(queries, PREFILL_BLOCK_TOKENS), out, rows, attends, attention.nodes
    )


class Attention(NamedTuple):
    """What all queries in one layer attend to, and how.

    Attributes:
        pages: the layer's pages.
        options: static options.
        sinks: one logit per query head, without a value, or None.
        nodes: draft-tree nodes that each token sees, from `visible_nodes`, or None.
    """

    pages: LayerPages
    options: AttentionOptions
    sinks: Float[Array, "Q"] | None = None
    nodes: Int32[Array, "T columns"] | None = None


class Tree(NamedTuple):
    """Draft tree of a query tile's row."""

    nodes: Int32[Array, "X columns"]
    """`visible_nodes` of each query."""
    start: Int32[Array, ""]
    """Position of the tree's first node."""

    def shows(self, key_position: Int32[Array, "1 S"], window: int | None) -> Bool[Array, "1 X S"]:
        """Return the mask of keys that each query sees according to the tree; the caller must also mask later keys.

        Args:
            key_position: position of each key.
            window: number of tokens that a query sees, or None.
        """
        key_position = key_position[:, None, :]
        node = key_position - self.start
        word, bit = jnp.broadcast_arrays(self.nodes[None, :, :1], jnp.clip(node, 0, MAX_NODES - 1))
        in_window = window is None or self.nodes[None, :, 1:] - key_position < window
        return jnp.where(node < 0, in_window, lax.shift_right_logical(word, bit) & 1 == 1)


class Softmax(NamedTuple):
    """State of an online softmax over the keys seen so far, for B sequences with X queries and K * G heads each."""

    max_score: Float32[Array, "B K G X"]
    denominator: Float32[Array, "B K G X"]
    """Sum of the weights."""
    weighted_sum: Float32[Array, "B K G X V"]
    """Sum of the values times their weights."""

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Softmax:
        """Return the state before any key; `shape` is the shape of `weighted_sum`."""
        return Softmax(jnp.full(shape[:-1], _LOWEST), jnp.zeros(shape[:-1]), jnp.zeros(shape))

    def result(self) -> Float32[Array, "B K G X V"]:
        """Return the attention outputs, zeros for queries that have seen no key."""
        return self.weighted_sum / jnp.where(self.denominator > 0, self.denominator, 1)[..., None]

    def queries(self, start: Int32[Array, ""], num_queries: int) -> Softmax:
        """Return the state of `num_queries` consecutive queries, on the axis X, from index `start` on."""
        return Softmax(*(lax.dynamic_slice_in_dim(x, start, num_queries, 3) for x in self))

    def with_queries(self, start: Int32[Array, ""], state: Softmax) -> Softmax:
        """Return this state with the queries from index `start` on, on the axis X, replaced by `state`."""
        pairs = zip(self, state, strict=True)
        return Softmax(*(lax.dynamic_update_slice_in_dim(x, new, start, 3) for x, new in pairs))


class Queries(NamedTuple):
    """X queries for each of B rows.

    Attributes:
        take: function from an array with an entry per new token to the queries' entries.
        position: position of each query in its sequence; -1 for padding.
        page_table: page ids of each sequence.
        tree: draft tree of the only sequence, or None.
        end: position after the last key that each query sees; None if that is its own.
    """

    take: Callable[[Shaped[Array, "T *rest"]], Shaped[Array, "B X *rest"]]
    position: Int32[Array, "B X"]
    page_table: Int32[Array, "B M"]
    tree: Tree | None = None
    end: Int32[Array, "B X"] | None = None


def fill_decode_rows(
    compute: Callable[[Queries], OutputsT], out: OutputsT, rows: RaggedRows, is_filled: Bool[Array, "R"]
) -> OutputsT:
    """Fill in the outputs of some rows with one new token, one group of rows with similar lengths at a time.

    Args:
        compute: function that returns the outputs for a group's queries, arrays [B, 1, ...].
        out: outputs of all new tokens, arrays [T, ...].
        rows: the step's rows.
        is_filled: rows to compute.

    Returns:
        `out` with the outputs of these rows filled in.
    """
    T, R = jax.tree.leaves(out)[0].shape[0], rows.kv_lens.shape[0]
    group_rows = min(DECODE_GROUP_ROWS, R)
    kv_lens = jnp.where(is_filled, rows.kv_lens, 0)
    longest_first = jnp.argsort(kv_lens, descending=True).astype(jnp.int32)

    def fill_group(group: Int32[Array, ""], out: OutputsT) -> OutputsT:
        # The last group starts early enough to be full; rows that it repeats get identical results.
        start = jnp.minimum(group * group_rows, R - group_rows)
        row_id = lax.dynamic_slice(longest_first, (start,), (group_rows,))
        token_id = jnp.where(is_filled[row_id], rows.cu_q_lens[row_id], T)
        position = kv_lens[row_id][:, None] - 1
        page_table = rows.page_table[rows.table_rows(row_id)]
        queries = Queries(lambda x: x.at[token_id].get(mode="clip")[:, None], position, page_table)
        filled: OutputsT = jax.tree.map(
            lambda x, new: x.at[token_id].set(new[:, 0], mode="drop"), out, compute(queries)
        )
        return filled

    num_groups = (jnp.sum(is_filled, dtype=jnp.int32) + group_rows - 1) // group_rows
    result: OutputsT = lax.fori_loop(0, num_groups, fill_group, out)
    return result


def fill_prefill_rows(
    compute: Callable[[Queries], OutputsT],
    out: OutputsT,
    rows: RaggedRows,
    is_filled: Bool[Array, "R"],
    nodes: Int32[Array, "T columns"] | None = None,
    ahead: Int32[Array, "T"] | None = None,
) -> OutputsT:
    """Fill in the outputs of some rows with several new tokens, one query tile at a time.

    Args:
        compute: function that returns the outputs for a tile's queries, arrays [1, X, ...].
        out: outputs of all new tokens, arrays [T, ...].
        rows: the step's rows.
        is_filled: rows to compute.
        nodes: draft-tree nodes that each token sees, from `visible_nodes`, or None.
        ahead: number of later tokens that each token sees; only tokens that see some are filled in. None for none.

    Returns:
        `out` with the outputs of these rows filled in.
    """
    T = jax.tree.leaves(out)[0].shape[0]
    tile_size = min(PREFILL_TILE_QUERIES, T)
    num_tiles = jnp.where(is_filled, (rows.live_q_lens() + tile_size - 1) // tile_size, 0)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)

    def fill_tile(tile: Int32[Array, ""], out: OutputsT) -> OutputsT:
        row_id = jnp.sum(tile_ends <= tile, dtype=jnp.int32)
        first_token = rows.cu_q_lens[row_id] + (tile - tile_ends[row_id] + num_tiles[row_id]) * tile_size
        end_token = jnp.minimum(first_token + tile_size, rows.cu_q_lens[row_id + 1])
        # The last tile of the step may start before its first token: earlier queries are masked and their outputs kept.
        start = jnp.minimum(first_token, T - tile_size)
        token_id = start + jnp.arange(tile_size, dtype=jnp.int32)
        in_tile = (token_id >= first_token) & (token_id < end_token)
        position = jnp.where(in_tile, token_id + rows.kv_lens[row_id] - rows.cu_q_lens[row_id + 1], -1)
        page_table = rows.page_table[rows.table_rows(row_id)][None]

        def take(x: Shaped[Array, "T *rest"]) -> Shaped[Array, "1 X *rest"]:
            return lax.dynamic_slice_in_dim(x, start, tile_size)[None]

        tree = None if nodes is None else Tree(take(nodes)[0], tree_starts(rows)[row_id])
        if ahead is None:
            tile_out = compute(Queries(take, position[None], page_table, tree))
        else:
            in_tile &= take(ahead)[0] > 0
            position = jnp.where(in_tile, position, -1)
            end = jnp.where(in_tile, position + 1 + take(ahead)[0], 0)
            tile_out = compute(Queries(take, position[None], page_table, tree, end[None]))

        def fill(x: Shaped[Array, "T *rest"], new: Shaped[Array, "1 X *rest"]) -> Shaped[Array, "T *rest"]:
            mask = in_tile.reshape(-1, *[1] * (x.ndim - 1))
            return lax.dynamic_update_slice_in_dim(x, jnp.where(mask, new[0], take(x)[0]), start, axis=0)

        filled: OutputsT = jax.tree.map(fill, out, tile_out)
        return filled

    result: OutputsT = lax.fori_loop(0, tile_ends[-1], fill_tile, out)
    return result


def attend_blocks(
    attention: Attention,
    q: Float[Array, "B X Q H"],
    queries: Queries,
    block_tokens: int,
) -> Float[Array, "B X Q V"]:
    """Attend with X queries from each of B sequences, one key block at a time.

    Args:
        attention: pages and options.
        q: queries.
        queries: their positions, page tables and trees.
        block_tokens: number of tokens in a key block, rounded down to whole pages.
    """
    (B, X, Q, H), (_, position, page_table, tree, end) = q.shape, queries
    pages = attention.pages
    K, V, page_size = pages.kind.num_kv_heads, pages.kind.value_dim, pages.page_size
    block_pages = max(1, block_tokens // page_size)
    heads_q = q.astype(jnp.float32) * attention.options.scale
    heads_q = heads_q.reshape(B, X, K, Q // K, H).transpose(0, 2, 3, 1, 4)  # [B, K, G, X, H]
    window = attention.options.window
    depth_position = position if tree is None or window is None else tree.nodes[None, :, 1]
    first_key, end_key = _key_range(position, depth_position, window)
    if end is not None:
        end_key = jnp.max(end, axis=1)
    first_page = first_key // page_size
    num_blocks = ceil_div(jnp.max(ceil_div(end_key, page_size) - first_page), block_pages)

    def absorb_block(block: Int32[Array, ""], state: Softmax) -> Softmax:
        column = (first_page + block * block_pages)[:, None] + jnp.arange(block_pages, dtype=jnp.int32)[None, :]
        is_used = column * page_size < end_key[:, None]
        page_id = jnp.where(is_used, jnp.take_along_axis(page_table, column, axis=1, mode="clip"), 0)
        k, v = pages.read(page_id)
        key_position = column[:, :1] * page_size + jnp.arange(block_pages * page_size, dtype=jnp.int32)[None, :]
        # Zero weights alone would let stale NaN or Inf through.
        in_range = (key_position >= first_key[:, None]) & (key_position < end_key[:, None])
        v = jnp.where(in_range[:, None, :, None], v, 0)
        visible = _visible(position, key_position, window if tree is None else None, end)
        if tree is not None:
            visible &= tree.shows(key_position, window)
        return absorb(state, heads_q, k, v, visible, attention.options.soft_cap)

    state = lax.fori_loop(0, num_blocks, absorb_block, _start(attention.sinks, (*heads_q.shape[:-1], V)))
    return state.result().transpose(0, 3, 1, 2, 4).reshape(B, X, Q, V).astype(q.dtype)


def _key_range(
    position: Int32[Array, "B X"], depth_position: Int32[Array, "B X"], window: int | None
) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
    """Return the first and end position of the keys that at least one query in each sequence sees.

    Args:
        position: position of each query; -1 for padding.
        depth_position: position from which each query's window counts back.
        window: number of tokens that a query sees, or None.
    """
    last = jnp.max(position, axis=1)
    if window is None:
        return jnp.zeros_like(last), last + 1
    first = jnp.min(jnp.where(position >= 0, depth_position, last[:, None]), axis=1)
    return jnp.maximum(first - window + 1, 0), last + 1


def _visible(
    position: Int32[Array, "B X"],
    key_position: Int32[Array, "B S"],
    window: int | None,
    end: Int32[Array, "B X"] | None,
) -> Bool[Array, "B X S"]:
    """Return the mask of keys that each query sees: not later ones, or only those before `end`, and in its window."""
    distance = position[:, :, None] - key_position[:, None, :]
    if end is not None:
        is_before = key_position[:, None, :] < end[:, :, None]
        return is_before if window is None else is_before & (distance < window)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _start(sinks: Float[Array, "Q"] | None, shape: tuple[int, ...]) -> Softmax:
    """Return the softmax state before any key: empty, or with a logit per query head as the first score (`sinks`).

    `shape` is `(B, K, G, X, V)`.
    """
    if sinks is None:
        return Softmax.empty(shape)
    B, K, G, X, _ = shape
    per_head = sinks.astype(jnp.float32).reshape(1, K, G, 1)
    return Softmax(jnp.broadcast_to(per_head, (B, K, G, X)), jnp.ones((B, K, G, X)), jnp.zeros(shape))


def absorb(
    state: Softmax,
    q: Float32[Array, "B K G X H"],
    k: Float32[Array, "B K S H"],
    v: Float32[Array, "B K S V"],
    visible: Bool[Array, "B X S"],
    soft_cap: float | None = None,
) -> Softmax:
    """Return the softmax state after one more key block; queries that see none of its keys keep their state.

    Args:
        state: state after the previous blocks.
        q: scaled queries.
        k: keys in the block.
        v: values in the block.
        visible: mask of the keys that each query sees.
        soft_cap: bound on the scores, or None.
    """
    visible = visible[:, None, None]  # [B, 1, 1, X, S]
    scores = jnp.einsum("bkgxh,bksh->bkgxs", q, k, precision=lax.Precision.HIGHEST)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, _LOWEST)
    max_score = jnp.maximum(state.max_score, jnp.max(scores, axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - max_score[..., None]), 0)
    rescale = jnp.exp(state.max_score - max_score)
    values = jnp.einsum("bkgxs,bksv->bkgxv", weights, v, precision=lax.Precision.HIGHEST)
    return Softmax(
        max_score=max_score,
        denominator=state.denominator * rescale + jnp.sum(weights, axis=-1),
        weighted_sum=state.weighted_sum * rescale[..., None] + values,
    )
