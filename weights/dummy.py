"""Random weights for tests, benchmarks and training from scratch."""

import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from jaxserve.weights.rows import Params, Shardings, TensorRow, build_tree, sharding_at

_STD = 0.02
_CONSTANTS = {"ones": 1, "zeros": 0}


def dummy(
    specs: Sequence[TensorRow],
    seed: int,
    dtype: jax.typing.DTypeLike,
    *,
    shardings: Shardings | None = None,
    transform: Callable[[Any, Array], Any] | None = None,
) -> Params:
    """Return random parameters that depend only on `seed`, path and shape, not on the devices.

    "normal" rows are nearly normal with standard deviation 0.02; "ones" and "zeros" are constant. `transform` takes a
    row and its array, and returns the leaf of the tree.
    """

    def leaf(row: TensorRow) -> Any:
        """Return a tensor's parameter, converted by `transform`."""
        array = whole(row)
        return array if transform is None else transform(row, array)

    def whole(row: TensorRow) -> Array:
        """Return a tensor's initial values."""
        sharding = sharding_at(shardings, row.path)
        if row.init in _CONSTANTS:
            return jnp.full(row.shape, _CONSTANTS[row.init], dtype, device=sharding)
        name = "/".join(map(str, row.path))
        key = jnp.array([seed & 0xFFFFFFFF, zlib.crc32(name.encode())], jnp.uint32)
        return _generator(row.shape, jnp.dtype(dtype), sharding)(key)

    return build_tree(specs, leaf)


@lru_cache(maxsize=64)
def _generator(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None) -> Callable[[Array], Array]:
    """Return a compiled function from a key to random values; cached, as a model's many tensors have few shapes."""
    return jax.jit(partial(_nearly_normal, shape=shape, dtype=dtype), out_shardings=sharding)


def _nearly_normal(key: Array, *, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return the sum of the four bytes in a hash of each element's index (Irwin-Hall).

    Ten times as fast as Threefry on a CPU, and elementwise, so that any sharding gives the same values. The hash is
    Ettinger's 32-bit mixer "lowbias32".
    """
    x = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        x = x * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    x = (x ^ key[0]) * jnp.uint32(0x9E3779B9) + key[1]
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x ^= x >> 15
    total = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24)
    std = math.sqrt(4 * (256**2 - 1) / 12)  # standard deviation of such a sum
    return ((total.astype(jnp.float32) - 510) * (_STD / std)).astype(dtype)
