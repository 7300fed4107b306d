"""Arrays with 16- or 8-bit floats on CPUs, which compute in wider floats.

XLA:CPU fuses the conversion with the gather or slice that reads such an array's rows, unless it can move the conversion
before a loop: it then converts the whole array.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from jaxserve.pallas_kernels.target import target_platform

__all__ = ["is_narrow", "kept_beside"]


def is_narrow(dtype: DTypeLike) -> bool:
    """Return whether a dtype has floats below 32 bits and the target is a CPU."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return bool(is_float and jnp.dtype(dtype).itemsize < 4 and target_platform() == "cpu")


def kept_beside(
    array: Shaped[Array, "*shape"], index: Int[Array, "*index"]
) -> tuple[Shaped[Array, "*shape"], Int[Array, "*index"]]:
    """Tie an array to the index that reads its rows, so that XLA converts it no earlier than the index is known.

    Returns:
        The array and the index.
    """
    if not is_narrow(array.dtype):
        return array, index
    kept: tuple[Array, Array] = lax.optimization_barrier((array, index))
    return kept
