"""Quantised activations: matmul inputs that a checkpoint's scheme quantises.

Scales and rounding are as in compressed-tensors: half to even, and int8 with 127.5 steps to the maximum.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxserve.weights.quantized import Activation

E4M3_MAX, E2M1_MAX = 448.0, 6.0
MeshAxes = str | tuple[str, ...]
_STEPS = {"int8": 127.5, "e4m3": E4M3_MAX, "e2m1": E2M1_MAX}  # scale steps up to a token's largest value
_SMALLEST = {"int8": 2.0**-23, "e4m3": 2.0**-23, "e2m1": 2.0**-3}  # scale if all values are zero
_EXPONENTS = {"e4m3": 8, "e2m1": 2}  # exponent of the largest element
_INT8_MIN, _INT8_MAX = -128.0, 127.0


class Scales(NamedTuple):
    """Static activation scales in a checkpoint, for all tokens.

    Attributes:
        scale: scale; for e2m1 groups, the number by which group scales are multiplied before they are rounded.
        zero: zero point, if activations are not symmetric.
    """

    scale: Float32[Array, ""] | None = None
    zero: Float32[Array, ""] | None = None


def quantize(
    x: Float[Array, "T in"], activation: Activation, stored: Scales, axis: MeshAxes | None
) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
    """Quantise a matmul's inputs, as the checkpoint's activation scheme specifies.

    Args:
        x: activations; with an axis, this device's columns.
        activation: activation scheme.
        stored: static scales in the checkpoint.
        axis: mesh axes over which x's columns are sharded; None if they are not.

    Returns:
        The quantised values in x's dtype, and a scale per token for the matmul's outputs. With group scales the values
        are already multiplied by them, and the second result is None. Zero points are already subtracted, so that
        values have up to 9 bits.
    """
    wide, elements = x.astype(jnp.float32), activation.elements
    if activation.group is not None:
        scale = _scales_of_groups(wide, activation, stored.scale, axis)
        return (_rounded(divide(wide, scale), elements) * scale).astype(x.dtype), None
    scale, zero = _scales_of_tokens(wide, activation, stored, axis)
    steps = divide(wide, scale)
    values = _rounded(steps, elements) if zero is None else _rounded(steps + zero, elements) - zero
    return values.astype(x.dtype), scale


def _scales_of_tokens(
    x: Float32[Array, "T in"], activation: Activation, stored: Scales, axis: MeshAxes | None
) -> tuple[Float32[Array, "T 1"], Float32[Array, "T 1"] | None]:
    """Return each token's activation scale, and its zero point or None.

    Args:
        x: activations; with an axis, this device's columns.
        activation: activation scheme without groups.
        stored: static scales in the checkpoint.
        axis: mesh axes over which x's columns are sharded.
    """
    if not activation.dynamic:
        assert stored.scale is not None, "static activations have a scale"
        assert activation.symmetric == (stored.zero is None), "activations have zero points unless they are symmetric"
        scale = jnp.broadcast_to(stored.scale, (len(x), 1))
        return scale, None if stored.zero is None else jnp.broadcast_to(stored.zero, scale.shape)
    if activation.symmetric:
        largest = _over_devices(lax.pmax, jnp.max(jnp.abs(x), axis=-1, keepdims=True), axis)
        return _not_zero(divide(largest, jnp.float32(_STEPS[activation.elements])), activation.elements), None
    low = _over_devices(lax.pmin, jnp.minimum(jnp.min(x, axis=-1, keepdims=True), 0), axis)
    high = _over_devices(lax.pmax, jnp.maximum(jnp.max(x, axis=-1, keepdims=True), 0), axis)
    scale = divide(high - low, jnp.float32(_INT8_MAX - _INT8_MIN))
    scale = _not_zero(scale, activation.elements)
    return scale, jnp.round(jnp.clip(_INT8_MIN - divide(low, scale), _INT8_MIN, _INT8_MAX))


def _scales_of_groups(
    x: Float32[Array, "T in"], activation: Activation, stored: Float32[Array, ""] | None, axis: MeshAxes | None
) -> Float32[Array, "T in"]:
    """Return each value's group scale.

    Args:
        x: activations; with an axis, this device's columns.
        activation: activation scheme with groups.
        stored: factor on e2m1 group scales before they are rounded.
        axis: mesh axes over which x's columns are sharded.
    """
    assert activation.group is not None, "there are groups"
    elements, largest = activation.elements, _largest_of_groups(x, activation.group, axis)
    if activation.power_of_two:
        return _powers_of_two(largest, elements)
    scale = divide(largest, jnp.float32(_STEPS[elements]))
    if elements != "e2m1":
        return _not_zero(scale, elements)
    assert stored is not None, "scales of groups have a scale"
    return divide(_not_zero(to_e4m3(scale * stored), elements), stored)


def _over_devices(
    reduce: Callable[..., Array], x: Float32[Array, "T 1"], axis: MeshAxes | None
) -> Float32[Array, "T 1"]:
    """Reduce x over the devices along a mesh axis; return it unchanged without an axis."""
    return x if axis is None else reduce(x, axis)


def _not_zero(scale: Float32[Array, "..."], elements: str) -> Float32[Array, "..."]:
    """Replace zero scales by a small one, as the values are then all zero."""
    return jnp.where(scale == 0, _SMALLEST[elements], scale)


def _powers_of_two(largest: Float32[Array, "T in"], elements: str) -> Float32[Array, "T in"]:
    """Return MX scales for groups whose maximum absolute values are `largest`.

    A scale's exponent is the value's, rounded up from 1.75 on, minus the largest element's.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = jnp.right_shift(bits + (1 << 21), 23) - 127 - _EXPONENTS[elements]
    # The smallest scale is the smallest normal float32, as XLA may flush the others to zero.
    return lax.bitcast_convert_type(jnp.left_shift(jnp.maximum(exponent + 127, 1), 23), jnp.float32)


def divide(x: Float32[Array, "T in"], by: Float32[Array, "..."]) -> Float32[Array, "T in"]:
    """Return the exact quotient `x / by`.

    XLA multiplies by the reciprocal if it broadcasts the divisor. With a scale one bit off, a token's largest value is
    no longer halfway between two integers.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def _largest_of_groups(x: Float32[Array, "T in"], group: int, axis: MeshAxes | None) -> Float32[Array, "T in"]:
    """Return, for each value, the maximum absolute value in its group, which may lie on several devices."""
    num_tokens, size = x.shape
    num_devices = 1 if axis is None else lax.axis_size(axis)
    if num_devices == 1 or size % group == 0:
        padded = jnp.pad(jnp.abs(x), ((0, 0), (0, -size % group)))
        largest = padded.reshape(num_tokens, -1, group).max(axis=-1)
        return jnp.repeat(largest, group, axis=1)[:, :size]
    part = math.gcd(size, group)  # an aligned run with this length lies on one device and in one group
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
    """Round x to the nearest values that the element type has, ties to an even mantissa."""
    if elements == "int8":
        return jnp.clip(jnp.round(x), -128, 127)
    return to_e4m3(x) if elements == "e4m3" else to_e2m1(x)


def to_e4m3(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Round to e4m3; values beyond its range become its maximum, where a plain cast gives NaN."""
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def to_e2m1(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Round to e2m1, whose values are 0.5 apart up to 2, 1 up to 4, and 2 up to 6."""
    size = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step
