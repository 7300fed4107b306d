"""Products of matrices that XLA dequantises as it multiplies: by slabs on CPUs, in the product elsewhere."""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

Dequantize = Callable[..., Array]  # function of some rows of each array that returns these rows in float32

_FEW_TOKENS = 16  # up to this many tokens XLA:CPU computes W·x faster than x·W
# Elements upcast at once on a CPU. For few tokens they stay in the L2 cache, below the size at which XLA:CPU hands a
# product to its thread pool; for many tokens the product is threaded, and large enough for that to pay.
_SMALL_SLAB, _LARGE_SLAB = 96 << 10, 512 << 10


def multiply(dequantize: Dequantize, arrays: Sequence[Array], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    """Multiply x with a matrix; in float32 on a CPU, elsewhere in the dtype of x with float32 sums.

    Args:
        dequantize: function of some rows of each array.
        arrays: arrays of the matrix, each with as many rows as it has.
        x: activations.
    """
    cpu, default = (partial(form, dequantize) for form in (by_slabs, whole))
    return lax.platform_dependent(tuple(arrays), x, cpu=cpu, default=default)


def whole(dequantize: Dequantize, arrays: tuple[Array, ...], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    """Multiply on accelerators, where XLA may fuse upcast and scaling into the product's operand."""
    return _dot(x, dequantize(*arrays).astype(x.dtype))


def block(
    dequantize: Dequantize, arrays: Sequence[Array], start: Int[Array, ""], num_rows: int
) -> Float32[Array, "rows in"]:
    """Return consecutive rows of a matrix, in float32."""
    return dequantize(*(lax.dynamic_slice_in_dim(array, start, num_rows) for array in arrays))


def by_slabs(dequantize: Dequantize, arrays: tuple[Array, ...], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    """Multiply on a CPU, in slabs: a float copy of the whole matrix would be page-faulted in on every call.

    The last slab overlaps the previous one if their size does not divide `out`.
    """
    num_out, in_size = arrays[0].shape[0], x.shape[1]
    few, x = x.shape[0] <= _FEW_TOKENS, x.astype(jnp.float32)
    rows = _slab_rows(num_out, in_size, _SMALL_SLAB if few else _LARGE_SLAB)

    def add_slab(index: Array, y: Array) -> Array:
        start = jnp.minimum(index * rows, num_out - rows)
        w = block(dequantize, arrays, start, rows)
        part = _dot(w, x) if few else _dot(x, w)
        return lax.dynamic_update_slice_in_dim(y, part, start, axis=0 if few else 1)

    shape = (num_out, x.shape[0]) if few else (x.shape[0], num_out)
    y = lax.fori_loop(0, -(-num_out // rows), add_slab, jnp.zeros(shape, jnp.float32))
    return y.T if few else y


def _slab_rows(num_out: int, in_size: int, slab_size: int) -> int:
    """Return the rows of a slab: the largest power of two that it holds, at least 8, or all rows if there are fewer."""
    return min(num_out, 1 << max(8, slab_size // in_size).bit_length() - 1)


_dot = partial(
    lax.dot_general,
    dimension_numbers=(((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)
