"""Linear layers with weights stored [out, in], as in Hugging Face's checkpoints, in any weight format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.norm import Norm
from jaxserve.layers.stored_rows import StoredRows, multiply_by_slabs
from jaxserve.layers.token_context import TokenAdapters, TokenContext
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.narrow_floats import is_narrow
from jaxserve.pallas_kernels.packed_linear import LowRankTerms

_MIN_TILE, _MAX_TILE = 8, 512  # rows; larger tiles dequantise a matrix less often, but pad more


MeshAxes = str | tuple[str, ...]


class Term(Protocol):
    """Term that some tokens add to a matmul's outputs, as adapters do; the others' outputs keep all bits."""

    def added_to(self, y: Float[Array, "T out"], x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """Return outputs y with the terms for the matmul's inputs x."""

    def packed(self) -> LowRankTerms | None:
        """Return the terms for kernels that multiply a packed matrix and add them; None if they are not packed."""


class LinearContext(NamedTuple):
    """Linear layer around a matrix W: `activation(norm(x) @ W.T + term + bias) + residual`.

    The matrix multiplies, `reduce` sums over devices, and `finish` does the rest; kernels may fuse all of them.

    Attributes:
        adapters: adapters by row of x, which adapted matrices need; None without adapters.
        norm: norm applied to x.
        term: term of some tokens, on each device; None without it.
        bias: bias, for grouped matrices [groups, out].
        activation: function applied after the bias.
        residual: residual stream.
        dtype: result dtype; None for x's dtype.
        axis: mesh axes along which each device has some columns of both the matrix and x.
        num_shards: number of expert-parallel shards whose rows x holds; see `grouped_matmul`.
        num_live: number of rows of x that are not padding, which follows them; None if all may be live.
    """

    adapters: TokenAdapters | None = None
    norm: Norm | None = None
    term: Term | None = None
    bias: Float[Array, "*groups out"] | None = None
    activation: Callable[[Array], Array] | None = None
    residual: Float[Array, "T outputs"] | None = None
    dtype: jax.typing.DTypeLike | None = None
    axis: MeshAxes | None = None
    num_shards: int = 1
    num_live: Int[Array, ""] | None = None

    def reduce(self, y: Float[Array, "T out"]) -> Float[Array, "T out"]:
        """Return y summed over the devices along `axis`."""
        return y if self.axis is None else lax.psum(y, self.axis)

    def finish(self, y: Float[Array, "T out"]) -> Float[Array, "T outputs"]:
        """Add the bias to y, apply the activation and add the residual stream."""
        if self.bias is not None:
            y += self.bias[None, :].astype(y.dtype)
        y = self.activation(y) if self.activation else y
        return y if self.residual is None else self.residual + y


