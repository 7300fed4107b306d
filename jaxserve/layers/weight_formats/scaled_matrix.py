"""Matmuls with quantised matrices: in a kernel if one can run, otherwise in XLA, on CPUs in slabs."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxserve.layers.linear import LinearContext, Matrix
from jaxserve.layers.stored_rows import Dequantize, StoredRows, block, multiply_by_slabs, multiply_whole
from jaxserve.pallas_kernels.grouped_matmul import QuantizedStack, grouped_matmul


class ScaledMatrix(Matrix):
    """A matrix with quantised elements and scale grids: a pytree."""

    @abstractmethod
    def quantized(self) -> QuantizedStack:
        """Return the operand for the matmul kernels; `self` must be a stack."""

    @abstractmethod
    def rows_arrays(self) -> tuple[StoredRows, ...]:
        """Return the arrays that `dequantize` takes."""

    @abstractmethod
    def dequantize(self, *arrays: Array) -> Float32[Array, "rows in"]:
        """Return matrix rows, given the same rows from each array in `rows_arrays`."""

    def row_factor(self) -> Float32[Array, " out"] | None:
        """Return a factor for each row that `quantized` lacks; None, the default, for no factor."""
        return None

    def quantize_inputs(
        self, x: Float[Array, "T in"], context: LinearContext
    ) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
        """Return the matmul's inputs, and a factor for its outputs or None; by default x unchanged."""
        return x, None

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T` from a kernel, or from this module's `multiply`."""
        return self.multiply_in_stack(x, jax.tree.map(lambda array: array[None], self), jnp.int32(0), context)

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Matrix, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T` from a kernel that reads the stack, or from this module's `multiply`."""
        assert isinstance(stack, ScaledMatrix), "a stack has the type of its matrices"
        x, factor = self.quantize_inputs(x, context)
        dtype = jnp.float32 if factor is not None or context.dtype is None else context.dtype
        y = grouped_matmul(
            x,
            stack.quantized(),
            layer=layer,
            row_factor=self.row_factor(),
            dtype=dtype,
            xla_matmul=partial(multiply, self.dequantize, self.rows_arrays(), x),
        )
        return y if factor is None else y * factor

    def rows(self, ids: Int[Array, " T"]) -> Float32[Array, "T in"]:
        """Return the dequantised matrix rows `ids`, clipped to valid ones."""
        return self.dequantize(*(array.take(ids) for array in self.rows_arrays()))

    def block(self, start: Int[Array, ""], num_rows: int) -> Float32[Array, "rows in"]:
        """Return `num_rows` dequantised matrix rows, beginning with row `start`."""
        return block(self.dequantize, self.rows_arrays(), start, num_rows)


def multiply(dequantize: Dequantize, arrays: Sequence[StoredRows], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    """Return x @ W.T, on a CPU in float32, elsewhere in x's dtype with float32 sums.

    Args:
        dequantize: function from the same rows in each array to matrix rows.
        arrays: arrays that hold the matrix.
        x: activations.
    """
    cpu, default = (partial(form, dequantize) for form in (multiply_by_slabs, multiply_whole))
    return lax.platform_dependent(tuple(arrays), x, cpu=cpu, default=default)
