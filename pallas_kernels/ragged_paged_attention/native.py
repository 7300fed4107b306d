"""Ragged paged attention in C++, a custom call of XLA: the serving backend on CPUs where it could be built.

The pool is that of `xla`, but with transposed pages of keys (`layout.TransposedKeys`). See `pallas_kernels/native`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TransposedKeys
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, Pages, QuantizedPages

POOL_DTYPES = ("float32", "bfloat16", "int4")
VECTOR = 4  # elements of the narrowest vectors in use

LAYOUT = TransposedKeys()


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
    assert not isinstance(kv_pages, QuantizedPages), "see supports"
    q, sinks, rope = inputs.q, inputs.sinks, inputs.rope
    shapes = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype))
    call = jax.ffi.ffi_call(native.ATTENTION, shapes, input_output_aliases={1: 1})
    out, kv_pages = call(
        jnp.concatenate([q, inputs.k, inputs.v], axis=1).astype(jnp.float32),
        kv_pages,
        jnp.asarray(layer, jnp.int32),
        *inputs.rows,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if rope is None else rope,
        *([] if inputs.tree_mask is None else [inputs.tree_mask]),
        scale=np.float32(options.scale),
        soft_cap=np.float32(options.soft_cap or 0),
        window=np.int64(options.window or 0),
        rank=np.int64(0),
    )
    return out.astype(q.dtype), kv_pages