class Matrix(ABC):
    """A matrix [out, in] as a device stores it: a pytree with its own matmul and row look-up."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in], which may differ from the shapes that its arrays have."""

    @abstractmethod
    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`, accumulated in float32; formats that quantise activations do so here."""

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Matrix, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T`; formats whose kernels read W in place, as matrix `layer` in a stack, override this."""
        return self.multiply(x, context)

    @abstractmethod
    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""

    def at_layer(self, layer: Int[Array, ""]) -> Matrix:
        """Return one layer's matrix in this stack, which kernels read in place."""
        return StackedMatrix(self, layer)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return the rows of tokens in an embedding; adapted embeddings override this."""
        return self.rows(ids)

    def block(self, start: Int[Array, ""], num_rows: int) -> Float[Array, "rows in"]:
        """Return consecutive rows; formats with a slice override this: it takes a TPU less memory than a gather."""
        return self.rows(start + jnp.arange(num_rows))

    def dense(self) -> Float[Array, "out in"]:
        """Return all rows."""
        return self.block(jnp.int32(0), self.shape[0])

    def linear(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Return the layer's output, including norm, bias, activation and residual; fused kernels override this."""
        y = self.multiply_with_term(context.norm(x) if context.norm else x, context)
        return context.finish(context.reduce(y.astype(context.dtype)))

    def multiply_with_term(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T + term`, as `multiply` does; formats whose kernels add terms override this."""
        y = self.multiply(x, context)
        return y if context.term is None else context.term.added_to(y, x)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute a grouped matmul: multiply each row of x by the matrix of its group.

        This matrix consists of G matrices of equal shape, one after another along axis 0. The result is in float32, or
        rounded to `context.dtype`. Rows are sorted by group, as `grouped_matmul` takes them. By default one matrix
        after the other is dequantised, once per row tile; empty groups' matrices are not read.
        """
        (num_rows, _), num_groups = x.shape, group_sizes.size
        size, tile_rows = self.shape[0] // num_groups, _group_tile_rows(num_rows, num_groups * context.num_shards)
        num_tiles = -(-group_sizes // tile_rows)
        ends, end_tiles = jnp.cumsum(group_sizes), jnp.cumsum(num_tiles)

        def add(tile: Array, y: Array) -> Array:
            """Multiply one row tile by its group's matrix, and write the results to y."""
            group = jnp.searchsorted(end_tiles, tile, side="right")
            index = tile - (end_tiles[group] - num_tiles[group])
            first = ends[group] - group_sizes[group] + index * tile_rows
            start = jnp.minimum(first, num_rows - tile_rows)
            row = start + jnp.arange(tile_rows)
            is_in_group = (row >= first) & (row < ends[group])
            matrix = FloatMatrix(self.block(group * size, size).astype(x.dtype))
            found = matrix.multiply(lax.dynamic_slice_in_dim(x, start, tile_rows), context)
            others = lax.dynamic_slice_in_dim(y, start, tile_rows)
            return lax.dynamic_update_slice_in_dim(y, jnp.where(is_in_group[:, None], found, others), start, axis=0)

        # Zeros that depend on the layer's groups: otherwise XLA allocates all layers' zeros early and keeps them.
        zero = jnp.minimum(end_tiles[-1], 0).astype(jnp.float32)
        return lax.fori_loop(0, end_tiles[-1], add, jnp.full((num_rows, size), zero))

    def linear_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M outputs"]:
        """Compute a linear layer with a matrix and bias per group, without the sum over devices."""
        bias, term = context.bias, context.term
        is_last = bias is None and term is None
        y = self.multiply_groups(x, group_sizes, context if is_last else context._replace(dtype=jnp.float32))
        y = y if term is None else term.added_to(y, x)
        if bias is not None:
            y += bias.astype(y.dtype).at[row_groups(group_sizes, len(x))].get(mode="fill", fill_value=0)
        return context._replace(bias=None).finish(y.astype(context.dtype))


class SortedGroups(NamedTuple):
    """Rows sorted by group.

    Attributes:
        order: index of the row at each sorted position.
        position: sorted position of each row.
        sizes: number of rows per group.
    """

    order: Int[Array, " M"]
    position: Int[Array, " M"]
    sizes: Int[Array, " G"]

    @classmethod
    def sort(cls, group: Int[Array, " M"], num_groups: int) -> SortedGroups:
        """Sort rows by group; rows with group `num_groups`, which are in none, come last."""
        order = jnp.argsort(group, stable=True).astype(jnp.int32)
        index = jnp.arange(group.size, dtype=jnp.int32)
        position = jnp.zeros_like(index).at[order].set(index, unique_indices=True)
        return cls(order, position, jnp.zeros(num_groups, jnp.int32).at[group].add(1, mode="drop"))


def row_groups(group_sizes: Int[Array, " G"], num_rows: int) -> Int[Array, " M"]:
    """Return each row's group; G for rows after the last group."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(num_rows), side="right")


@dataclass(frozen=True)
class FloatMatrix(Matrix):
    """A matrix in a float array."""

    array: Float[Array, "out in"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in]."""
        return self.array.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`; for one token as `W @ x`, since XLA:CPU then reads a row-major matrix up to 8x faster.

        Float32 is multiplied in float32, not in the TF32 or bfloat16 that accelerators use by default. On a CPU
        narrower floats are upcast to float32 by slabs: XLA would convert the whole matrix.
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

    def dense(self) -> Float[Array, "out in"]:
        """Return the array."""
        return self.array

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute one grouped matmul; on a CPU, multiply narrower floats matrix by matrix."""
        if is_narrow(self.array.dtype):
            return super().multiply_groups(x, group_sizes, context)
        matrices = self.array.reshape(group_sizes.size, -1, x.shape[1])
        dtype, num_shards = context.dtype or jnp.float32, context.num_shards
        return grouped_matmul(x, matrices, group_sizes, dtype=dtype, num_shards=num_shards)


@dataclass(frozen=True)
class StackedMatrix(Matrix):
    """One layer's matrix in a stack, which kernels read in place.

    Attributes:
        stack: all layers' matrices, in a float array or in another format.
        layer: index in the stack.
    """

    stack: Float[Array, "layers out in"] | Matrix
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in]."""
        return self.stack.shape[1:]

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`, by a kernel that reads the stack in place if there is one, else with the layer's slice."""
        matrix = self._slice()
        if isinstance(self.stack, Matrix):
            return matrix.multiply_in_stack(x, self.stack, self.layer, context)
        return matrix.multiply(x, context)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return self._slice().rows(ids)

    def dense(self) -> Float[Array, "out in"]:
        """Return the layer's slice."""
        return self._slice().dense()

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute one grouped matmul that reads a float stack in place; slice any other stack."""
        if isinstance(self.stack, Matrix):
            return self._slice().multiply_groups(x, group_sizes, context)
        dtype, num_shards = context.dtype or jnp.float32, context.num_shards
        return grouped_matmul(x, self.stack, group_sizes, layer=self.layer, dtype=dtype, num_shards=num_shards)

    def _slice(self) -> Matrix:
        """Return the layer's matrix, copied from the stack."""
        return as_matrix(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.layer, keepdims=False), self.stack))


@dataclass(frozen=True)
class WrappedMatrix(Matrix):
    """A matrix whose methods call another matrix's; subclasses add to its matmuls.

    Attributes:
        matrix: the other matrix, or its float array.
    """

    matrix: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in]."""
        return self.matrix.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`."""
        return as_matrix(self.matrix).multiply(x, context)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return as_matrix(self.matrix).rows(ids)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return the rows of tokens in an embedding."""
        return as_matrix(self.matrix).look_up(ids, adapters)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute a grouped matmul."""
        return as_matrix(self.matrix).multiply_groups(x, group_sizes, context)


@dataclass(frozen=True)
class ObservedMatrix(WrappedMatrix):
    """A matrix that passes its inputs to a function, as tracers if they are traced.

    Attributes:
        observe: function called with the inputs x[T, in].
    """

    observe: Callable[[Float[Array, "T in"]], None]

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Pass the inputs to `observe` and multiply."""
        self.observe(x)
        return super().multiply(x, context)


Weight = Float[Array, "out in"] | Matrix


def linear(
    x: Float[Array, "T in"],
    weight: Weight,
    tokens: TokenContext | None = None,
    *,
    norm: Norm | None = None,
    bias: Float[Array, " out"] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Float[Array, "T outputs"] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    axis: MeshAxes | None = None,
    num_live: Int[Array, ""] | None = None,
    adapters: TokenAdapters | None = None,
) -> Float[Array, "T outputs"]:
    """Return `activation(norm(x) @ weight.T + bias) + residual`, accumulated in float32; see `LinearContext`.

    In layers, `tokens` has `num_live` and `adapters`.
    """
    if tokens is not None:
        num_live, adapters = tokens.num_live, tokens.adapters
    context = LinearContext(adapters, norm, None, bias, activation, residual, dtype or x.dtype, axis, num_live=num_live)
    return as_matrix(weight).linear(x, context)


def embed(
    token_ids: Int[Array, " T"],
    table: Weight,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    axis: MeshAxes | None = None,
    adapters: TokenAdapters | None = None,
) -> Float[Array, "T D"]:
    """Look up token embeddings; ids are clipped to the vocabulary.

    Args:
        token_ids: token ids.
        table: embedding.
        dtype: result dtype; None for the embedding's dtype.
        axis: mesh axes that divide the rows evenly, in order; the devices' look-ups are summed.
        adapters: the tokens' adapters.
    """
    matrix = as_matrix(table)
    if axis is None:
        rows = matrix.look_up(token_ids, adapters)
        return rows.astype(dtype or rows.dtype)
    num_rows = matrix.shape[0]
    local_ids = token_ids - lax.axis_index(axis) * num_rows
    is_local = (local_ids >= 0) & (local_ids < num_rows)
    found = embed(local_ids, table, dtype=dtype, adapters=adapters)
    return lax.psum(jnp.where(is_local[:, None], found, 0), axis)


def _group_tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the rows per tile of a grouped matmul: a power of two near the mean group size, from 8 to 512."""
    mean = 1 << max(0, num_rows // num_groups - 1).bit_length()
    return min(num_rows, max(_MIN_TILE, min(mean, _MAX_TILE)))


def at_layer(stack: Float[Array, "layers out in"] | Matrix, layer: Int[Array, ""]) -> Matrix:
    """Return one layer's matrix in a stack, which kernels read in place."""
    return stack.at_layer(layer) if isinstance(stack, Matrix) else StackedMatrix(stack, layer)


def as_matrix(weight: Weight) -> Matrix:
    """Return a weight as a matrix; parameter trees have float weights as bare arrays."""
    return weight if isinstance(weight, Matrix) else FloatMatrix(weight)
