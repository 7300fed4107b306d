"""Normalisation layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

NormWeight = Float[Array, "*heads D"] | Mapping[str, Float[Array, "*heads D"]]
NormFunction = Callable[[Array, Any, float], Array]  # arguments: x, weight and epsilon


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Return the root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019, as Llama applies it)."""
    x32 = x.astype(jnp.float32)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def offset_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Return the root-mean-square norm over the last axis times 1 + `weight`, all in float32."""
    x32 = x.astype(jnp.float32)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    factor = 1.0 + weight.astype(jnp.float32)
    return (x32 * factor.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def layer_norm(x: Float[Array, "*B D"], weight: NormWeight, eps: float) -> Float[Array, "*B D"]:
    """Return the layer norm over the last axis in float32 (Ba et al. 2016).

    `weight` is an array, or a dict with weight and bias; arrays with several dimensions have a vector per head.
    """
    p = weight if isinstance(weight, Mapping) else {"weight": weight}
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    x32 *= lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    wide = {name: v.astype(jnp.float32).reshape((1,) * (x.ndim - v.ndim) + v.shape) for name, v in p.items()}
    x32 *= wide["weight"]
    return (x32 + wide["bias"] if "bias" in wide else x32).astype(x.dtype)


@dataclass(frozen=True)
class Norm:
    """Norm before a linear layer, which may fuse an RMS norm (see `linear`)."""

    weight: NormWeight
    eps: float
    function: NormFunction = rms_norm

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return x normalised by the norm's function, weight and epsilon."""
        return self.function(x, self.weight, self.eps)
