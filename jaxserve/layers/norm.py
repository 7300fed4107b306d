"""Normalisation layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Return the root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019, as Llama applies it)."""
    x32 = x.astype(jnp.float32)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def offset_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Return the root-mean-square norm of the last axis times 1 + `weight`, all in float32."""
    x32 = x.astype(jnp.float32)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    factor = 1.0 + weight.astype(jnp.float32)
    return (x32 * factor.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def layer_norm(x: Float[Array, "*B D"], p: Mapping[str, Float[Array, "*own D"]], eps: float) -> Float[Array, "*B D"]:
    """Return the layer norm over the last axis with `weight` and, if any, `bias` of `p`, in float32 (Ba et al. 2016).

    Weights of several dimensions are those of heads, one vector for each.
    """
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    wide = {name: v.astype(jnp.float32).reshape((1,) * (x.ndim - v.ndim) + v.shape) for name, v in p.items()}
    x32 *= wide["weight"]
    return (x32 + wide["bias"] if "bias" in wide else x32).astype(x.dtype)


@dataclass(frozen=True)
class RmsNorm:
    """Norm before a matrix product, which may fuse it (see `linear`)."""

    weight: Float[Array, " D"]
    eps: float

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return the normalised `x`."""
        return rms_norm(x, self.weight, self.eps)
