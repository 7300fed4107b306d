"""LoRA adapters in the forward pass: low-rank terms that tokens add to matmul outputs.

A matrix's adapters are stacked by adapter slot, so that tokens with different adapters share a step. Adapter 0 is the
base model, which has no entry in the stacks: its tokens' outputs are selected, bit-identical to outputs without
adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.layers.linear import LinearContext, StackedMatrix, TokenTerm, Weight, WrappedMatrix, as_matrix
from jaxserve.layers.norm import Norm, rms_norm
from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.token_context import TokenAdapters
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS, PackedMatrix
from jaxserve.pallas_kernels.target import target_platform

RANK_GRAIN = PANEL_ROWS  # stacks have ranks that are multiples of this


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@dataclass(frozen=True)
class Factors(ABC):
    """S adapters' factors for a matrix whose output has P parts, each with its own factors.

    All factors have the same rank; smaller ones are padded by zeros. An embedding has one part, and its first factors
    are tables [S * V, rank].

    Attributes:
        a: all parts' first factors, by adapter.
        b: second factors by part, each by adapter.
        bias: further terms, by adapter [S, out]; None without them.
        scale: factors on the sum of output and terms, likewise. A slot's new arrays have norms in it instead, which
            the sum's matrix shall have by row, NaN for factors of 1; see `models.adapter_norms`.
    """

    a: Shaped[Array, "..."]
    b: tuple[Shaped[Array, "..."], ...]
    bias: Float[Array, "S out"] | None
    scale: Float[Array, "S out"] | None

    def adapted(self, matrix: Weight) -> AdaptedMatrix:
        """Return the matrix with these adapters."""
        return AdaptedMatrix(matrix, self)

    def term(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> TokenTerm:
        """Return adapted tokens' terms for a matrix.

        Args:
            x: inputs.
            norm: norm applied to them; None for no norm.
            adapters: the tokens' adapters.
        """
        return self._term(self._products(x, norm, adapters), adapters)

    def table_term(self, ids: Int[Array, " T"], adapters: TokenAdapters) -> TokenTerm:
        """Return adapted tokens' terms for an embedding's rows `ids`."""
        first = adapters.index * (len(self.a) // adapters.num_slots)
        return self._term(self._expanded(StoredRows(self.a).take(first + ids), adapters), adapters)

    @abstractmethod
    def _products(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return adapted tokens' inputs multiplied by both factors, in float32; arbitrary values for the others."""

    @abstractmethod
    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return adapted tokens' inner vectors, for one part, multiplied by the second factors, likewise."""

    @abstractmethod
    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part in float32, for a matrix with one adapter."""

    def _term(self, values: Float[Array, "T out"], adapters: TokenAdapters) -> TokenTerm:
        """Return the term with these values, and with the adapters' vectors."""
        if self.bias is not None:
            values += self.bias.at[adapters.index].get(mode="clip")
        scale = None if self.scale is None else self.scale.at[adapters.index].get(mode="clip")
        return TokenTerm(values, adapters, scale)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatFactors(Factors):
    """Factors in float arrays: `a` [S * P * rank, in], each `b` [S * rank, out].

    All tokens are multiplied by all first factors, which is one matmul, and keep only their adapters' results.
    """

    def _products(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        x = norm(x) if norm else x
        inner = as_matrix(self.a).multiply(x.astype(self.a.dtype), LinearContext())
        return self._own(inner.reshape(len(x), adapters.num_slots, len(self.b), -1), adapters)

    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        rank = len(self.b[0]) // adapters.num_slots  # rows of the table may have padding
        return self._own(inner[:, None, None, :rank], adapters)

    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part; see `Factors.unpacked`."""
        firsts = jnp.split(self.a.astype(jnp.float32), len(self.b))
        return [(a, b.T.astype(jnp.float32)) for a, b in zip(firsts, self.b, strict=True)]

    def _own(self, inner: Float[Array, "T slots P r"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Multiply inner vectors by the second factors, with zeros for all slots but a token's own."""
        is_own = adapters.slot[:, None] == 1 + jnp.arange(adapters.num_slots, dtype=jnp.int32)[None]
        kept = jnp.where(is_own[:, :, None, None], inner, 0).astype(self.a.dtype)
        precision = lax.Precision.HIGHEST if self.a.dtype == jnp.float32 else None
        outputs = [
            jnp.dot(
                kept[:, :, part].reshape(len(inner), -1), b, precision=precision, preferred_element_type=jnp.float32
            )
            for part, b in enumerate(self.b)
        ]
        return jnp.concatenate(outputs, axis=1)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeFactors(Factors):
    """Factors packed for the native CPU kernels, in 16-row panels: a matrix [P * rank, in], and each [out, rank].

    Tokens are sorted by adapter, and each is multiplied only by its own adapter's factors.

    Attributes:
        part_sizes: outputs per part.
    """

    part_sizes: tuple[int, ...] = field(metadata={"static": True})

    def _products(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        P, r = len(self.b), self.b[0].shape[1]
        x = _normed_alike(x, norm) if norm else x
        inner = multiply_packed(x[adapters.order], self.a, P * r, adapters)
        outputs = [
            multiply_packed(inner[:, part * r : (part + 1) * r], b, size, adapters)
            for part, (b, size) in enumerate(zip(self.b, self.part_sizes, strict=True))
        ]
        return jnp.concatenate(outputs, axis=1)[adapters.rank_of]

    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        (b,), (size,) = self.b, self.part_sizes
        return multiply_packed(inner[adapters.order].astype(jnp.float32), b, size, adapters)[adapters.rank_of]

    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part; see `Factors.unpacked`."""

        def rows(panels: Shaped[Array, "panels columns 1 lanes"]) -> Float[Array, "rows columns"]:
            return jnp.swapaxes(panels[:, :, 0], 1, 2).reshape(-1, panels.shape[1]).astype(jnp.float32)

        firsts = jnp.split(rows(self.a), len(self.b))
        both = zip(firsts, self.b, self.part_sizes, strict=True)
        return [(a, rows(b)[:size]) for a, b, size in both]


def multiply_packed(
    x: Float[Array, "T in"], panels: Shaped[Array, "..."], num_outputs: int, adapters: TokenAdapters
) -> Float[Array, "T out"]:
    """Multiply tokens, sorted by adapter, by their adapters' packed matrices [out, in]."""
    matrices = packed_matrix(panels, num_outputs, x.shape[1], adapters.num_slots)
    return matrices.multiply_groups(x, adapters.group_sizes, LinearContext())


def packed_matrix(panels: Shaped[Array, "..."], num_outputs: int, num_inputs: int, num_matrices: int) -> NativeMatrix:
    """Return matrices [num_outputs, num_inputs], one after another in panels of floats."""
    none = jnp.zeros((len(panels), 0, 1, PANEL_ROWS), jnp.float32)
    return NativeMatrix(PackedMatrix(panels, none, none, num_outputs, num_inputs, num_matrices, panels.dtype.name))


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedMatrix(WrappedMatrix):
    """A matrix whose outputs gain the tokens' adapter terms, before the sum over devices and the activation.

    Attributes:
        factors: all adapters' factors.
    """

    factors: Factors

    def linear(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Compute the linear layer; the matrix's own fused kernel takes the terms."""
        base, adapters = as_matrix(self.matrix), _adapters(context)

        def adapted() -> Float[Array, "T outputs"]:
            return base.linear(x, context._replace(term=self.factors.term(x, context.norm, adapters)))

        return if_adapted(adapters, adapted, lambda: base.linear(x, context))

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms."""
        return self._with_terms(super().multiply(x, context), x, context)

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Any, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms, for one matrix in a stack."""
        return self._with_terms(StackedMatrix(stack.matrix, layer).multiply(x, context), x, context)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return an embedding's rows with adapted tokens' terms."""
        assert adapters is not None, "tokens have adapters if the embedding has"
        rows = super().look_up(ids, adapters)

        def added() -> Float[Array, "T in"]:
            return self.factors.table_term(ids, adapters).added_to(rows).astype(rows.dtype)

        return if_adapted(adapters, added, lambda: rows)

    def _with_terms(
        self, y: Float[Array, "T out"], x: Float[Array, "T in"], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return y with adapted tokens' terms."""
        adapters = _adapters(context)
        return if_adapted(adapters, lambda: self.factors.term(x, None, adapters).added_to(y), lambda: y)


@no_type_check
@dataclass(frozen=True)
class WholeMatrices(ABC):
    """S adapters' matrices in place of the model's.

    Attributes:
        stack: matrices, by adapter; arbitrary for adapters without one.
        is_given: mask of adapters that have one.
    """

    stack: Shaped[Array, "..."]
    is_given: Bool[Array, " S"]

    @abstractmethod
    def multiply(self, x: Float[Array, "T in"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Multiply adapted tokens by their adapters' matrices, in float32; arbitrary outputs for the others."""

    def rows(self, ids: Int[Array, " T"], adapters: TokenAdapters) -> Float[Array, "T in"]:
        """Return the rows `ids` of the tokens' adapters' matrices, which must be in a float array."""
        first = adapters.index * (len(self.stack) // adapters.num_slots)
        return StoredRows(self.stack).take(first + ids)

    def is_replaced(self, adapters: TokenAdapters) -> Bool[Array, " T"]:
        """Return the mask of tokens whose adapters have a matrix."""
        return adapters.is_adapted & self.is_given.at[adapters.index].get(mode="clip")


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatMatrices(WholeMatrices):
    """Matrices in a float array [S * out, in]."""

    def multiply(self, x: Float[Array, "T in"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Compute one grouped matmul; see `WholeMatrices.multiply`."""
        rows = x[adapters.order].astype(self.stack.dtype)
        return as_matrix(self.stack).multiply_groups(rows, adapters.group_sizes, LinearContext())[adapters.rank_of]


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeMatrices(WholeMatrices):
    """Matrices packed for the native CPU kernels, in 16-row panels.

    Attributes:
        num_outputs: outputs of each matrix.
    """

    num_outputs: int = field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T in"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Compute one grouped matmul; see `WholeMatrices.multiply`."""
        return multiply_packed(x[adapters.order], self.stack, self.num_outputs, adapters)[adapters.rank_of]


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplacedMatrix(WrappedMatrix):
    """A matrix outside the layers in whose place some adapters have their own.

    Attributes:
        own: the adapters' matrices.
    """

    own: WholeMatrices

    def linear(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Compute the linear layer."""
        assert context.norm is None, "the head's inputs are normed"
        adapters, y = _adapters(context), as_matrix(self.matrix).linear(x, context)
        is_replaced = self.own.is_replaced(adapters)

        def replaced() -> Float[Array, "T outputs"]:
            own = context.finish(context.reduce(self.own.multiply(x, adapters).astype(context.dtype)))
            return jnp.where(is_replaced[:, None], own, y)

        return _on_condition(jnp.any(is_replaced), replaced, lambda: y)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return rows of the embedding."""
        assert adapters is not None, "tokens have adapters if the embedding has"
        rows = super().look_up(ids, adapters)
        own = self.own.rows(ids, adapters).astype(rows.dtype)
        return jnp.where(self.own.is_replaced(adapters)[:, None], own, rows)


def _normed_alike(x: Float[Array, "T in"], norm: Norm) -> Float[Array, "T in"]:
    """Return x normed, with the same bits whatever the number of tokens is.

    XLA's order of additions depends on the number of rows; the native kernels' order does not.
    """
    if norm.function is not rms_norm:
        return norm(x)
    x32, size = x.astype(jnp.float32), x.shape[1]
    ones = jnp.zeros((1, size, 1, PANEL_ROWS), jnp.float32).at[..., 0].set(1.0)
    none = jnp.zeros((1, 0, 1, PANEL_ROWS), jnp.float32)
    sums = NativeMatrix(PackedMatrix(ones, none, none, 1, size)).multiply(jnp.square(x32), LinearContext())
    assert not isinstance(norm.weight, Mapping), "RMS norms have no bias"
    return (x32 * lax.rsqrt(sums / size + norm.eps)).astype(x.dtype) * norm.weight[None]


def _adapters(context: LinearContext) -> TokenAdapters:
    """Return the adapters for a linear layer's tokens."""
    assert context.adapters is not None, "tokens have adapters if matrices do"
    return context.adapters


def if_adapted(
    adapters: TokenAdapters, adapted: Callable[[], Array], plain: Callable[[], Array]
) -> Float[Array, "T out"]:
    """Call and return `adapted` if any token has an adapter, otherwise `plain`; see `_on_condition`."""
    return _on_condition(adapters.has_adapted, adapted, plain)


def _on_condition(
    condition: Bool[Array, ""], adapted: Callable[[], Array], plain: Callable[[], Array]
) -> Float[Array, "T out"]:
    """Call and return `adapted` if the condition holds, otherwise `plain`.

    Only CPUs branch: the terms cost accelerators little next to the matrix, and a branch would cost them more.
    """
    if target_platform() != "cpu":
        return adapted()
    return lax.cond(condition, adapted, plain)


def write_slot(stacks: Any, slot: Int[Array, ""], new: Any, *, axis: int = 0) -> Any:
    """Return donated stacks with one adapter's factors written to a slot, counted from 0.

    Args:
        stacks: tree with `Factors`.
        slot: index in the stacks.
        new: the same tree with one adapter's arrays.
        axis: array axis along which adapters are stacked.
    """

    def write(stack: Array, own: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(stack, own, slot * own.shape[axis], axis)

    return jax.tree.map(write, stacks, new)
