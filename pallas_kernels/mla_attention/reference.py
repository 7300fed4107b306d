"""Attention over latents by its definition: float32, one row and one query at a time, in NumPy.

The oracle for all backends, which only tests and checks on devices import: ragged paged attention with one KV head
whose key is the latent and whose value is the latent's beginning, padded with zeros to the size of the key.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions
from jaxserve.pallas_kernels.ragged_paged_attention import reference
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, write to a copy of the canonical pool and attend."""
    rank, dtype = options.rank, inputs.q.dtype
    q, latents = (np.asarray(x).astype(np.float32) for x in (inputs.q, inputs.latents))
    if inputs.rope is not None:
        q[..., rank:] = reference.rotate(jnp.asarray(q[..., rank:]), inputs.rope)
        latents[:, rank:] = reference.rotate(jnp.asarray(latents[:, None, rank:]), inputs.rope)[:, 0]
    key = jnp.asarray(latents)[:, None]
    plain = AttentionInputs(jnp.asarray(q), key, key, inputs.rows, tree_mask=inputs.tree_mask)
    out, pool = reference.write_and_attend(plain, _as_heads(kv_pages), layer, AttentionOptions(options.scale))
    return out[..., :rank].astype(dtype), _as_latents(pool)


def _as_heads(kv_pages: Pages) -> Pages:
    """Return a pool `[L, N, P, 2, W]` with every latent as key and as value."""
    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*(jnp.stack([x, x], axis=3) for x in kv_pages))
    return jnp.stack([kv_pages, kv_pages], axis=3)


def _as_latents(kv_pages: Pages) -> Pages:
    """Invert `_as_heads`."""
    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*(x[:, :, :, 0] for x in kv_pages))
    return kv_pages[:, :, :, 0]
