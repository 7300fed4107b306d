"""Rotation of rotary position embeddings (RoFormer, Su et al., 2021) in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def apply_rope(x: Float[Array, "T N H"], rope: Float32[Array, "2 T half"]) -> Float32[Array, "T N H"]:
    """Rotate the two halves of each head (the layout of Hugging Face checkpoints) in float32, whatever the dtype.

    Args:
      x: vectors of each token's heads.
      rope: cosines and sines of each token's angles.
    """
    cos, sin = rope[:, :, None, :]  # [T, 1, H/2] each
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
