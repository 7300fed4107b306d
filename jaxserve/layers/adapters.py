"""LoRA adapters in the forward pass: low-rank terms that tokens add to matmul outputs.

A matrix's adapters are stacked by adapter slot, so that tokens with different adapters share a step. Adapter 0 is the
base model, which has no entry in the stacks: its tokens' outputs are selected, bit-identical to outputs without
adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.layers.linear import LinearContext, SortedGroups, StackedMatrix, Weight, WrappedMatrix, as_matrix
from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.token_context import TokenAdapters
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS, LowRankTerms, PackedMatrix, multiply_low_rank
from jaxserve.pallas_kernels.ragged_paged_attention import HeadTerms
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
        b: second factors by part, each by adapter; for native kernels one array of all parts.
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

    def packed(self, adapters: TokenAdapters) -> LowRankTerms | None:
        """Return the tokens' terms for native kernels; None if the factors are not packed."""
        return None

    @abstractmethod
    def added_to(
        self, y: Float[Array, "T out"], x: Float[Array, "T in"], adapters: TokenAdapters
    ) -> Float[Array, "T out"]:
        """Return outputs y with adapted tokens' terms for inputs x."""

    def table_rows(
        self, rows: Float[Array, "T D"], ids: Int[Array, " T"], adapters: TokenAdapters
    ) -> Float[Array, "T D"]:
        """Return an embedding's rows `ids` with adapted tokens' terms."""

        def added() -> Float[Array, "T D"]:
            first = adapters.index * (len(self.a) // adapters.num_slots)
            values = self._expanded(StoredRows(self.a).take(first + ids), adapters)
            return self._with_vectors(rows, values, adapters).astype(rows.dtype)

        return if_adapted(adapters, added, lambda: rows)

    @abstractmethod
    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return inner vectors, for one part, multiplied by the second factors; arbitrary values for other tokens."""

    def by_head(self, adapters: TokenAdapters, num_heads: int) -> HeadTerms:
        """Return the tokens' terms for matrices with rows by head; see `HeadTerms`."""
        raise NotImplementedError(f"{type(self).__name__} has no terms by head")

    @abstractmethod
    def unpacked_table(self) -> tuple[Float[Array, "V rank"], Float[Array, "D rank"]]:
        """Return both factors of an embedding in float32, with one adapter."""

    @abstractmethod
    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part in float32, for a matrix with one adapter."""

    def _with_vectors(
        self, y: Float[Array, "T out"], values: Float[Array, "T out"], adapters: TokenAdapters
    ) -> Float[Array, "T out"]:
        """Return outputs y with adapted tokens' values and vectors; others keep all bits, such as a zero's sign."""
        total = y + values
        if self.bias is not None:
            total += self.bias.at[adapters.index].get(mode="clip")
        if self.scale is not None:
            total *= self.scale.at[adapters.index].get(mode="clip")
        return jnp.where(adapters.is_adapted[:, None], total, y)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatFactors(Factors):
    """Factors in float arrays: `a` [S * P * rank, in], each `b` [S * rank, out].

    All tokens are multiplied by all first factors, which is one matmul, and keep only their adapters' results.
    """

    def added_to(
        self, y: Float[Array, "T out"], x: Float[Array, "T in"], adapters: TokenAdapters
    ) -> Float[Array, "T out"]:
        """Return outputs y with adapted tokens' terms; see `Factors.added_to`."""

        def added() -> Float[Array, "T out"]:
            inner = as_matrix(self.a).multiply(x.astype(self.a.dtype), LinearContext())
            values = self._own(inner.reshape(len(x), adapters.num_slots, len(self.b), -1), adapters)
            return self._with_vectors(y, values, adapters)

        return if_adapted(adapters, added, lambda: y)

    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        rank = len(self.b[0]) // adapters.num_slots  # rows of the table may have padding
        return self._own(inner[:, None, None, :rank], adapters)

    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part; see `Factors.unpacked`."""
        firsts = jnp.split(self.a.astype(jnp.float32), len(self.b))
        return [(a, b.T.astype(jnp.float32)) for a, b in zip(firsts, self.b, strict=True)]

    def unpacked_table(self) -> tuple[Float[Array, "V rank"], Float[Array, "D rank"]]:
        """Return both factors of an embedding; see `Factors.unpacked_table`."""
        [b] = self.b
        return self.a[:, : len(b)].astype(jnp.float32), b.T.astype(jnp.float32)

    def by_head(self, adapters: TokenAdapters, num_heads: int) -> HeadTerms:
        """Return the tokens' terms for matrices with rows by head; see `Factors.by_head`."""
        num_slots, [b] = adapters.num_slots, self.b
        is_own = adapters.slot[:, None] == 1 + jnp.arange(num_slots, dtype=jnp.int32)[None]
        a = self.a.reshape(num_slots, -1, self.a.shape[-1])
        return HeadTerms(is_own, a, b.reshape(*a.shape[:2], num_heads, -1))

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
    """Factors packed for the native CPU kernels: a matrix [P * rank, in], and one [out, rank] of all parts.

    The kernel that multiplies by the model's matrix adds the terms of adapted tokens to its sums: see `LowRankTerms`.

    Attributes:
        part_sizes: outputs per part.
    """

    part_sizes: tuple[int, ...] = field(metadata={"static": True})

    def packed(self, adapters: TokenAdapters) -> LowRankTerms:
        """Return the tokens' terms for native kernels."""
        return LowRankTerms(adapters.slot, self.a, self.b[0], self.part_sizes, self.bias, self.scale)

    def added_to(
        self, y: Float[Array, "T out"], x: Float[Array, "T in"], adapters: TokenAdapters
    ) -> Float[Array, "T out"]:
        """Return outputs y, of a matrix that XLA multiplies, with adapted tokens' terms."""
        terms = replace(self.packed(adapters), shift=None, factor=None)
        return self._with_vectors(y, multiply_low_rank(terms, x, adapters.num_slots), adapters)

    def _expanded(self, inner: Float[Array, "T rank"], adapters: TokenAdapters) -> Float[Array, "T out"]:
        [size] = self.part_sizes
        return multiply_own(inner.astype(jnp.float32), self.b[0], size, adapters)

    def unpacked(self) -> list[tuple[Float[Array, "rank in"], Float[Array, "out rank"]]]:
        """Return both factors of each part; see `Factors.unpacked`."""
        [b], ends = self.b, np.cumsum(self.part_sizes)[:-1]
        firsts, seconds = _dense(self.a, len(self.a) * PANEL_ROWS), _dense(b, sum(self.part_sizes))
        return list(zip(jnp.split(firsts, len(self.part_sizes)), jnp.split(seconds, ends), strict=True))

    def unpacked_table(self) -> tuple[Float[Array, "V rank"], Float[Array, "D rank"]]:
        """Return both factors of an embedding; see `Factors.unpacked_table`."""
        [b], [size] = self.b, self.part_sizes
        return self.a[:, : b.shape[1]].astype(jnp.float32), _dense(b, size)


def _dense(panels: Shaped[Array, "..."], num_rows: int) -> Float[Array, "out in"]:
    """Return a packed matrix's rows in float32."""
    packed = packed_matrix(panels, num_rows, panels.shape[1]).packed
    return packed_linear.unpack(packed).weight.astype(jnp.float32)


def multiply_own(
    x: Float[Array, "T in"], panels: Shaped[Array, "..."], num_outputs: int, adapters: TokenAdapters
) -> Float[Array, "T out"]:
    """Multiply adapted tokens by their adapters' packed matrices [out, in]; arbitrary outputs for the others."""
    rows, matrices = sorted_by_adapter(adapters), packed_matrix(panels, num_outputs, x.shape[1], adapters.num_slots)
    return matrices.multiply_groups(x[rows.order], rows.sizes, LinearContext())[rows.position]


def sorted_by_adapter(adapters: TokenAdapters) -> SortedGroups:
    """Sort tokens by adapter; those of the base model, in no group, come last."""
    return SortedGroups.sort(jnp.where(adapters.is_adapted, adapters.index, adapters.num_slots), adapters.num_slots)


def packed_matrix(panels: Shaped[Array, "..."], num_rows: int, num_inputs: int, num_matrices: int = 1) -> NativeMatrix:
    """Return matrices [num_rows, num_inputs], one after another in panels of floats."""
    num_panels, _, parts, lanes = panels.shape
    none = jnp.zeros((num_panels, 0, parts, lanes), jnp.float32)
    return NativeMatrix(
        PackedMatrix(panels, none, none, num_rows // parts, num_inputs, num_matrices, panels.dtype.name)
    )


class AdapterTerm(NamedTuple):
    """Terms of adapted tokens for one matrix; see `linear.Term`.

    Attributes:
        factors: all adapters' factors.
        adapters: the tokens' adapters.
    """

    factors: Factors
    adapters: TokenAdapters

    def added_to(self, y: Float[Array, "T out"], x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """Return outputs y with the terms for inputs x."""
        return self.factors.added_to(y, x, self.adapters)

    def packed(self) -> LowRankTerms | None:
        """Return the terms for native kernels; None if the factors are not packed."""
        return self.factors.packed(self.adapters)


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
        return as_matrix(self.matrix).linear(x, context._replace(term=self._term(context)))

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms."""
        return as_matrix(self.matrix).multiply_with_term(x, context._replace(term=self._term(context)))

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Any, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms, for one matrix in a stack."""
        return self._term(context).added_to(StackedMatrix(stack.matrix, layer).multiply(x, context), x)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return an embedding's rows with adapted tokens' terms."""
        assert adapters is not None, "tokens have adapters if the embedding has"
        return self.factors.table_rows(super().look_up(ids, adapters), ids, adapters)

    def _term(self, context: LinearContext) -> AdapterTerm:
        """Return the tokens' terms."""
        return AdapterTerm(self.factors, context_adapters(context))


def context_adapters(context: LinearContext) -> TokenAdapters:
    """Return the adapters for a linear layer's tokens."""
    assert context.adapters is not None, "tokens have adapters if matrices do"
    return context.adapters


def if_adapted(
    adapters: TokenAdapters, adapted: Callable[[], Array], plain: Callable[[], Array]
) -> Float[Array, "T out"]:
    """Call and return `adapted` if any token has an adapter, otherwise `plain`; see `on_condition`."""
    return on_condition(adapters.has_adapted, adapted, plain)


def on_condition(
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
