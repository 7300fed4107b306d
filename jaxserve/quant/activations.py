"""Quantised activations: each product of a scheme that quantises them begins here.

Scales and rounding are those of compressed-tensors: half to even, and int8 with 127.5 steps to the maximum.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxserve.weights.quantized import Activation

E4M3_MAX, E2M1_MAX = 448.0, 6.0
MeshAxes = str | tuple[str, ...]
_STEPS = {"int8": 127.5, "e4m3": E4M3_MAX, "e2m1": E2M1_MAX}  # steps of the scale to the largest value of a token
_SMALLEST = {"int8": 2.0**-23, "e4m3": 2.0**-23, "e2m1": 2.0**-3}  # scale of zeros


def quantize(
    x: Float[Array, "T in"], activation: Activation, input_scale: Float32[Array, ""] | None, axis: MeshAxes | None
) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
    """Return quantised values in the dtype of x, and a factor for their products, or None if they have it already.

    Args:
        x: activations; of each device its columns, if there is an axis.
        activation: scheme of the activations.
        input_scale: scale of the checkpoint; for e2m1 the number that multiplies the scales of groups.
        axis: mesh axes along which devices have columns of x.
    """
    wide, steps = x.astype(jnp.float32), jnp.float32(_STEPS[activation.elements])
    if activation.group is None:
        if activation.dynamic:
            largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
            scale = divide(largest if axis is None else lax.pmax(largest, axis), steps)
            scale = jnp.where(scale == 0, _SMALLEST[activation.elements], scale)
        else:
            assert input_scale is not None, "static activations have a scale"
            scale = jnp.broadcast_to(input_scale, (x.shape[0], 1))
        return _rounded(divide(wide, scale), activation.elements).astype(x.dtype), scale
    scale = divide(_largest_of_groups(wide, activation.group, axis), steps)
    if activation.elements == "e2m1":
        assert input_scale is not None, "scales of groups have a scale"
        scale = to_e4m3(scale * input_scale)
        scale = divide(jnp.where(scale == 0, _SMALLEST["e2m1"], scale), input_scale)
    else:
        scale = jnp.where(scale == 0, _SMALLEST[activation.elements], scale)
    return (_rounded(divide(wide, scale), activation.elements) * scale).astype(x.dtype), None


def divide(x: Float32[Array, "T in"], by: Float32[Array, "..."]) -> Float32[Array, "T in"]:
    """Return the exact quotient.

    XLA multiplies by the reciprocal of a number that it broadcasts. With a scale one bit off, the largest value of a
    token is no longer halfway between two integers.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def _largest_of_groups(x: Float32[Array, "T in"], group: int, axis: MeshAxes | None) -> Float32[Array, "T in"]:
    """Return, at each value, the largest absolute one of its group, which may lie on several devices."""
    num_tokens, size = x.shape
    num_devices = 1 if axis is None else lax.axis_size(axis)
    if num_devices == 1 or size % group == 0:
        padded = jnp.pad(jnp.abs(x), ((0, 0), (0, -size % group)))
        largest = padded.reshape(num_tokens, -1, group).max(axis=-1)
        return jnp.repeat(largest, group, axis=1)[:, :size]
    part = math.gcd(size, group)  # values that are on one device and in one group wherever they begin
    parts = jnp.abs(x).reshape(num_tokens, -1, part).max(axis=-1)
    everywhere = lax.all_gather(parts, axis, axis=1, tiled=True)
    per_group = group // part
    padded = jnp.pad(everywhere, ((0, 0), (0, -everywhere.shape[1] % per_group)))
    largest = padded.reshape(num_tokens, -1, per_group).max(axis=-1)
    own = lax.dynamic_slice_in_dim(
        jnp.repeat(largest, per_group, axis=1), lax.axis_index(axis) * parts.shape[1], parts.shape[1], axis=1
    )
    return jnp.repeat(own, part, axis=1)


def _rounded(x: Float32[Array, "T in"], elements: str) -> Float32[Array, "T in"]:
    """Return the nearest values that the elements have; of two, the one with an even mantissa."""
    if elements == "int8":
        return jnp.clip(jnp.round(x), -128, 127)
    return to_e4m3(x) if elements == "e4m3" else to_e2m1(x)


def to_e4m3(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Round to e4m3; values beyond its range become its largest, which a cast alone makes NaN."""
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def to_e2m1(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Round to e2m1, whose values are 0.5 apart up to 2, 1 up to 4, and 2 up to 6."""
    size = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step
