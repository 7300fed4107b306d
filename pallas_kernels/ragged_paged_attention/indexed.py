"""MLA over the tokens that an indexer chooses (DeepSeek Sparse Attention, DSA; DeepSeek-V3.2), in plain XLA.

A layer stores one index key per token next to the latents, under the same page ids. The index score of a query and a
key is `sum_h w_h relu(q_h . k)` over the indexer's heads h. A query attends to the `top_k` tokens with the highest
scores; of equal scores the lowest positions come first. Scores are float32 and have no other factors: a positive
constant changes no order.

Rows with at most `top_k` tokens attend to all of them, by the backend's kernels. In longer rows, a decoding row gathers
the latents of its tokens, and reads no others. A prefill tile attends to all latents, a block at a time, under a mask.

Layers may share an earlier layer's choice (IndexCache, arXiv 2603.12201). They have no indexer and no index keys; the
choice reaches them as a bit per query and token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxserve.pallas_kernels.ragged_paged_attention.attention import pool_page_size
from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import (
    DECODE_BLOCK_TOKENS,
    DECODE_GROUP_ROWS,
    PREFILL_BLOCK_TOKENS,
    PREFILL_TILE_QUERIES,
    Queries,
    Softmax,
    absorb,
    fill_decode_rows,
    fill_prefill_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.canonical_pages import CanonicalPages
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, HeadMatrices, MLAInputs
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.mla import mla_attention
from jaxserve.pallas_kernels.ragged_paged_attention.pools import backend_named, layout_for
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, pool_dtype
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.ragged_paged_attention.rows import PagesToRead
from jaxserve.pallas_kernels.ragged_paged_attention.tiles import ceil_div
from jaxserve.pallas_kernels.ragged_paged_attention.top_scores import positions_in_mask, top_mask, top_positions
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes

WORD_BITS = 32


class IndexInputs(NamedTuple):
    """Indexer outputs for a step's tokens; `MLAInputs.rope` rotates the last elements of queries and keys."""

    q: Float[Array, "N heads size"]
    """Queries; N is T, or R with `last_only`."""
    weights: Float[Array, "N heads"]
    """Weight of each head's scores."""
    k: Float[Array, "T size"]
    """New index keys, cast to the pool's dtype."""


class IndexedPages(NamedTuple):
    """Pool of latents, and of the index keys under the same page ids, in the layers with an indexer."""

    latents: Pages
    index_keys: Float[Array, "indexers N P size"]


