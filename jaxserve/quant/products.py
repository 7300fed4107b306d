"""Products of quantised matrices, by a kernel where one can run; XLA's: by slabs on CPUs, of the whole elsewhere."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxserve.layers.linear import LinearContext, Matrix
from jaxserve.pallas_kernels.quantized_matmul import Quantized, quantized_matmul

Dequantize = Callable[..., Array]  # function of some rows of each array that returns these rows in float32

_FEW_TOKENS = 16  # up to this many tokens XLA:CPU computes W·x faster than x·W
# Elements upcast at once on a CPU. For few tokens they stay in the L2 cache, below the size at which XLA:CPU hands a
# product to its thread pool; for many tokens the product is threaded, and large enough for that to pay.
_SMALL_SLAB, _LARGE_SLAB = 96 << 10, 512 << 10


class ScaledMatrix(Matrix):
    """A matrix of quantised elements and grids of scales, a pytree of arrays."""

    @abstractmethod
    def quantized(self) -> Quantized:
        """Return what kernels multiply, if this holds the matrices of all layers."""

    @abstractmethod
    def rows_arrays(self) -> tuple[Array, ...]:
        """Return arrays of which some rows make the same rows of the matrix."""

    @abstractmethod
    def dequantize(self, *arrays: Array) -> Float32[Array, "rows in"]:
        """Return the rows that some rows of each of `rows_arrays` make."""

    def row_factor(self) -> Float32[Array, " out"] | None:
        """Return a factor of each row that `quantized` lacks; None where there is none, as by default."""
        return None

    def quantize_inputs(
        self, x: Float[Array, "T in"], context: LinearContext
    ) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
        """Return what the matrix is multiplied with, and a factor of the product or None; x as it is by default."""
        return x, None

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Multiply by a kernel, or as `multiply` of this module does."""
        return self.multiply_in_stack(x, jax.tree.map(lambda array: array[None], self), jnp.int32(0), context)

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Matrix, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Multiply by a kernel that reads the stack, or as `multiply` of this module does."""
        assert isinstance(stack, ScaledMatrix), "a stack has the type of its matrices"
        x, factor = self.quantize_inputs(x, context)
        dtype = jnp.float32 if factor is not None or context.dtype is None else context.dtype
        by_xla = partial(multiply, self.dequantize, self.rows_arrays(), x)
        y = quantized_matmul(x, stack.quantized(), layer, row_factor=self.row_factor(), dtype=dtype, by_xla=by_xla)
        return y if factor is None else y * factor

    def rows(self, ids: Int[Array, " T"]) -> Float32[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return self.dequantize(*(array.at[ids].get(mode="clip") for array in self.rows_arrays()))

    def block(self, start: Int[Array, ""], num_rows: int) -> Float32[Array, "rows in"]:
        """Return consecutive rows."""
        return block(self.dequantize, self.rows_arrays(), start, num_rows)


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
