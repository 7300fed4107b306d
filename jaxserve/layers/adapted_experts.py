"""LoRA adapters of routed experts: grouped matmuls over pairs (adapter, expert)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.layers.adapters import if_adapted, packed_matrix
from jaxserve.layers.linear import (
    LinearContext,
    Matrix,
    SortedGroups,
    StackedMatrix,
    TokenTerm,
    WrappedMatrix,
    as_matrix,
    at_layer,
    row_groups,
)


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@dataclass(frozen=True)
class ExpertFactors(ABC):
    """S adapters' factors for E experts' matrices, whose outputs have P parts.

    Attributes:
        a: first factors of all parts, by adapter and expert.
        b: second factors by part, each by adapter and expert.
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

    def products(self, x: Float[Array, "M in"], sizes: Int[Array, " G"]) -> Float[Array, "M out"]:
        """Return rows, sorted by adapter and expert, multiplied by both factors, in float32."""
        inner = self._matrix(self.a, None, x.shape[1], sizes.size).multiply_groups(x, sizes, LinearContext())
        firsts, both = jnp.split(inner, len(self.b), axis=1), zip(self.b, self.part_sizes, strict=True)
        outputs = [
            self._matrix(b, size, first.shape[1], sizes.size).multiply_groups(
                first.astype(x.dtype), sizes, LinearContext()
            )
            for first, (b, size) in zip(firsts, both, strict=True)
        ]
        return jnp.concatenate(outputs, axis=1)

    @abstractmethod
    def _matrix(self, stored: Any, num_outputs: int | None, num_inputs: int, num_groups: int) -> Matrix:
        """Return stored factors as matrices, one after another; None for first factors' outputs."""

    @abstractmethod
    def at_layer(self, layer: Int[Array, ""]) -> ExpertFactors:
        """Return one layer's factors in a stack."""


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatExpertFactors(ExpertFactors):
    """Factors in float arrays: `a` [S * E * P * rank, in], each `b` [S * E * out, rank]."""

    def _matrix(self, stored: Any, num_outputs: int | None, num_inputs: int, num_groups: int) -> Matrix:
        return as_matrix(stored)

    def at_layer(self, layer: Int[Array, ""]) -> FloatExpertFactors:
        """Return one layer's factors, which the grouped matmul reads in place."""
        a, *b = (StackedMatrix(stack, layer) for stack in (self.a, *self.b))
        return FloatExpertFactors(a, tuple(b), self.part_sizes, self.num_experts)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeExpertFactors(ExpertFactors):
    """Factors packed for the native CPU kernels, in 16-row panels."""

    def _matrix(
        self, stored: Shaped[Array, "..."], num_outputs: int | None, num_inputs: int, num_groups: int
    ) -> Matrix:
        num_rows = stored.shape[0] * stored.shape[-1] // num_groups
        return packed_matrix(stored, num_rows if num_outputs is None else num_outputs, num_inputs, num_groups)

    def at_layer(self, layer: Int[Array, ""]) -> NativeExpertFactors:
        """Return one layer's factors."""
        raise NotImplementedError("layers of native matrices are not stacked")


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
        base, adapters, num_experts = as_matrix(self.matrix), context.adapters, self.factors.num_experts
        assert adapters is not None, "tokens have adapters if matrices do"

        def adapted() -> Float[Array, "M outputs"]:
            num_pairs, expert = adapters.num_slots * num_experts, row_groups(group_sizes, len(x))
            is_adapted = adapters.is_adapted & (expert < num_experts)
            pairs = SortedGroups.sort(
                jnp.where(is_adapted, adapters.index * num_experts + expert, num_pairs), num_pairs
            )
            values = self.factors.products(x[pairs.order], pairs.sizes)[pairs.position]
            return base.linear_groups(x, group_sizes, context._replace(term=TokenTerm(values, adapters)))

        return if_adapted(adapters, adapted, lambda: base.linear_groups(x, group_sizes, context))

    def at_layer(self, layer: Int[Array, ""]) -> AdaptedExperts:
        """Return one layer's experts in this stack."""
        return AdaptedExperts(at_layer(self.matrix, layer), self.factors.at_layer(layer))
