"""Attention over latents in plain XLA: pages are matrices of latents, `[L, N, P, W]`.

The walk over the pages is that of `ragged_paged_attention.blocks`, with one KV head whose values are the beginnings of
its keys: each latent is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions, Problem
from jaxserve.pallas_kernels.mla_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.blocks import Attention, attend
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, Pages, decode, encode, pool_dtype, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.tree import seen_nodes
from jaxserve.pallas_kernels.ragged_paged_attention.xla import refused_dtype
from jaxtyping import Array, Float, Float32, Int32, Shaped

LAYOUT = TokenMajor()
WANTS_OWN_TABLE = True
EXPANDS = True


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.kv_dtype == jnp.int8:
        return (
            "latents cannot be in a pool of int8, where one scale serves a whole latent: its rotated part, without a "
            "norm, would set the step of the values; use fp8 or 16 bits"
        )
    if problem.kv_dtype == INT4:
        return "latents cannot be in a pool of int4, whose vectors are rotated as a whole: values are a part of latents"
    return refused_dtype(problem.kv_dtype)


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, write and attend; the pool is donated."""
    dtype, inputs = inputs.q.dtype, inputs.rotated(options.rank)
    kv_pages = _write(kv_pages, inputs.latents, layer, inputs.rows)
    mask, rows = inputs.tree_mask, inputs.rows
    nodes = None if mask is None else seen_nodes(mask, rows, None)
    pages = LatentPages(kv_pages, layer, options.rank)
    attention = Attention(pages, AttentionOptions(options.scale), nodes=nodes, max_queries=options.max_queries)
    return attend(attention, inputs.q, rows).astype(dtype), kv_pages


def _write(kv_pages: Pages, latents: Float[Array, "T W"], layer: int | Int32[Array, ""], rows: RaggedRows) -> Pages:
    """Write the latents of this step to their pages by one scatter in place; the pool is donated."""
    _, num_pages, page_size, _ = values_of(kv_pages).shape
    page_id, offset = rows.place(latents.shape[0], num_pages=num_pages, page_size=page_size)

    def write(pages: Shaped[Array, "L N P *W"], new: Shaped[Array, "T 1 *W"]) -> Shaped[Array, "L N P *W"]:
        return pages.at[layer, page_id, offset].set(new[:, 0], mode="drop", unique_indices=True)

    return jax.tree.map(write, kv_pages, encode(latents[:, None], pool_dtype(kv_pages)))


@dataclass(frozen=True)
class LatentPages:
    """Pages of a layer in the layout `TokenMajor`: one KV head."""

    kv_pages: Pages
    layer: int | Int32[Array, ""]
    value_dim: int
    num_kv_heads: int = 1

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(values_of(self.kv_pages).shape[2])

    def read(self, page_id: Int32[Array, "B b"]) -> tuple[Float32[Array, "B 1 S W"], Float32[Array, "B 1 S rank"]]:
        """Return the latents of some pages, as keys and as values."""
        (B, b), num_pages = page_id.shape, values_of(self.kv_pages).shape[1]

        def gather(pages: Shaped[Array, "L N P *W"]) -> Shaped[Array, "B 1 S *W"]:
            every_page = pages.reshape(-1, *pages.shape[2:])  # [L*N, P, ...]
            ids = self.layer * num_pages + page_id
            found = every_page.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
            return found.reshape(B, 1, b * self.page_size, *pages.shape[3:])

        latents = decode(jax.tree.map(gather, self.kv_pages))
        return latents, latents[..., : self.value_dim]
