"""Arrays in floats of 16 or 8 bits on CPUs, which compute in wider ones.

XLA:CPU may read rows of such an array by a conversion of the whole, which it fuses with the gather or slice, unless it
can move it in front of a loop.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Int, Shaped

__all__ = ["is_narrow", "kept_beside"]


def is_narrow(dtype: DTypeLike) -> bool:
    """Return whether a dtype is of floats below 32 bits, on a CPU."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return bool(is_float and jnp.dtype(dtype).itemsize < 4 and target_platform() == "cpu")


def kept_beside(
    array: Shaped[Array, "*shape"], index: Int[Array, "*index"]
) -> tuple[Shaped[Array, "*shape"], Int[Array, "*index"]]:
    """Return an array and the index of its rows that are read.

    What is computed of a narrow array then stays where the index is: for XLA, both change together.
    """
    if not is_narrow(array.dtype):
        return array, index
    kept: tuple[Array, Array] = lax.optimization_barrier((array, index))
    return kept
