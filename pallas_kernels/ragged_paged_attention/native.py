"""Ragged paged attention in C++, an XLA custom call: serves CPUs if its library could be built.

The pool is head-major with transposed keys (`layout.TransposedKeys`). The kernel transposes latents, each token block
once for all query heads in a tile. See `pallas_kernels/native`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Backend, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TransposedKeys
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, QUANTIZED, SCALE_DTYPE, Pages, QuantizedPages

POOL_DTYPES = ("float32", "bfloat16", *QUANTIZED)
LATENT_POOL_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
_LAST = -1  # `max_queries` for which only each row's last new token attends
VECTOR = 4  # elements per vector register, for the narrowest in use


class Native(Backend):
    """Attention backend with a C++ kernel for CPUs."""

    layout = TransposedKeys
    splits_pages = True
    expands_latents = True

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new pool array; the system provides its memory in the background."""
        return jnp.zeros(shape, dtype) if native.unavailable() else native.zeros(shape, dtype)

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why the C++ kernel cannot run a problem (platform, library, pool dtype, sizes); None if it can."""
        if problem.platform != "cpu":
            return "it runs on CPU only"
        if (reason := native.unavailable()) is not None:
            return reason
        is_latent = isinstance(problem.kind, Latents)
        dtypes = LATENT_POOL_DTYPES if is_latent else POOL_DTYPES
        if problem.kv_dtype.name not in dtypes:
            return f"the pool must be one of {dtypes}, not {problem.kv_dtype}"
        names = ("rank", "rope_dim") if is_latent else ("head_dim",)
        sizes = {"page_size": problem.page_size} | {name: getattr(problem.kind, name) for name in names}
        if odd := {name: size for name, size in sizes.items() if size % VECTOR}:
            return f"{', '.join(sizes)} must be multiples of {VECTOR}, not {odd}"
        if problem.kv_dtype != INT4:
            return None
        if problem.kind.key_dim % (2 * VECTOR):
            return f"head_dim must be a multiple of {2 * VECTOR} in a pool of int4, not {problem.kind.key_dim}"
        return int4.failure(problem.kind.key_dim)

    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Apply RoPE, write keys and values to the pool and attend, in one FFI call that updates the pool in place.

        The caller must donate the pool. q, k and v are concatenated: if they are slices of one array, XLA joins them at
        no cost, but it would copy each one if they were separate operands.
        """
        inputs = inputs.with_all_queries() if options.last_only else inputs
        q, rows, sinks, rope = inputs.q, inputs.rows, inputs.sinks, inputs.rope
        heads = [q, inputs.k] if inputs.v is None else [q, inputs.k, inputs.v]
        qkv = jnp.concatenate(heads, axis=1)
        dtype = native.activation_dtype(qkv.dtype)
        pool, structure = jax.tree.flatten(kv_pages)
        shapes = [
            jax.ShapeDtypeStruct((*q.shape[:2], inputs.kind(options).value_dim), dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool),
        ]
        call = jax.ffi.ffi_call(native.ATTENTION, shapes, input_output_aliases={i: i for i in range(1, len(shapes))})
        out, *pool = call(
            qkv.astype(dtype),
            pool[0],
            pool[1] if isinstance(kv_pages, QuantizedPages) else jnp.zeros(0, SCALE_DTYPE),
            jnp.asarray(layer, jnp.int32),
            rows.kv_lens,
            rows.page_table,
            jnp.zeros(0, jnp.int32) if rows.table_row is None else rows.table_row,
            rows.cu_q_lens,
            rows.num_rows,
            jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            jnp.zeros(0, jnp.float32) if rope is None else rope,
            *([] if inputs.tree_mask is None else [inputs.tree_mask]),
            scale=np.float32(options.scale),
            soft_cap=np.float32(options.soft_cap or 0),
            window=np.int64(options.window or 0),
            rank=np.int64(options.rank or 0),
            max_queries=np.int64(_LAST if options.last_only else options.max_queries or 0),
        )
        out = inputs.last_outputs(out) if options.last_only else out
        return out.astype(q.dtype), jax.tree.unflatten(structure, pool)
