"""Vectors in int4 pools: rotated by a Hadamard matrix, then rounded to 16 levels between two bounds per group.

A stored vector is a byte string, group after group. A group with G elements has G / 2 bytes: byte i holds element i in
its low half and element i + G / 2 in its high half. 4 further bytes hold the step and the minimum, both in bfloat16. An
element stands for `minimum + step * element`. So a group with 64 elements takes 36 bytes. As in other quantised pools,
stored vectors never change, and they are the same for every division of a prompt into chunks.

The rotation spreads outliers in a few channels, which keys often have, over all channels (QuaRot, Ashkboos et al.,
2024). Scores are the same if queries are rotated too, and outputs are rotated back. Rotations take only sums and powers
of two, so that every backend computes the same bits.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8, UInt32

GROUP = 64  # elements per group; a head is one group if its size is not a multiple
MAX_HEAD_DIM = 2 * GROUP  # maximum size of a head that is one group, so that the number of bytes determines it
STEPS = 15  # steps from the minimum to the maximum
NUMBERS = 4  # bytes for the step and minimum of a group


def group_size(head_dim: int) -> int:
    """Return how many elements share a step and minimum in a vector with `head_dim` elements."""
    return head_dim if head_dim % GROUP else GROUP


def stored_bytes(head_dim: int) -> int:
    """Return how many bytes store a vector with `head_dim` elements."""
    return head_dim // 2 + head_dim // group_size(head_dim) * NUMBERS


def vector_size(num_bytes: int) -> int:
    """Return how many elements a vector with `num_bytes` stored bytes has; the inverse of `stored_bytes`."""
    group_bytes = stored_bytes(GROUP)
    return (num_bytes - NUMBERS) * 2 if num_bytes % group_bytes else num_bytes // group_bytes * GROUP


def failure(head_dim: int) -> str | None:
    """Return why int4 pools do not support vectors with `head_dim` elements, or None if they do."""
    if head_dim % 2 == 0 and (head_dim % GROUP == 0 or head_dim <= MAX_HEAD_DIM):
        return None
    return f"head_dim must be even, and above {MAX_HEAD_DIM} a multiple of {GROUP}, in a pool of int4, not {head_dim}"


def block_size(head_dim: int) -> int:
    """Return the size of the Hadamard matrix that rotates a vector block by block: a power of two.

    It is the largest one that divides the number of elements, `head_dim`.
    """
    return head_dim & -head_dim


def rotate(x: Float[Array, "*vectors H"]) -> Float32[Array, "*vectors H"]:
    """Multiply each block of `block_size(H)` elements by the Hadamard matrix with entries 1 and -1 (Sylvester's order).

    The result is not normalised: a second rotation returns the vector times the block size.
    """
    shape, x = x.shape, x.astype(jnp.float32)
    half = 1
    while half < block_size(shape[-1]):
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([first + second, first - second], axis=-2).reshape(shape)
        half *= 2
    return x


def pack(x: Float32[Array, "*vectors H"]) -> UInt8[Array, "*vectors bytes"]:
    """Quantise rotated vectors to int4 and return their stored bytes; `unpack` is the inverse, except for rounding.

    A group with an infinity or NaN becomes NaN.
    """
    size = group_size(x.shape[-1])
    groups = x.reshape(*x.shape[:-1], -1, size)
    # A conversion to bfloat16 and back would be left out by XLA.
    minimum = lax.reduce_precision(jnp.min(groups, axis=-1), 8, 7)
    step = (jnp.max(groups, axis=-1) - minimum) * np.float32(1 / STEPS)
    step = lax.reduce_precision(jnp.maximum(step, np.finfo(np.float32).tiny), 8, 7)
    # XLA:CPU ignores NaN in a maximum over many vectors.
    step = jnp.where(jnp.all(jnp.isfinite(groups), axis=-1), step, jnp.nan)
    elements = jnp.clip(jnp.round((groups - minimum[..., None]) * (1 / step)[..., None]), 0, STEPS).astype(jnp.uint8)
    low, high = jnp.split(elements, 2, axis=-1)
    packed = jnp.concatenate([low | high << 4, _to_bytes(step), _to_bytes(minimum)], axis=-1)
    return packed.reshape(*x.shape[:-1], -1)


def unpack(packed: UInt8[Array, "*vectors bytes"]) -> Float32[Array, "*vectors H"]:
    """Dequantise the stored bytes of int4 vectors; the vectors stay rotated."""
    head_dim = vector_size(packed.shape[-1])
    half = group_size(head_dim) // 2
    groups = packed.reshape(*packed.shape[:-1], -1, half + NUMBERS)
    step, minimum = (_to_float(groups[..., half + at : half + at + 2]) for at in (0, 2))
    bytes_ = groups[..., :half]
    elements = jnp.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).astype(jnp.float32)
    return (elements * step + minimum).reshape(*packed.shape[:-1], head_dim)


def _to_bytes(x: Float32[Array, "*groups"]) -> UInt8[Array, "*groups 2"]:
    """Return float32 numbers that bfloat16 represents as the two bytes of the bfloat16, the lower byte first."""
    words: UInt32[Array, "*groups"] = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.stack([words >> 16 & 0xFF, words >> 24], axis=-1).astype(jnp.uint8)


def _to_float(pair: UInt8[Array, "*groups 2"]) -> Float32[Array, "*groups 1"]:
    """Return the float32 number for each pair of bytes of a bfloat16, the lower byte first."""
    low, high = jnp.split(pair.astype(jnp.uint32), 2, axis=-1)
    return lax.bitcast_convert_type(low << 16 | high << 24, jnp.float32)
