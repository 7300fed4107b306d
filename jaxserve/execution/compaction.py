"""Compaction: keep the prompt tokens that later ones attend to most, and move their keys and values together.

A program of its own, which runs between two steps, for one row whose prompt has been computed. It computes some of the
prompt's queries again, which attend to the pool without writing to it, and adds up the attention weights of each key
over queries, heads and layers: the last queries for SnapKV, all of them for H2O. It then copies the best tokens to
fresh pages, in all layers the same, and sets the row's page table. The former pages are unchanged, because other rows
may share them.

As many tokens of the last page are in use after compaction as before, so that later tokens keep their offsets in pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from jaxserve.execution.batch import CompactionLayout
from jaxserve.execution.round import Model
from jaxserve.execution.state import ServeState
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.layers.token_context import Attention, LayerContext, TokenContext
from jaxserve.models import decoder
from jaxserve.pallas_kernels.ragged_paged_attention import (
    HeadMatrices,
    IndexInputs,
    Pages,
    apply_rope,
    from_canonical,
    int4,
    pool_page_size,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, decode, pool_dtype
from jaxserve.scheduling.kv_cache.sparsity import Compaction

KEYS_AT_ONCE = 256  # keys that a block of queries is multiplied with together
POOLED = 5  # width of the mean over neighbouring keys

Compact = Callable[[Any, ServeState, Array], tuple[ServeState, Array]]  # returns the kept tokens too


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ObservingAttention(Attention):
    """Attention of prompt tokens whose keys and values are in the pool, which adds up the weights of each key.

    Attributes:
        backend: attention backend, which determines the pool's layout.
        form: token layout in the pool.
        kv_pages: KV pool, only read.
        pages: the row's pages.
        position: the tokens' positions.
        num_prompt: number of prompt tokens; tokens from there on are padding.
        weights: sum of attention weights over queries, heads and layers, by key.
    """

    backend: str = field(metadata={"static": True})
    form: HeadVectors = field(metadata={"static": True})
    kv_pages: Pages
    pages: Int[Array, " M"]
    position: Int[Array, " T"]
    num_prompt: Int[Array, ""]
    weights: Float[Array, " S"]

    def attend(
        self,
        q: Float[Array, "T Q H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | HeadMatrices | None,
        layer: LayerContext,
        sinks: Float[Array, " Q"] | None,
        index: IndexInputs | None = None,
    ) -> tuple[Float[Array, "T Q H"], ObservingAttention]:
        """Attend blockwise to all keys up to each query, and add the weights; new keys and values are in the pool."""
        options, (T, Q, H), dtype = layer.attention.options, q.shape, q.dtype
        K, P = self.form.num_kv_heads, pool_page_size(self.backend, self.kv_pages)
        q = (q if layer.rope is None else apply_rope(q, layer.rope)).astype(jnp.float32).reshape(T, K, Q // K, H)
        is_rotated = pool_dtype(self.kv_pages) == INT4
        if is_rotated:
            q = int4.rotate(q) / int4.block_size(H)
        num_pages = min(max(KEYS_AT_ONCE // P, 1), self.pages.shape[0])
        S = num_pages * P
        num_seen = jnp.minimum(self.position[-1] + 1, self.num_prompt)
        num_blocks = -(-num_seen // S)
        is_live = self.position < self.num_prompt

        def read(index: Array) -> tuple[Array, Array, Array]:
            """Return a block's scores [T, K, G, S] with the queries, its values, and its first key."""
            start = jnp.minimum(index * num_pages, self.pages.shape[0] - num_pages)  # the last block may overlap
            ids = lax.dynamic_slice_in_dim(self.pages, start, num_pages)
            stored = jax.tree.map(lambda x: x.at[layer.index, ids].get(mode="clip")[None], self.kv_pages)
            vectors = decode(to_canonical(self.backend, stored, self.form.kind)).reshape(S, K, 2, H)
            scores = jnp.einsum("tkgh,skh->tkgs", q, vectors[:, :, 0]) * options.scale
            if options.soft_cap is not None:
                scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
            key = start * P + jnp.arange(S)
            is_new = key >= index * S
            is_seen = (key[None, :] <= self.position[:, None]) & is_new[None, :]
            return jnp.where(is_seen[:, None, None, :], scores, -jnp.inf), vectors[:, :, 1], start * P

        def sum_up(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, out = sums
            scores, values, _ = read(index)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            factor, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[..., None])
            total = total * factor + jnp.sum(weights, axis=-1)
            return higher, total, out * factor[..., None] + jnp.einsum("tkgs,skh->tkgh", weights, values)

        peak = jnp.full((T, K, Q // K), np.finfo(np.float32).min)
        total = jnp.zeros_like(peak)
        if sinks is not None:
            peak = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, Q // K), peak.shape)
            total = jnp.ones_like(peak)
        peak, total, out = lax.fori_loop(0, num_blocks, sum_up, (peak, total, jnp.zeros_like(q)))

        def add(index: Array, so_far: Array) -> Array:
            scores, _, first = read(index)
            weights = jnp.exp(scores - peak[..., None]) / total[..., None]
            new = jnp.sum(jnp.where(is_live[:, None, None, None], weights, 0), axis=(0, 1, 2))
            return lax.dynamic_update_slice_in_dim(
                so_far, lax.dynamic_slice_in_dim(so_far, first, S) + new, first, axis=0
            )

        weights = lax.fori_loop(0, num_blocks, add, self.weights)
        out = (out / total[..., None]).reshape(T, Q, H)
        if is_rotated:
            out = int4.rotate(out) / int4.block_size(H)
        return out.astype(dtype), dataclasses.replace(self, weights=weights)


def make_compact(model: Model, layout: CompactionLayout) -> Compact:
    """Return the program (params, state, blob) -> (state, kept tokens) that compacts a row.

    To be jitted with `state` donated; on several devices, in a shard_map. The kept tokens are in order, followed by
    indices out of range.

    Args:
        model: static parameters.
        layout: layout of the blob.
    """
    sparsity, P = layout.sparsity, layout.sparsity.page_size

    def compact(all_params: Any, state: ServeState, blob: Array) -> tuple[ServeState, Array]:
        params, _ = model.observing(all_params)
        row = layout.blob.unpack(blob)
        slot, num_prompt = row["slot"][0], row["num_prompt"][0]
        pages = state.sequences.page_table[slot]
        weights = _observe(params, model, layout, state.kv_pages, pages, row)
        if model.arch.tensor_axis is not None:
            weights = lax.psum(weights, model.arch.tensor_axis)
        num_hidden = sparsity.num_hidden(num_prompt, num_prompt)
        kept = best_tokens(weights, sparsity, num_prompt, num_prompt - num_hidden * P)
        num_kept_pages = -(-num_prompt // P) - num_hidden
        kv_pages = _move(state.kv_pages, model, pages, kept, row["targets"], num_kept_pages)
        column = jnp.arange(pages.shape[0], dtype=jnp.int32) - num_hidden
        moved = row["targets"].at[column].get(mode="clip")
        pages = jnp.where((column >= 0) & (column < num_kept_pages), moved, pages)
        sequences = dataclasses.replace(state.sequences, page_table=state.sequences.page_table.at[slot].set(pages))
        return dataclasses.replace(state, kv_pages=kv_pages, sequences=sequences), kept

    return compact


def _observe(
    params: Any, model: Model, layout: CompactionLayout, kv_pages: Pages, pages: Int[Array, " M"], row: dict[str, Any]
) -> Float[Array, " S"]:
    """Return the sum of attention weights by key, from the prompt's last tokens or from all of them, block by block."""
    sparsity, num_prompt, slot = layout.sparsity, row["num_prompt"][0], row["slot"][0]
    T, arch, form = sparsity.block, model.arch, model.arch.kv_layout.pool
    assert isinstance(form, HeadVectors), "the engine has refused other models"
    first = 0 if sparsity.observes_all else num_prompt - T

    def observe(index: Array | int, weights: Array) -> Array:
        position = first + index * T + jnp.arange(T, dtype=jnp.int32)
        attention = ObservingAttention(model.backend, form, kv_pages, pages, position, num_prompt, weights)
        ids = lax.dynamic_slice_in_dim(row["token_ids"], index * T, T)
        zeros = jnp.zeros(T, jnp.int32)
        tokens = TokenContext(position, attention, zeros, zeros + slot, position < num_prompt)
        _, tokens = decoder.forward(params, arch, ids, tokens)
        assert isinstance(tokens.attention, ObservingAttention), "layers leave attention of the same type"
        return tokens.attention.weights

    weights = jnp.zeros(pages.shape[0] * sparsity.page_size)
    return lax.fori_loop(0, -(-num_prompt // T), observe, weights) if sparsity.observes_all else observe(0, weights)


def best_tokens(
    weights: Float[Array, " S"], sparsity: Compaction, num_prompt: Int[Array, ""], num_kept: Int[Array, ""]
) -> Int[Array, " S"]:
    """Return the tokens to keep, in order: the latest ones and the ones with the highest scores, lower indices first.

    Args:
        weights: sum of attention weights, by token.
        sparsity: rule by which weights become scores.
        num_prompt: number of prompt tokens.
        num_kept: number of tokens to keep.
    """
    token, num_recent = jnp.arange(weights.shape[0], dtype=jnp.int32), sparsity.num_recent(num_kept)
    if sparsity.observes_all:
        scores = weights / jnp.maximum(num_prompt - token, 1)  # queries that could see the key
    else:
        padded = jnp.pad(jnp.where(token < num_prompt - num_recent, weights, 0), POOLED // 2)
        scores = jnp.sum(jnp.stack([padded[offset : offset + weights.shape[0]] for offset in range(POOLED)]), axis=0)
    scores = jnp.where(token < num_prompt - num_recent, scores, jnp.where(token < num_prompt, jnp.inf, -jnp.inf))
    best_first = jnp.argsort(-scores, stable=True)
    return jnp.sort(jnp.where(token < num_kept, best_first, np.iinfo(np.int32).max))


def _move(
    kv_pages: Pages,
    model: Model,
    pages: Int[Array, " M"],
    kept: Int[Array, " S"],
    targets: Int[Array, " E"],
    num_pages: Int[Array, ""],
) -> Pages:
    """Return the pool with a row's tokens copied to `num_pages` target pages, in all layers.

    Args:
        kv_pages: pool, donated.
        model: static parameters.
        pages: the row's pages.
        kept: tokens to copy, in order.
        targets: pages that receive them.
        num_pages: number of target pages.
    """
    P, kind = pool_page_size(model.backend, kv_pages), model.arch.kv_layout.pool.kind

    def move(index: Array, kv_pages: Pages) -> Pages:
        token = lax.dynamic_slice_in_dim(kept, index * P, P)
        source = pages.at[token // P].get(mode="clip")
        old = to_canonical(model.backend, jax.tree.map(lambda x: _row_major(x[:, source]), kv_pages), kind)
        new = jax.tree.map(lambda x: x[:, jnp.arange(P), token % P][:, None], old)
        new = jax.tree.map(_row_major, from_canonical(model.backend, new))
        return jax.tree.map(lambda x, page: x.at[:, targets[index]].set(page[:, 0]), kv_pages, new)

    return lax.fori_loop(0, num_pages, move, kv_pages)


def _row_major(array: Array) -> Array:
    """Keep XLA for TPUs from copying the pool to the layout that would suit this part of it."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))
