"""Ragged paged attention in C++, a custom call of XLA: the serving backend on CPUs where it could be built.

The pool is that of `xla`, but with transposed pages of keys (`layout.TransposedKeys`). See `pallas_kernels/native`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    Problem,
    RaggedRows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TransposedKeys
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED,
    SCALE_DTYPE,
    Pages,
    QuantizedPages,
    values_of,
)
from jaxtyping import Array, Float, Float32, Int32

POOL_DTYPES = ("float32", "bfloat16", *QUANTIZED)
VECTOR = 4  # elements of the narrowest vectors in use

LAYOUT = TransposedKeys()
SPLITS_PAGES = True
WANTS_OWN_TABLE = False


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "cpu":
        return "it runs on CPU only"
    if (reason := native.unavailable()) is not None:
        return reason
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    if problem.page_size % VECTOR or problem.head_dim % VECTOR:
        return f"page_size and head_dim must be multiples of {VECTOR}, not {problem.page_size} and {problem.head_dim}"
    if problem.kv_dtype == INT4 and problem.head_dim % (2 * VECTOR):
        return f"head_dim must be a multiple of {2 * VECTOR} in a pool of int4, not {problem.head_dim}"
    return int4.failure(problem.head_dim) if problem.kv_dtype == INT4 else None


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write and attend in one call that updates the pool in place; donate the pool.

    The call takes q, k and v as one buffer: if they are slices of one array, XLA joins them at no cost, whereas it
    would copy each to pass them one by one.
    """
    q, sinks, rope = inputs.q, inputs.sinks, inputs.rope
    out, kv_pages = call_kernel(
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jnp.concatenate([q, inputs.k, inputs.v], axis=1).astype(jnp.float32),
        kv_pages,
        jnp.asarray(layer, jnp.int32),
        *row_operands(inputs.rows),
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if rope is None else rope,
        *([] if inputs.tree_mask is None else [inputs.tree_mask]),
        scale=np.float32(options.scale),
        soft_cap=np.float32(options.soft_cap or 0),
        window=np.int64(options.window or 0),
        rank=np.int64(0),
        max_queries=np.int64(0),
    )
    return out.astype(q.dtype), kv_pages


def row_operands(rows: RaggedRows) -> tuple[Array, ...]:
    """Return the operands of the kernel that describe the rows of a step."""
    table_row = jnp.zeros(0, jnp.int32) if rows.table_row is None else rows.table_row
    return rows.kv_lens, rows.page_table, table_row, rows.cu_q_lens, rows.num_rows


def call_kernel(
    out: jax.ShapeDtypeStruct, qkv: Float32[Array, "T N H"], kv_pages: Pages, *operands: Array, **options: np.generic
) -> tuple[Array, Pages]:
    """Call the kernel; return its output and the pool, updated in place.

    Args:
      out: shape of the output.
      qkv: queries, keys and values of all heads, or queries and latents.
      kv_pages: pool; donated.
      operands: operands behind the pool.
      options: static arguments.
    """
    pool, structure = jax.tree.flatten(kv_pages)
    shapes = [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool)]
    call = jax.ffi.ffi_call(native.ATTENTION, shapes, input_output_aliases={i: i for i in range(1, len(shapes))})
    scales = kv_pages.scales if isinstance(kv_pages, QuantizedPages) else jnp.zeros(0, SCALE_DTYPE)
    result, *updated = call(qkv, values_of(kv_pages), scales, *operands, **options)
    return result, jax.tree.unflatten(structure, updated)