class ChosenTokens(NamedTuple):
    """Tokens that a step's queries chose in an earlier layer, for layers that share the choice.

    Attributes:
        bits: a bit for each token in the query's row; arbitrary for rows within the choice.
        num_indexers: number of earlier layers with an indexer.
    """

    bits: UInt32[Array, "T words"]
    num_indexers: Int32[Array, ""]

    @staticmethod
    def none(num_tokens: int, max_len: int, top_k: int) -> ChosenTokens:
        """Return the choice before the first layer, without bits if rows have at most `top_k` tokens."""
        num_words = -(-max_len // WORD_BITS) if max_len > top_k else 0
        return ChosenTokens(jnp.zeros((num_tokens, num_words), jnp.uint32), jnp.int32(0))


def indexed_mla_attention(
    inputs: MLAInputs,
    index: IndexInputs | None,
    pool: IndexedPages,
    layer: Int32[Array, ""],
    options: AttentionOptions,
    *,
    top_k: int,
    backend: str,
    earlier: ChosenTokens | None = None,
) -> tuple[Float[Array, "N Q v"], IndexedPages, ChosenTokens | None]:
    """Write the new latents and index keys to their rows' pages; attend to the `top_k` tokens that each query chooses.

    Return the outputs, the pool and, if `earlier` is given, the choice for later layers.

    Args:
        inputs: per-head queries, new latents, per-head matrices and rows.
        index: the indexer's outputs; None to attend to the tokens chosen `earlier`.
        pool: pool, whose index keys have the canonical layout, donated.
        layer: layer in the pool.
        options: static options, with the rank of the latents.
        top_k: maximum tokens that a query attends to.
        backend: name of the backend that writes the latents and attends in rows with at most `top_k` tokens.
        earlier: choice of earlier layers; None if no layers share one, and every layer has index keys.
    """
    rows, page_size, index_keys = inputs.rows, pool_page_size(backend, pool.latents), pool.index_keys
    key_layer = layer if earlier is None else earlier.num_indexers
    if index is not None:
        new_keys = index.k if inputs.rope is None else apply_rope(index.k[:, None], inputs.rope)[:, 0]
        slots = rows.slot_mapping(new_keys.shape[0], num_pages=index_keys.shape[1], page_size=page_size)
        new_keys = new_keys.astype(index_keys.dtype)
        index_keys = index_keys.at[key_layer, *slots].set(new_keys, mode="drop", unique_indices=True)
    later = earlier
    if earlier is not None and index is not None:
        later = earlier._replace(num_indexers=earlier.num_indexers + 1)
    if rows.page_table.shape[1] * page_size <= top_k:
        out, latents = mla_attention(inputs, pool.latents, layer, options, backend=backend)
        return out, IndexedPages(latents, index_keys), later
    chooses = rows.kv_lens > top_k
    # The kernels compute no useful outputs for these rows, and read only the pages to which they write.
    first = jnp.where(chooses, (rows.kv_lens - rows.live_q_lens()) // page_size, 0)
    columns = first[:, None] + jnp.arange(rows.page_table.shape[1], dtype=jnp.int32)[None]
    written = inputs._replace(rows=rows._replace(pages_to_read=PagesToRead(columns, first)))
    out, latents = mla_attention(written, pool.latents, layer, options, backend=backend)
    kind = Latents(options.rank or 0, inputs.latents.shape[1] - (options.rank or 0))
    pages = CanonicalPages(latents, layer, kind, layout_for(backend_named(backend), kind, pool_dtype(latents)))
    q, query_rows, rope = inputs.q, rows, inputs.rope
    if options.last_only:
        query_rows, last = rows.last_tokens()
        rope = rope if rope is None else rope.at[:, last].get(mode="clip")
    q = q if rope is None else apply_rope(q, rope).astype(q.dtype)
    choice: _Choice
    if index is None:
        assert earlier is not None, "a layer without an indexer shares an earlier layer's choice"
        bits = earlier.bits.at[last].get(mode="clip") if options.last_only else earlier.bits
        choice = _SharedChoice(pages, top_k, bits)
    else:
        index_q = index.q if rope is None else apply_rope(index.q, rope)
        # No layer follows one that computes only the rows' last tokens.
        is_shared = earlier is not None and not options.last_only
        choice = _OwnChoice(pages, top_k, index._replace(q=index_q), index_keys, key_layer, is_shared)

    def attend_chosen(queries: Queries) -> _Outputs:
        return _attend_chosen(choice, queries, queries.take(q), inputs.matrices, options.scale)

    def attend_masked(queries: Queries) -> _Outputs:
        return _attend_masked(choice, queries, queries.take(q), inputs.matrices, options.scale)

    q_lens, mask = query_rows.live_q_lens(), inputs.tree_mask
    outputs: _Outputs = (out, earlier.bits if earlier is not None and choice.returns_bits else None)
    outputs = fill_decode_rows(attend_chosen, outputs, query_rows, chooses & (q_lens == 1))
    if not options.last_only and q.shape[0] > 1:
        nodes = None if mask is None else visible_nodes(mask, rows, None)
        outputs = fill_prefill_rows(attend_masked, outputs, query_rows, chooses & (q_lens > 1), nodes)
    out, new_bits = outputs
    if later is not None and new_bits is not None:
        later = later._replace(bits=new_bits)
    return out, IndexedPages(latents, index_keys), later


def working_bytes(latent_size: int, num_heads: int, top_k: int, max_len: int) -> int:
    """Return the float32 bytes of a group's scores and latents, and of its order.

    Args:
        latent_size: elements in a latent.
        num_heads: query heads.
        top_k: maximum tokens that a query attends to.
        max_len: maximum tokens in a row.
    """
    decoding = DECODE_GROUP_ROWS * (2 * max_len + top_k * (latent_size + 2 * num_heads))
    prefill = PREFILL_TILE_QUERIES * (3 * max_len + 2 * num_heads * (latent_size + PREFILL_BLOCK_TOKENS))
    return 4 * max(decoding, prefill)


_Outputs = tuple[Float[Array, "N X Q v"], UInt32[Array, "N X words"] | None]  # outputs, and the choice for later layers


@dataclass(frozen=True)
class _Choice(ABC):
    """The tokens that a layer's queries choose.

    Attributes:
        pages: the layer's latents.
        top_k: maximum tokens that a query attends to.
    """

    pages: CanonicalPages
    top_k: int

    @property
    def returns_bits(self) -> bool:
        """True if later layers share the choice and need its bits."""
        return False

    @abstractmethod
    def mask(self, queries: Queries, block_tokens: int) -> Bool[Array, "B X S"]:
        """Return the mask of chosen tokens; see `_OwnChoice.scores` for the arguments."""

    def positions(self, queries: Queries) -> tuple[Int32[Array, "B top_k"], UInt32[Array, "B words"] | None]:
        """Return the positions of the tokens that one query in each row chooses, and the choice for later layers."""
        mask = self.mask(queries, DECODE_BLOCK_TOKENS)[:, 0]
        return positions_in_mask(mask, self.top_k), self.packed(mask, queries)

    def packed(self, mask: Bool[Array, "*N S"], queries: Queries) -> UInt32[Array, "*N words"] | None:
        """Return a mask of chosen tokens as bits if later layers share it."""
        max_len = queries.page_table.shape[1] * self.pages.page_size
        return _pack(mask[..., :max_len]) if self.returns_bits else None


@dataclass(frozen=True)
class _SharedChoice(_Choice):
    """An earlier layer's choice.

    Attributes:
        bits: `ChosenTokens.bits` of the queries.
    """

    bits: UInt32[Array, "N words"]

    def mask(self, queries: Queries, block_tokens: int) -> Bool[Array, "B X S"]:
        """Return the mask of the tokens chosen earlier."""
        num_tokens = _blocks_len(queries, block_tokens, self.pages.page_size)
        return _unpack(queries.take(self.bits), num_tokens)


@dataclass(frozen=True)
class _OwnChoice(_Choice):
    """The choice by the layer's index scores.

    Attributes:
        inputs: the indexer's outputs, rotated.
        index_keys: pool of index keys.
        key_layer: layer in `index_keys`.
        is_shared: True if later layers share the choice.
    """

    inputs: IndexInputs
    index_keys: Float[Array, "indexers N P size"]
    key_layer: Int32[Array, ""]
    is_shared: bool

    @property
    def returns_bits(self) -> bool:
        """True if later layers share the choice and need its bits."""
        return self.is_shared

    def mask(self, queries: Queries, block_tokens: int) -> Bool[Array, "B X S"]:
        """Return the mask of the tokens with the highest index scores."""
        return top_mask(self.scores(queries, block_tokens), self.top_k)

    def positions(self, queries: Queries) -> tuple[Int32[Array, "B top_k"], UInt32[Array, "B words"] | None]:
        """Return the positions with the highest index scores, and the choice for later layers."""
        if self.returns_bits:
            return super().positions(queries)
        return top_positions(self.scores(queries, DECODE_BLOCK_TOKENS)[:, 0], self.top_k), None

    def scores(self, queries: Queries, block_tokens: int) -> Float32[Array, "B X S"]:
        """Return the index scores of all tokens in the rows, minus infinity for tokens that a query does not see.

        Args:
            queries: queries.
            block_tokens: tokens whose scores are computed together, rounded down to whole pages.
        """
        q, weights = (queries.take(x).astype(jnp.float32) for x in self.inputs[:2])
        (B, X), M, P = queries.position.shape, queries.page_table.shape[1], self.pages.page_size
        block_pages = max(1, min(block_tokens // P, M))
        block = block_pages * P

        def score_block(number: Int32[Array, ""], scores: Float32[Array, "B X S"]) -> Float32[Array, "B X S"]:
            start = number * block
            ids, visible = _block(queries, start, block_pages, P)
            keys = self.index_keys.at[self.key_layer, ids].get(mode="clip").reshape(B, block, -1)
            by_head = jnp.einsum("bxhd,bsd->bxhs", q, keys.astype(jnp.float32), precision=lax.Precision.HIGHEST)
            score = jnp.einsum("bxh,bxhs->bxs", weights, jax.nn.relu(by_head), precision=lax.Precision.HIGHEST)
            score = jnp.where(score == 0, 0.0, score)  # no -0, which a sort orders before 0
            return lax.dynamic_update_slice_in_dim(scores, jnp.where(visible, score, -jnp.inf), start, 2)

        num_blocks = ceil_div(jnp.max(queries.position) + 1, block)
        scores = jnp.full((B, X, _blocks_len(queries, block_tokens, P)), -jnp.inf, jnp.float32)
        return lax.fori_loop(0, num_blocks, score_block, scores)


def _blocks_len(queries: Queries, block_tokens: int, page_size: int) -> int:
    """Return the tokens in all blocks of a row with `block_tokens` each, rounded down to whole pages."""
    M = queries.page_table.shape[1]
    block_pages = max(1, min(block_tokens // page_size, M))
    return -(-M // block_pages) * block_pages * page_size


def _pack(mask: Bool[Array, "*N S"]) -> UInt32[Array, "*N words"]:
    """Return a mask as bits."""
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % WORD_BITS)])
    bits = mask.reshape(*mask.shape[:-1], -1, WORD_BITS).astype(jnp.uint32)
    return jnp.sum(bits << lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1), axis=-1, dtype=jnp.uint32)


def _unpack(bits: UInt32[Array, "*N words"], size: int) -> Bool[Array, "*N S"]:
    """Return bits as a mask with `size` elements."""
    repeated = jnp.broadcast_to(bits[..., None], (*bits.shape, WORD_BITS))
    mask = (repeated >> lax.broadcasted_iota(jnp.uint32, repeated.shape, bits.ndim)) & 1 == 1
    mask = mask.reshape(*bits.shape[:-1], -1)[..., :size]
    return jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, size - mask.shape[-1])])


