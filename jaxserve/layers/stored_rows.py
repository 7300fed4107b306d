"""Row access to quantised matrices, and the XLA matmuls that dequantise them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxserve.pallas_kernels.narrow_floats import tie_to_index

# Elements that a CPU upcasts per slab. For few tokens a slab stays in the L2 cache, and its matmul below the size at
# which XLA:CPU uses its thread pool; for many tokens the matmul is threaded, and large enough for that to pay.
_SMALL_SLAB, _LARGE_SLAB = 96 << 10, 512 << 10
_FEW_TOKENS = 16  # up to this many tokens XLA:CPU computes W·x faster than x·W

Dequantize = Callable[..., Array]  # takes the same rows from each array and returns these matrix rows in floats


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredRows:
    """An array with data for each matrix row: elements, scales or zero points.

    Attributes:
        array: the array.
        axis: axis in `array` that counts matrix rows: 0, or the last one for scales `[groups, rows]`, because
            transposing these would copy them.
    """

    array: Shaped[Array, "..."]
    axis: int = field(default=0, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of matrix rows."""
        return self.array.shape[self.axis]

    def take(self, ids: Int[Array, " T"]) -> Shaped[Array, "T columns"]:
        """Return the rows `ids`, clipped to valid ones."""
        array, ids = tie_to_index(self.array, ids)
        place = (*(slice(None),) * self.axis, ids)
        return jnp.moveaxis(array.at[place].get(mode="clip"), self.axis, 0)

    def block(self, start: Int[Array, ""], num_rows: int) -> Shaped[Array, "rows columns"]:
        """Return `num_rows` consecutive rows from `start` on; a slice takes a TPU less memory than a gather."""
        array, start = tie_to_index(self.array, start)
        return jnp.moveaxis(lax.dynamic_slice_in_dim(array, start, num_rows, self.axis), self.axis, 0)

    def whole(self) -> Shaped[Array, "rows columns"]:
        """Return all rows."""
        return jnp.moveaxis(self.array, self.axis, 0)


def block(
    dequantize: Dequantize, arrays: Sequence[StoredRows], start: Int[Array, ""], num_rows: int
) -> Float[Array, "rows in"]:
    """Return `num_rows` consecutive matrix rows in floats.

    Args:
        dequantize: function from the same rows in each array to matrix rows.
        arrays: a quantised matrix's arrays.
        start: first row.
        num_rows: number of rows.
    """
    return dequantize(*(array.block(start, num_rows) for array in arrays))


def multiply_whole(
    dequantize: Dequantize, arrays: Sequence[StoredRows], x: Float[Array, "T in"]
) -> Float32[Array, "T out"]:
    """Return `x @ W.T` on accelerators: XLA may fuse upcast and scaling into the matmul's operand."""
    return _dot(x, dequantize(*(array.whole() for array in arrays)).astype(x.dtype))


def multiply_by_slabs(
    dequantize: Dequantize, arrays: Sequence[StoredRows], x: Float[Array, "T in"]
) -> Float32[Array, "T out"]:
    """Return `x @ W.T` on a CPU, in slabs: a float copy of the whole matrix would be page-faulted in on every call.

    The last slab overlaps the previous one if their size does not divide `out`.
    """
    num_out, in_size = arrays[0].num_rows, x.shape[1]
    few, x = x.shape[0] <= _FEW_TOKENS, x.astype(jnp.float32)
    rows = _slab_rows(num_out, in_size, _SMALL_SLAB if few else _LARGE_SLAB)

    def add_slab(index: Array, y: Array) -> Array:
        """Multiply by slab `index` and write the outputs to y."""
        start = jnp.minimum(index * rows, num_out - rows)
        w = block(dequantize, arrays, start, rows).astype(jnp.float32)
        part = _dot(w, x) if few else _dot(x, w)
        return lax.dynamic_update_slice_in_dim(y, part, start, axis=0 if few else 1)

    shape = (num_out, x.shape[0]) if few else (x.shape[0], num_out)
    y = lax.fori_loop(0, -(-num_out // rows), add_slab, jnp.zeros(shape, jnp.float32))
    return y.T if few else y


def _slab_rows(num_out: int, in_size: int, slab_size: int) -> int:
    """Return the rows per slab of an [num_out, in_size] matrix.

    It is the largest power of two with at most `slab_size` elements, at least 8, or all rows if there are fewer.
    """
    return min(num_out, 1 << max(8, slab_size // in_size).bit_length() - 1)


_dot = partial(
    lax.dot_general,
    dimension_numbers=(((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)
