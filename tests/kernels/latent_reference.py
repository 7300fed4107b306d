"""Attention over latents by its definition: float32, one row and one query at a time, in NumPy.

The oracle for all backends, which only tests and checks on devices import: ragged paged attention with one KV head
whose key is the latent and whose value is the latent's beginning, padded with zeros to the size of the key.
"""

from __future__ import annotations

import jax
import numpy as np
from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxtyping import Array, Float, Int32

from tests.kernels import attention_reference


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, write to a copy of the canonical pool and attend."""
    rank, dtype = options.rank, inputs.q.dtype
    q, latents = (np.asarray(x).astype(np.float32) for x in (inputs.q, inputs.latents))
    if inputs.rope is not None:
        rope = np.asarray(inputs.rope)
        q[..., rank:] = attention_reference.rotate(q[..., rank:], rope)
        latents[:, rank:] = attention_reference.rotate(latents[:, None, rank:], rope)[:, 0]
    queries, key = jax.device_put((q, latents[:, None]))
    plain = AttentionInputs(queries, key, key, inputs.rows, tree_mask=inputs.tree_mask)
    heads = jax.device_put(jax.tree.map(lambda x: np.stack([x, x], axis=3), kv_pages))  # as keys and as values
    out, pool = attention_reference.write_and_attend(plain, heads, layer, AttentionOptions(options.scale))
    pages = jax.tree.map(lambda x: np.asarray(x)[:, :, :, 0], pool)
    return jax.device_put((np.asarray(out)[..., :rank].astype(dtype), pages))
