"""The positions with the highest scores in a row: among equal scores the lowest positions come first.

XLA for TPUs sorts for a top-k, and takes many minutes to compile a sort that finds the best 2,048 among 8,192. There
the lowest chosen score is found bit by bit instead: 32 times, the scores that are at least as high are counted.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

LANES = 128  # scores whose positions are found together


def top_mask(scores: Float32[Array, "*N S"], count: int) -> Bool[Array, "*N S"]:
    """Return a mask with each row's `count` highest scores; no score is -0."""
    least: Array = lax.platform_dependent(
        scores, tpu=lambda x: least_by_bits(x, count), default=lambda x: lax.top_k(x, count)[0][..., -1:]
    )
    is_tied = scores == least
    num_tied = count - jnp.sum(scores > least, axis=-1, keepdims=True, dtype=jnp.int32)
    return (scores > least) | (is_tied & (jnp.cumsum(is_tied, axis=-1, dtype=jnp.int32) <= num_tied))


def top_positions(scores: Float32[Array, "B S"], count: int) -> Int32[Array, "B count"]:
    """Return the positions where each row's `count` highest scores are, ascending; no score is -0."""
    found: Array = lax.platform_dependent(
        scores,
        tpu=lambda x: positions_in_mask(top_mask(x, count), count),
        default=lambda x: jnp.sort(lax.top_k(x, count)[1], axis=1),
    )
    return found


def least_by_bits(scores: Float32[Array, "*N S"], count: int) -> Float32[Array, "*N 1"]:
    """Return the lowest among each row's `count` highest scores, without a sort."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    ordered = _flip(bits)  # integers in the order of the scores

    def add_bit(index: Int32[Array, ""], least: Int32[Array, "*N 1"]) -> Int32[Array, "*N 1"]:
        higher = least ^ lax.shift_left(jnp.int32(1), 31 - index)
        num_higher = jnp.sum(ordered >= higher, axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(num_higher >= count, higher, least)

    start = jnp.full((*scores.shape[:-1], 1), -(2**31), jnp.int32)
    return lax.bitcast_convert_type(_flip(lax.fori_loop(0, 32, add_bit, start)), jnp.float32)


def _flip(bits: Int32[Array, "*N"]) -> Int32[Array, "*N"]:
    """Convert between floats' bits and integers in the same order; the conversion is its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def positions_in_mask(mask: Bool[Array, "B S"], count: int) -> Int32[Array, "B count"]:
    """Return the positions where each row's `count` set elements are, ascending, without a sort or a scatter.

    Each is first located in a block with LANES elements.
    """
    mask = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % LANES)))
    blocks = mask.reshape(len(mask), -1, LANES)
    ends = jnp.cumsum(jnp.sum(blocks, axis=2, dtype=jnp.int32), axis=1)  # set elements up to each block's end
    rank = jnp.arange(count, dtype=jnp.int32)
    block = jnp.sum(ends[:, None, :] <= rank[None, :, None], axis=2, dtype=jnp.int32)
    block = jnp.minimum(block, blocks.shape[1] - 1)
    before = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), block, axis=1, mode="clip")
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1, mode="clip")
    num_set = jnp.cumsum(inside, axis=2, dtype=jnp.int32)
    place = jnp.sum(num_set <= (rank[None] - before)[:, :, None], axis=2, dtype=jnp.int32)
    return block * LANES + place
