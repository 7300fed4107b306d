"""Rotary position embeddings (RoFormer, Su et al., 2021) in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def apply_rope(x: Float[Array, "T N H"], rope: Float32[Array, "2 T half"]) -> Float32[Array, "T N H"]:
    """Rotate the last `2 * half` elements of each vector in float32, whatever the dtype, and keep those before them.

    Element i of the first half of these and element i of the second half are a pair, as in Hugging Face checkpoints.

    Args:
      x: vectors of each token.
      rope: cosines and sines of each token's angles.
    """
    cos, sin = rope[:, :, None, :]  # [T, 1, half] each
    half = rope.shape[2]
    x = x.astype(jnp.float32)
    kept, first, second = jnp.split(x, (x.shape[-1] - 2 * half, x.shape[-1] - half), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated if kept.shape[-1] == 0 else [kept, *rotated], axis=-1)
