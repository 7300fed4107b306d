"""Lookups in arrays with 16- or 8-bit floats on CPUs, which compute in wider floats.

XLA:CPU fuses the conversion with the gather or slice that reads such an array's rows, unless it can move the conversion
before a loop: it then converts the whole array.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from jaxserve.pallas_kernels.target import target_platform

__all__ = ["is_narrow", "tie_to_index"]


def is_narrow(dtype: DTypeLike) -> bool:
    """Return whether XLA widens the dtype before it computes: it has floats below 32 bits, and the target is a CPU."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return bool(is_float and jnp.dtype(dtype).itemsize < 4 and target_platform() == "cpu")


def tie_to_index(
    array: Shaped[Array, "*shape"], index: Int[Array, "*index"]
) -> tuple[Shaped[Array, "*shape"], Int[Array, "*index"]]:
    """Keep XLA:CPU from converting a whole narrow float array before it reads some of its rows.

    An optimization barrier makes the array depend on the index, so that no conversion can move before the lookup.

    Args:
        array: array whose rows are looked up.
        index: indices of the rows.

    Returns:
        The same array and index, to use in the lookup.
    """
    if not is_narrow(array.dtype):
        return array, index
    kept: tuple[Array, Array] = lax.optimization_barrier((array, index))
    return kept
