"""Rotary position embeddings (RoFormer, Su et al., 2021) in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def apply_rope(x: Float[Array, "T N H"], rope: Float32[Array, "2 T half"]) -> Float32[Array, "T N H"]:
    """Rotate the last `2 * half` elements in each vector and keep the others; compute in float32 for every dtype.

    Element i in the first half is paired with element i in the second half, as in Hugging Face checkpoints.

    Args:
      x: vectors per token.
      rope: cosines and sines per token.
    """
    cos, sin = rope[:, :, None, :]  # [T, 1, half] each
    num_kept = x.shape[-1] - 2 * rope.shape[2]
    first, second = jnp.split(x[..., num_kept:].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated if num_kept == 0 else jnp.concatenate([x[..., :num_kept].astype(jnp.float32), rotated], axis=-1)
