"""Matrix products with weights stored [out, in], as Hugging Face has them, in any weight format."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.norm import RmsNorm
from jaxserve.layers.stored_rows import StoredRows, multiply_by_slabs
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.narrow_floats import is_narrow

_LEAST_TILE, _LARGEST_TILE = 8, 512  # rows; larger tiles make floats of a matrix less often, and pad more


@dataclass(frozen=True)
class LinearContext:
    """Settings of a product besides its operands; hashable.

    Attributes:
        activation: function of the sums and the bias; gated matrices, and only they, must have `swiglu`.
        dtype: dtype of the result; None for that of x, or of the rows of a table.
        axis: mesh axes along which each device has some columns of the matrix and of x, and the products are summed
            before the bias; in a look-up, along which each device has as many rows of the table, in order.
        num_shards: number of devices whose groups the rows of a grouped product are those of; see `grouped_matmul`.
    """

    activation: Callable[[Array], Array] | None = None
    dtype: jax.typing.DTypeLike | None = None
    axis: str | tuple[str, ...] | None = None
    num_shards: int = 1


class Operands(NamedTuple):
    """Arrays around the product of x and a matrix: `activation(norm(x) @ W.T + bias) + residual`. Kernels may fuse it.

    Whatever else is added to a product becomes a field here and a term of `finish`.
    """

    norm: RmsNorm | None = None
    bias: Float[Array, " out"] | None = None
    residual: Float[Array, "T outputs"] | None = None

    def finish(self, product: Float[Array, "T out"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Sum a product over the devices and apply what follows it."""
        y = product.astype(context.dtype)
        y = y if context.axis is None else lax.psum(y, context.axis)
        if self.bias is not None:
            y += self.bias[None, :].astype(y.dtype)
        y = context.activation(y) if context.activation else y
        return y if self.residual is None else self.residual + y


