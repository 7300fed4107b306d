"""Attention over latents in C++, a custom call of XLA: the serving backend on CPUs where it could be built.

The kernel is that of `ragged_paged_attention.native`. It transposes the latents of a block of tokens once for all query
heads of a tile, which then read them as keys; the beginnings of the stored latents are the values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions, Problem
from jaxserve.pallas_kernels.mla_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.native import VECTOR, call_kernel, row_operands
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxtyping import Array, Float, Int32

POOL_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")

LAYOUT = TokenMajor()
WANTS_OWN_TABLE = False
EXPANDS = True


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "cpu":
        return "it runs on CPU only"
    if (reason := native.unavailable()) is not None:
        return reason
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    sizes = {"page_size": problem.page_size, "rank": problem.rank, "rope_dim": problem.rope_dim}
    if odd := {name: size for name, size in sizes.items() if size % VECTOR}:
        return f"page_size, rank and rope_dim must be multiples of {VECTOR}, not {odd}"
    return None


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, write and attend in one call that updates the pool in place; donate the pool."""
    q, rope = inputs.q, inputs.rope
    out, kv_pages = call_kernel(
        jax.ShapeDtypeStruct((*q.shape[:2], options.rank), jnp.float32),
        jnp.concatenate([q, inputs.latents[:, None]], axis=1).astype(jnp.float32),
        kv_pages,
        jnp.asarray(layer, jnp.int32),
        *row_operands(inputs.rows),
        jnp.zeros(0, jnp.float32),
        jnp.zeros(0, jnp.float32) if rope is None else rope,
        *([] if inputs.tree_mask is None else [inputs.tree_mask]),
        scale=np.float32(options.scale),
        soft_cap=np.float32(0),
        window=np.int64(0),
        rank=np.int64(options.rank),
        max_queries=np.int64(options.max_queries or 0),
    )
    return out.astype(q.dtype), kv_pages