def _block(
    queries: Queries, start: Int32[Array, ""], num_pages: int, page_size: int
) -> tuple[Int32[Array, "B pages"], Bool[Array, "B X block"]]:
    """Return the page ids of a block of keys in each row, and the mask of keys that each query sees.

    Args:
        queries: queries.
        start: position of the block's first key.
        num_pages: pages in the block.
        page_size: tokens per page.
    """
    column = start // page_size + jnp.arange(num_pages, dtype=jnp.int32)
    is_used = column[None] * page_size <= jnp.max(queries.position, axis=1, keepdims=True)
    ids = jnp.where(is_used, queries.page_table.at[:, column].get(mode="clip"), 0)
    key_position = start + jnp.arange(num_pages * page_size, dtype=jnp.int32)[None]
    visible = queries.position[:, :, None] >= key_position[:, None]
    return ids, visible if queries.tree is None else visible & queries.tree.shows(key_position, None)


def _attend_chosen(
    choice: _Choice, queries: Queries, q: Float[Array, "B 1 Q H"], matrices: HeadMatrices, scale: float
) -> _Outputs:
    """Attend to the chosen tokens' latents, which are gathered; each row has one query and more than `top_k` tokens.

    Args:
        choice: chosen tokens and pages.
        queries: queries.
        q: per-head queries after RoPE.
        matrices: per-head matrices that expand latents.
        scale: factor on the scores.
    """
    pages, P = choice.pages, choice.pages.page_size
    chosen, bits = choice.positions(queries)
    ids = jnp.take_along_axis(queries.page_table, chosen // P, axis=1, mode="clip")
    latents = pages.latents_at(ids, chosen % P)
    visible = chosen[:, None] <= queries.position[:, :, None]  # rows that fill up the group see nothing
    latents = jnp.where(visible[:, 0, :, None], latents, 0)
    heads_q = _absorbed(matrices, q[:, 0], scale)[:, None, :, None]  # [B, 1, Q, 1, W]
    values = latents[:, None, :, : pages.kind.value_dim]
    empty = Softmax.empty((*heads_q.shape[:-1], values.shape[-1]))
    out = absorb(empty, heads_q, latents[:, None], values, visible).result()
    return matrices.values(out[:, 0, :, 0].astype(q.dtype))[:, None], None if bits is None else bits[:, None]


def _attend_masked(
    choice: _Choice, queries: Queries, q: Float[Array, "1 X Q H"], matrices: HeadMatrices, scale: float
) -> _Outputs:
    """Attend to all latents in a row, a block at a time, under a mask of the tokens that each query chooses.

    See `_attend_chosen` for the arguments.
    """
    is_chosen = choice.mask(queries, PREFILL_BLOCK_TOKENS)
    pages, M = choice.pages, queries.page_table.shape[1]
    block_pages = max(1, min(PREFILL_BLOCK_TOKENS // pages.page_size, M))
    block = block_pages * pages.page_size
    heads_q = _absorbed(matrices, q[0], scale).swapaxes(0, 1)[None, None]  # [1, 1, Q, X, W]

    def absorb_block(number: Int32[Array, ""], state: Softmax) -> Softmax:
        ids, visible = _block(queries, number * block, block_pages, pages.page_size)
        visible &= lax.dynamic_slice_in_dim(is_chosen, number * block, block, 2)
        latents = pages.read(ids)[0]
        latents = jnp.where(jnp.any(visible, axis=1)[:, None, :, None], latents, 0)  # stale elements may be NaN
        return absorb(state, heads_q, latents, latents[..., : pages.kind.value_dim], visible)

    num_blocks = ceil_div(jnp.max(queries.position) + 1, block)
    empty = Softmax.empty((*heads_q.shape[:-1], pages.kind.value_dim))
    out = lax.fori_loop(0, num_blocks, absorb_block, empty).result()
    return matrices.values(out[0, 0].swapaxes(0, 1).astype(q.dtype))[None], choice.packed(is_chosen, queries)


def _absorbed(matrices: HeadMatrices, q: Float[Array, "N Q H"], scale: float) -> Float32[Array, "N Q W"]:
    """Return scaled queries whose keys are latents."""
    return matrices.absorb(q).astype(jnp.float32) * scale
