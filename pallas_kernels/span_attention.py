"""Attention without a cache, in which each token sees its span, before and after it: encoders' images and windows.

Spans are consecutive tokens. They follow each other, and tokens from the first empty span on are padding with outputs
of zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.op import AUTO, XLA, Op
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.target import target_platform

BLOCK_QUERIES, BLOCK_KEYS = 256, 1024  # of XLA's loops
VECTOR = 16  # elements per vector register, for the widest in use
_MASKED = -1e30  # finite, so that blocks without a visible key do not give NaN


class SpanInputs(NamedTuple):
    """Operands of a call.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        spans: first key that each query sees, and the one after its last.
        rope: cosines and sines that rotate queries and keys; None without RoPE.
    """

    q: Float[Array, "T heads H"]
    k: Float[Array, "T heads H"]
    v: Float[Array, "T heads H"]
    spans: Int[Array, "2 T"]
    rope: Float32[Array, "2 T half"] | None = None

    def rotated(self) -> SpanInputs:
        """Return the operands after RoPE."""
        if self.rope is None:
            return self
        q, k = (apply_rope(x, self.rope).astype(x.dtype) for x in (self.q, self.k))
        return self._replace(q=q, k=k, rope=None)


class Problem(NamedTuple):
    """Static parameters of a call.

    Attributes:
        platform: platform for which it is compiled.
    """

    platform: str


class Backend(ABC):
    """One way to compute the op."""

    @abstractmethod
    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why this backend cannot run a problem; None if it can."""

    @abstractmethod
    def attend(self, inputs: SpanInputs, scale: float) -> Float[Array, "T heads H"]:
        """Return each query's softmax attention to the keys in its span, with scores multiplied by `scale`."""


class Native(Backend):
    """C++ kernel for CPUs, in float32."""

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run (platform, library); None if it can."""
        return "it runs on CPU only" if problem.platform != "cpu" else native.unavailable()

    def attend(self, inputs: SpanInputs, scale: float) -> Float[Array, "T heads H"]:
        """Rotate and attend in one FFI call.

        Heads are padded with zeros to whole vector registers: narrow vectors take much longer.
        """
        head_dim, dtype = inputs.q.shape[2], inputs.q.dtype
        padding = -head_dim % VECTOR
        inputs = inputs.rotated() if padding else inputs
        qkv = jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1).astype(jnp.float32)
        qkv = jnp.pad(qkv, ((0, 0), (0, 0), (0, padding))) if padding else qkv
        rope = jnp.zeros(0, jnp.float32) if inputs.rope is None else inputs.rope
        result = jax.ShapeDtypeStruct((*inputs.q.shape[:2], qkv.shape[2]), jnp.float32)
        out = jax.ffi.ffi_call(native.SPAN_ATTENTION, result)(qkv, rope, inputs.spans, scale=np.float32(scale))
        return out[:, :, :head_dim].astype(dtype)


class Xla(Backend):
    """Blocks of queries that visit blocks of keys (Dao et al. 2022), for every platform.

    A block of queries only visits key blocks in its spans, so that several images in one program cost no more than in
    several programs.
    """

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return None: XLA runs every call."""
        return None

    def attend(self, inputs: SpanInputs, scale: float) -> Float[Array, "T heads H"]:
        """Attend in two loops; no array has a score for each query and key."""
        q, k, v, spans, _ = inputs.rotated()
        T, heads, head_dim = q.shape
        block_queries, block_keys = min(T, BLOCK_QUERIES), min(T, BLOCK_KEYS)
        num_blocks, num_keys = -(-T // block_queries), -(-T // block_keys) * block_keys
        queries = jnp.pad(q, ((0, num_blocks * block_queries - T), (0, 0), (0, 0)))
        queries = jnp.swapaxes(queries.reshape(num_blocks, block_queries, heads, head_dim), 1, 2)
        keys, values = (jnp.swapaxes(jnp.pad(x, ((0, num_keys - T), (0, 0), (0, 0))), 0, 1) for x in (k, v))
        # Padding has the last token's span, so that it does not extend a block's keys.
        padding = ((0, 0), (0, num_blocks * block_queries - T))
        block_spans = jnp.pad(spans, padding, mode="edge").reshape(2, num_blocks, block_queries).swapaxes(0, 1)
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def attend_block(block: tuple[Array, Array]) -> Array:
            """Return the outputs [heads, block_queries, H] for one block's queries and spans."""
            queries, (first, end) = block

            def add(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                """Add a key block to the running maximum, sum and outputs."""
                top, total, out = state
                start = index * block_keys
                own_keys, own_values = (lax.dynamic_slice_in_dim(x, start, block_keys, axis=1) for x in (keys, values))
                key = start + jnp.arange(block_keys)
                seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
                dot = {"precision": precision, "preferred_element_type": jnp.float32}
                scores = jnp.einsum("hqd,hkd->hqk", queries, own_keys, **dot) * scale
                scores = jnp.where(seen[None], scores, _MASKED)
                new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
                weights = jnp.where(seen[None], jnp.exp(scores - new_top), 0)
                kept = jnp.exp(top - new_top)
                added = jnp.einsum("hqk,hkd->hqd", weights.astype(own_values.dtype), own_values, **dot)
                return new_top, total * kept + weights.sum(axis=-1, keepdims=True), out * kept + added

            shape = (heads, block_queries, 1)
            state = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((heads, block_queries, head_dim)))
            low, high = first.min() // block_keys, -(-end.max() // block_keys)
            _, total, out = lax.fori_loop(low, high, add, state)
            return out / jnp.maximum(total, 1e-30)

        out = lax.map(attend_block, (queries, block_spans))
        return jnp.swapaxes(out, 1, 2).reshape(-1, heads, head_dim)[:T].astype(q.dtype)


BACKENDS: Mapping[str, Backend] = {"native": Native(), XLA: Xla()}
SPAN_ATTENTION = Op("span_attention", BACKENDS)


def attend(inputs: SpanInputs, scale: float, *, backend: str = AUTO) -> Float[Array, "T heads H"]:
    """Return each query's softmax attention to the keys in its span; zeros for empty spans.

    Args:
        inputs: queries, keys, values and spans.
        scale: factor on scores.
        backend: name in BACKENDS, or "auto".
    """
    problem = Problem(target_platform())
    name = SPAN_ATTENTION.select(backend, lambda each: each.unsupported_reason(problem))
    return BACKENDS[name].attend(inputs, scale)