class Matrix(ABC):
    """A matrix [out, in] in the form in which a device holds it: a pytree with its own product and look-up."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in], whatever the arrays that hold it."""

    @abstractmethod
    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`, accumulated in float32; a format of quantised activations quantises `x` here."""

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: "Matrix", layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Multiply with this matrix, which is that of `layer` in a stack; kernels that read it there override this."""
        return self.multiply(x, context)

    @abstractmethod
    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""

    def block(self, start: Int[Array, ""], num_rows: int) -> Float[Array, "rows in"]:
        """Return consecutive rows; a slice, where a format has one, which takes a TPU less memory than a gather."""
        return self.rows(start + jnp.arange(num_rows))

    def linear(self, x: Float[Array, "T in"], context: LinearContext, operands: Operands) -> Float[Array, "T outputs"]:
        """Return the product with its operands applied; matrices whose kernel fuses them override this."""
        y = self.multiply(operands.norm(x) if operands.norm else x, context)
        return operands.finish(y, context)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Return the product of each row with the matrix of its group, one of G that make up this one.

        It is in float32, or rounded to `context.dtype`. The rows of x are sorted by group, as `grouped_matmul` takes
        them. By default matrices are made floats one after the other, each for a tile of its rows; those of empty
        groups are not read.
        """
        (num_rows, _), num_groups = x.shape, group_sizes.size
        size, tile_rows = self.shape[0] // num_groups, _group_tile_rows(num_rows, num_groups * context.num_shards)
        num_tiles = -(-group_sizes // tile_rows)
        ends, end_tiles = jnp.cumsum(group_sizes), jnp.cumsum(num_tiles)

        def add(tile: Array, y: Array) -> Array:
            group = jnp.searchsorted(end_tiles, tile, side="right")
            place = tile - (end_tiles[group] - num_tiles[group])
            first = ends[group] - group_sizes[group] + place * tile_rows
            start = jnp.minimum(first, num_rows - tile_rows)
            numbers = start + jnp.arange(tile_rows)
            is_here = (numbers >= first) & (numbers < ends[group])
            matrix = FloatMatrix(self.block(group * size, size).astype(x.dtype))
            product = matrix.multiply(lax.dynamic_slice_in_dim(x, start, tile_rows), context)
            others = lax.dynamic_slice_in_dim(y, start, tile_rows)
            return lax.dynamic_update_slice_in_dim(y, jnp.where(is_here[:, None], product, others), start, axis=0)

        # Zeros that depend on the layer's own groups: else XLA makes those of all layers at once, and keeps them.
        zero = jnp.minimum(end_tiles[-1], 0).astype(jnp.float32)
        return lax.fori_loop(0, end_tiles[-1], add, jnp.full((num_rows, size), zero))

    def linear_groups(
        self,
        x: Float[Array, "M in"],
        group_sizes: Int[Array, " G"],
        context: LinearContext,
        bias: Float[Array, "G out"] | None = None,
    ) -> Float[Array, "M outputs"]:
        """Return `multiply_groups` with the bias of each group, in `context.dtype` and after `context.activation`.

        Along `context.axis`, products are not summed.
        """
        y = self.multiply_groups(x, group_sizes, context if bias is None else replace(context, dtype=jnp.float32))
        if bias is not None:
            group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
            y += bias.astype(y.dtype).at[group].get(mode="fill", fill_value=0)  # none for rows behind the last group
        y = y.astype(context.dtype)
        return context.activation(y) if context.activation else y


@dataclass(frozen=True)
class FloatMatrix(Matrix):
    """A matrix that is held as it is, in an array of floats."""

    array: Float[Array, "out in"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Multiply; one token from the other side, as XLA:CPU reads a row-major matrix up to eight times faster as W·x.

        Products of float32 are exact float32, not the TF32 or bfloat16 that accelerators use by default. On a CPU those
        of narrower floats are too, by slabs: XLA would convert the whole matrix.
        """
        if is_narrow(self.array.dtype):
            return multiply_by_slabs(lambda rows: rows, [StoredRows(self.array)], x)
        precision = lax.Precision.HIGHEST if x.dtype == self.array.dtype == jnp.float32 else None
        dot = partial(
            lax.dot_general,
            dimension_numbers=(((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return dot(self.array, x).T if x.shape[0] == 1 else dot(x, self.array)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return StoredRows(self.array).take(ids)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Multiply by one ragged product, or on a CPU the narrower floats of one matrix after the other."""
        if is_narrow(self.array.dtype):
            return super().multiply_groups(x, group_sizes, context)
        matrices = self.array.reshape(group_sizes.size, -1, x.shape[1])
        dtype, num_shards = context.dtype or jnp.float32, context.num_shards
        return grouped_matmul(x, matrices, group_sizes, dtype=dtype, num_shards=num_shards)


@dataclass(frozen=True)
class StackedMatrix(Matrix):
    """A matrix of one of several layers, among those of all, which kernels read in place.

    Attributes:
        stack: matrices of all layers, in an array of floats or in those of another form.
        layer: number of the layer in the stack.
    """

    stack: Float[Array, "layers out in"] | Matrix
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's matrix."""
        return self.stack.shape[1:]

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Multiply by a kernel that reads the stack, or by the layer's slice."""
        own = self._slice()
        if isinstance(self.stack, Matrix):
            return own.multiply_in_stack(x, self.stack, self.layer, context)
        return own.multiply(x, context)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return self._slice().rows(ids)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Multiply by one ragged product, whose matrices lie among those of all layers, or by the layer's slice."""
        if isinstance(self.stack, Matrix):
            return self._slice().multiply_groups(x, group_sizes, context)
        dtype, num_shards = context.dtype or jnp.float32, context.num_shards
        return grouped_matmul(x, self.stack, group_sizes, layer=self.layer, dtype=dtype, num_shards=num_shards)

    def _slice(self) -> Matrix:
        return as_matrix(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.layer, keepdims=False), self.stack))


@dataclass(frozen=True)
class ObservedMatrix(Matrix):
    """A matrix that passes the inputs of its products to a function, as tracers where they are traced.

    Attributes:
        matrix: matrix that computes.
        observe: function of the inputs x[T, in].
    """

    matrix: Matrix
    observe: Callable[[Float[Array, "T in"]], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.matrix.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Pass the inputs on and multiply."""
        self.observe(x)
        return self.matrix.multiply(x, context)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return self.matrix.rows(ids)


Weight = Float[Array, "out in"] | Matrix


def linear(
    x: Float[Array, "T in"],
    weight: Weight,
    context: LinearContext = LinearContext(),
    *,
    norm: RmsNorm | None = None,
    bias: Float[Array, " out"] | None = None,
    residual: Float[Array, "T outputs"] | None = None,
) -> Float[Array, "T outputs"]:
    """Return `activation(norm(x) @ weight.T + bias) + residual`, accumulated in float32; see `LinearContext`."""
    context = replace(context, dtype=context.dtype or x.dtype)
    return as_matrix(weight).linear(x, context, Operands(norm, bias, residual))


def embed(token_ids: Int[Array, " T"], table: Weight, context: LinearContext = LinearContext()) -> Float[Array, "T D"]:
    """Return rows of the embedding; ids are clipped to the range, and those beyond a table that is split get zeros."""
    matrix = as_matrix(table)
    if context.axis is None:
        rows = matrix.rows(token_ids)
        return rows.astype(context.dtype or rows.dtype)
    num_rows = matrix.shape[0]
    local_ids = token_ids - lax.axis_index(context.axis) * num_rows
    is_here = (local_ids >= 0) & (local_ids < num_rows)
    local = replace(context, axis=None)
    return lax.psum(jnp.where(is_here[:, None], embed(local_ids, table, local), 0), context.axis)


def _group_tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the rows that are multiplied with a matrix at once: a power of two near the mean size of a group."""
    mean = 1 << max(0, num_rows // num_groups - 1).bit_length()
    return min(num_rows, max(_LEAST_TILE, min(mean, _LARGEST_TILE)))


def as_matrix(weight: Weight) -> Matrix:
    """Return a weight as a matrix; those in float are bare arrays in parameter trees, as checkpoints have them."""
    return weight if isinstance(weight, Matrix) else FloatMatrix(weight)
