"""Ragged paged attention in plain XLA: the serving backend on CPUs without native kernels, and a fallback anywhere.

Pages are head-major, `[L, N, 2K, P, H]`, so that gathered pages are ready for one matrix product per KV head; `blocks`
attends over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.blocks import Attention, attend
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    Problem,
    RaggedRows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.layout import HeadMajor
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED,
    Pages,
    decode,
    encode,
    pool_dtype,
    values_of,
)
from jaxserve.pallas_kernels.ragged_paged_attention.tree import seen_nodes
from jaxtyping import Array, Float, Float32, Int32, Shaped

LAYOUT = HeadMajor()
SPLITS_PAGES = False
WANTS_OWN_TABLE = True


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.kv_dtype == INT4 and (reason := int4.failure(problem.head_dim)) is not None:
        return reason
    return refused_dtype(problem.kv_dtype)


def refused_dtype(dtype: jnp.dtype) -> str | None:
    """Return the reason why XLA cannot attend over a pool of this dtype, or None if it can."""
    if dtype.name in QUANTIZED or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
        return None
    return f"the pool must hold floating point numbers of 16 bits or more, or be one of {list(QUANTIZED)}, not {dtype}"


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write and attend; the pool is donated."""
    dtype, inputs = inputs.q.dtype, inputs.rotated()
    kv_pages = _write_kv(kv_pages, inputs.k, inputs.v, layer, inputs.rows)
    mask, rows = inputs.tree_mask, inputs.rows
    nodes = None if mask is None else seen_nodes(mask, rows, options.window)
    head_dim = inputs.q.shape[-1]
    attention = Attention(_HeadPages(kv_pages, layer, head_dim), options, inputs.sinks, nodes)
    if pool_dtype(kv_pages) != INT4:
        return attend(attention, inputs.q, rows).astype(dtype), kv_pages
    factor = 1 / int4.block_size(head_dim)
    out = int4.rotate(attend(attention, int4.rotate(inputs.q) * factor, rows)) * factor
    return out.astype(dtype), kv_pages


def _write_kv(
    kv_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
) -> Pages:
    """Write the keys and values of this step to their pages by one scatter in place; the pool is donated."""
    (T, K, H), (_, num_pages, _, page_size, _) = k.shape, values_of(kv_pages).shape
    page_id, offset = rows.place(T, num_pages=num_pages, page_size=page_size)
    kv = encode(jnp.stack([k, v], axis=2).reshape(T, 2 * K, H), pool_dtype(kv_pages))

    # Each head has its own index: a scatter of all heads of a token at once makes XLA:TPU want them side by side in
    # memory and copy the whole pool from that layout to the one that is read.
    place = (page_id[:, None], jnp.arange(2 * K)[None, :], offset[:, None])

    def write(pages: Shaped[Array, "L N KV P *H"], new: Shaped[Array, "T KV *H"]) -> Shaped[Array, "L N KV P *H"]:
        return pages.at[layer, *place].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, kv_pages, kv)


@dataclass(frozen=True)
class _HeadPages:
    """Pages of a layer, head-major."""

    kv_pages: Pages
    layer: int | Int32[Array, ""]
    value_dim: int

    @property
    def num_kv_heads(self) -> int:
        return int(values_of(self.kv_pages).shape[2]) // 2

    @property
    def page_size(self) -> int:
        return int(values_of(self.kv_pages).shape[3])

    def read(self, page_id: Int32[Array, "B b"]) -> tuple[Float32[Array, "B K S H"], Float32[Array, "B K S H"]]:
        B, K, (_, num_pages, num_heads, _, _) = page_id.shape[0], self.num_kv_heads, values_of(self.kv_pages).shape
        first_id = (self.layer * num_pages + page_id) * num_heads
        k_id = first_id[:, None, :] + 2 * jnp.arange(K, dtype=jnp.int32)[None, :, None]

        def gather(pages: Shaped[Array, "L N KV P *H"], ids: Int32[Array, "B K b"]) -> Shaped[Array, "B K S *H"]:
            pages_by_head = pages.reshape(-1, *pages.shape[3:])  # [L*N*2K, P, ...]
            blocks = pages_by_head.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
            return blocks.reshape(B, K, -1, *pages.shape[4:])

        def read(ids: Int32[Array, "B K b"]) -> Float32[Array, "B K S H"]:
            return decode(jax.tree.map(lambda pages: gather(pages, ids), self.kv_pages))

        return read(k_id), read(k_id + 1)
