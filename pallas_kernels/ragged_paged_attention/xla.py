"""Ragged paged attention in plain XLA: serves CPUs without native kernels, and is the fallback on any platform.

Pages are head-major, so that gathered pages are ready for one matmul per KV head; `blockwise` attends to them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import Attention, LayerPages, attend
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Backend, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import HeadMajor
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED,
    Pages,
    encode,
    pool_dtype,
    values_of,
)
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes


class Xla(Backend):
    """Attention backend in plain XLA, for every platform."""

    layout = HeadMajor
    gathers_table = True
    expands_latents = True

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why XLA cannot run a problem (the pool's dtype), or None if it can."""
        kind, dtype = problem.kind, problem.kv_dtype
        if isinstance(kind, Latents) and dtype == jnp.int8:
            return (
                "latents cannot be in a pool of int8, where one scale serves a whole latent: its rotated part, without "
                "a norm, would set the step of the values; use fp8 or 16 bits"
            )
        if isinstance(kind, Latents) and dtype == INT4:
            return "latents cannot be in a pool of int4, which rotates whole vectors: values are only a part of latents"
        if dtype == INT4 and (reason := int4.failure(kind.key_dim)) is not None:
            return reason
        if dtype.name in QUANTIZED or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
            return None
        others = list(QUANTIZED)
        return f"the pool must hold floating point numbers of 16 bits or more, or be one of {others}, not {dtype}"

    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Apply RoPE, write the new vectors with one scatter, and attend blockwise; return outputs and pool."""
        dtype, inputs = inputs.q.dtype, inputs.rotated(last_only=options.last_only)
        kv_pages = _write(inputs, kv_pages, layer)
        mask = inputs.tree_mask
        rows = inputs.rows.last_tokens()[0] if options.last_only else inputs.rows
        nodes = None if mask is None else visible_nodes(mask, rows, options.window)
        pages = LayerPages(kv_pages, layer, inputs.kind(options))
        attention = Attention(pages, options, inputs.sinks, nodes)
        if pool_dtype(kv_pages) != INT4:
            return attend(attention, inputs.q, rows).astype(dtype), kv_pages
        factor = 1 / int4.block_size(inputs.q.shape[-1])
        out = int4.rotate(attend(attention, int4.rotate(inputs.q) * factor, rows)) * factor
        return out.astype(dtype), kv_pages


def _write(inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""]) -> Pages:
    """Write this step's keys and values, or latents, to their pages with one scatter; return the updated pool.

    Args:
        inputs: new keys and values after RoPE, and the rows; padding tokens are not written.
        kv_pages: head-major pool, donated.
        layer: layer in the pool.
    """
    _, num_pages, page_size = HeadMajor.pool_dims(values_of(kv_pages).shape)
    page_id, offset = inputs.rows.slot_mapping(inputs.k.shape[0], num_pages=num_pages, page_size=page_size)
    slots: tuple[Array, ...] = (page_id, offset)
    if inputs.v is not None:
        # Each vector has its own index: if a scatter writes all vectors of a token together, XLA:TPU wants them
        # adjacent in memory, and copies the whole pool from this layout to the one that is read.
        slots = (page_id[:, None], jnp.arange(2 * inputs.k.shape[1])[None, :], offset[:, None])

    def write(pages: Shaped[Array, "L N *rest"], new: Shaped[Array, "T *vectors"]) -> Shaped[Array, "L N *rest"]:
        return pages.at[layer, *slots].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, kv_pages, encode(inputs.vectors(), pool_dtype(kv_pages)))
