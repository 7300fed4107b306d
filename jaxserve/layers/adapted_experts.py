"""LoRA adapters of routed experts: grouped matmuls over pairs (adapter, expert)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.adapters import if_adapted
from jaxserve.layers.linear import (
    LinearContext,
    SortedGroups,
    StackedMatrix,
    WrappedMatrix,
    as_matrix,
    at_layer,
    row_groups,
)
from jaxserve.layers.token_context import TokenAdapters
from jaxserve.pallas_kernels.packed_linear import LowRankTerms, multiply_low_rank


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@dataclass(frozen=True)
class ExpertFactors(ABC):
    """S adapters' factors for E experts' matrices, whose outputs have P parts.

    Attributes:
        a: first factors of all parts, by adapter and expert.
        b: second factors by part, each by adapter and expert; for native kernels one array of all parts.
        part_sizes: outputs per part.
        num_experts: experts, E.
    """

    a: Any
    b: tuple[Any, ...]
    part_sizes: tuple[int, ...] = field(metadata={"static": True})
    num_experts: int = field(metadata={"static": True})

    def adapted(self, matrix: Any) -> AdaptedExperts:
        """Return the experts' matrices with these adapters."""
        return AdaptedExperts(matrix, self)

    @abstractmethod
    def added_to(
        self, y: Float[Array, "M out"], x: Float[Array, "M in"], group_sizes: Int[Array, " E"], adapters: TokenAdapters
    ) -> Float[Array, "M out"]:
        """Return outputs y, of rows sorted by expert, with adapted rows' terms for inputs x."""

    def packed(self, adapters: TokenAdapters) -> LowRankTerms | None:
        """Return the rows' terms for native kernels; None if the factors are not packed."""
        return None

    @abstractmethod
    def at_layer(self, layer: Int[Array, ""]) -> ExpertFactors:
        """Return one layer's factors in a stack."""

    def _pairs(self, num_rows: int, group_sizes: Int[Array, " E"], adapters: TokenAdapters) -> Int[Array, " M"]:
        """Return each row's index among pairs (adapter, expert); the number of pairs if it is not adapted."""
        expert = row_groups(group_sizes, num_rows)
        is_adapted = adapters.is_adapted & (expert < self.num_experts)
        pair = adapters.index * self.num_experts + expert
        return jnp.where(is_adapted, pair, adapters.num_slots * self.num_experts)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatExpertFactors(ExpertFactors):
    """Factors in float arrays: `a` [S * E * P * rank, in], each `b` [S * E * out, rank]."""

    def added_to(
        self, y: Float[Array, "M out"], x: Float[Array, "M in"], group_sizes: Int[Array, " E"], adapters: TokenAdapters
    ) -> Float[Array, "M out"]:
        """Return outputs y with adapted rows' terms: grouped matmuls of rows sorted by adapter and expert."""

        def added() -> Float[Array, "M out"]:
            num_pairs = adapters.num_slots * self.num_experts
            rows = SortedGroups.sort(self._pairs(len(x), group_sizes, adapters), num_pairs)
            inner = as_matrix(self.a).multiply_groups(x[rows.order], rows.sizes, LinearContext())
            firsts = jnp.split(inner.astype(x.dtype), len(self.b), axis=1)
            seconds = zip(firsts, self.b, strict=True)
            outputs = [as_matrix(b).multiply_groups(first, rows.sizes, LinearContext()) for first, b in seconds]
            values = jnp.concatenate(outputs, axis=1)[rows.position]
            return jnp.where(adapters.is_adapted[:, None], y + values, y)

        return if_adapted(adapters, added, lambda: y)

    def at_layer(self, layer: Int[Array, ""]) -> FloatExpertFactors:
        """Return one layer's factors, which the grouped matmul reads in place."""
        a, *b = (StackedMatrix(stack, layer) for stack in (self.a, *self.b))
        return FloatExpertFactors(a, tuple(b), self.part_sizes, self.num_experts)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeExpertFactors(ExpertFactors):
    """Factors packed for the native CPU kernels, which add the terms of adapted rows; `b` has all parts."""

    def packed(self, adapters: TokenAdapters) -> LowRankTerms:
        """Return the rows' terms for native kernels."""
        return LowRankTerms(adapters.slot, self.a, self.b[0], self.part_sizes)

    def added_to(
        self, y: Float[Array, "M out"], x: Float[Array, "M in"], group_sizes: Int[Array, " E"], adapters: TokenAdapters
    ) -> Float[Array, "M out"]:
        """Return outputs y, of matrices that XLA multiplies, with adapted rows' terms."""
        num_pairs = adapters.num_slots * self.num_experts
        pairs = self._pairs(len(x), group_sizes, adapters)
        terms = replace(self.packed(adapters), slots=jnp.where(pairs < num_pairs, 1 + pairs, 0))
        values = multiply_low_rank(terms, x, num_pairs)
        return jnp.where(adapters.is_adapted[:, None], y + values, y)

    def at_layer(self, layer: Int[Array, ""]) -> NativeExpertFactors:
        """Return one layer's factors."""
        raise NotImplementedError("layers of native matrices are not stacked")


class ExpertTerm(NamedTuple):
    """Terms of adapted rows, sorted by expert; see `linear.Term`.

    Attributes:
        factors: all adapters' factors.
        group_sizes: rows by expert.
        adapters: the rows' adapters.
    """

    factors: ExpertFactors
    group_sizes: Int[Array, " E"]
    adapters: TokenAdapters

    def added_to(self, y: Float[Array, "M out"], x: Float[Array, "M in"]) -> Float[Array, "M out"]:
        """Return outputs y with the terms for inputs x."""
        return self.factors.added_to(y, x, self.group_sizes, self.adapters)

    def packed(self) -> LowRankTerms | None:
        """Return the terms for native kernels; None if the factors are not packed."""
        return self.factors.packed(self.adapters)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedExperts(WrappedMatrix):
    """Experts' matrices whose outputs gain the rows' adapter terms, before the activation.

    Attributes:
        factors: all adapters' factors.
    """

    factors: ExpertFactors

    def linear_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " E"], context: LinearContext
    ) -> Float[Array, "M outputs"]:
        """Compute the linear layers, whose rows have their tokens' adapters."""
        assert context.adapters is not None, "tokens have adapters if matrices do"
        term = ExpertTerm(self.factors, group_sizes, context.adapters)
        return as_matrix(self.matrix).linear_groups(x, group_sizes, context._replace(term=term))

    def at_layer(self, layer: Int[Array, ""]) -> AdaptedExperts:
        """Return one layer's experts in this stack."""
        return AdaptedExperts(at_layer(self.matrix, layer), self.factors.at_layer(layer))
