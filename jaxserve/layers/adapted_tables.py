"""Embeddings and output projections that LoRA adapters replace, whole or for some tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.layers.adapters import context_adapters, if_adapted, multiply_own, on_condition, sorted_by_adapter
from jaxserve.layers.linear import LinearContext, WrappedMatrix, as_matrix
from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.token_context import TokenAdapters


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
        groups = sorted_by_adapter(adapters)
        rows = x[groups.order].astype(self.stack.dtype)
        return as_matrix(self.stack).multiply_groups(rows, groups.sizes, LinearContext())[groups.position]


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
        return multiply_own(x, self.stack, self.num_outputs, adapters)


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
        adapters, y = context_adapters(context), as_matrix(self.matrix).linear(x, context)
        is_replaced = self.own.is_replaced(adapters)

        def replaced() -> Float[Array, "T outputs"]:
            own = context.finish(context.reduce(self.own.multiply(x, adapters).astype(context.dtype)))
            return jnp.where(is_replaced[:, None], own, y)

        return on_condition(jnp.any(is_replaced), replaced, lambda: y)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return rows of the embedding."""
        assert adapters is not None, "tokens have adapters if the embedding has"
        rows = super().look_up(ids, adapters)
        own = self.own.rows(ids, adapters).astype(rows.dtype)
        return jnp.where(self.own.is_replaced(adapters)[:, None], own, rows)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRows:
    """S adapters' rows for a few tokens each, which replace the model's (PEFT's trainable tokens).

    Attributes:
        rows: rows [S * N, in], by adapter.
        ids: their indices in the device's matrix; -1 for rows that are not in use.
    """

    rows: Float[Array, "SN in"]
    ids: Int[Array, "S N"]

    def own_ids(self, adapters: TokenAdapters) -> Int[Array, "T N"]:
        """Return the indices in which each token's adapter has rows; -1 for unused rows and the base model."""
        return jnp.where(adapters.is_adapted[:, None], self.ids.at[adapters.index].get(mode="clip"), -1)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RetokenizedMatrix(WrappedMatrix):
    """A matrix outside the layers with a row per token. Some adapters replace a few rows.

    Attributes:
        own: the adapters' rows.
    """

    own: TokenRows

    def linear(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Compute the linear layer; an adapter's term is on top of its rows."""
        assert context.norm is None, "the head's inputs are normed"
        assert context.axis is None, "the head is not split by columns"
        adapters, plain = context_adapters(context), context._replace(term=None)
        y = as_matrix(self.matrix).linear(x, plain)
        ids = self.own.own_ids(adapters)

        def replaced() -> Float[Array, "T outputs"]:
            groups = sorted_by_adapter(adapters)
            inputs = x[groups.order].astype(self.own.rows.dtype)
            values = as_matrix(self.own.rows).multiply_groups(inputs, groups.sizes, LinearContext())[groups.position]
            if context.bias is not None:
                values += context.bias.astype(values.dtype).at[ids].get(mode="clip")
            # An index of -1 would be the last column.
            columns = jnp.where(ids < 0, y.shape[1], ids)
            return y.at[jnp.arange(len(x))[:, None], columns].set(values.astype(y.dtype), mode="drop")

        y = on_condition(jnp.any(ids >= 0), replaced, lambda: y)
        return y if context.term is None else context.term.added_to(y, x).astype(y.dtype)

    def look_up(self, ids: Int[Array, " T"], adapters: TokenAdapters | None) -> Float[Array, "T in"]:
        """Return rows of the embedding."""
        assert adapters is not None, "tokens have adapters if the embedding has"
        rows = super().look_up(ids, adapters)

        def replaced() -> Float[Array, "T in"]:
            is_own = self.own.own_ids(adapters) == ids[:, None]
            index = adapters.index * self.own.ids.shape[1] + jnp.argmax(is_own, axis=1)
            own = StoredRows(self.own.rows).take(index).astype(rows.dtype)
            return jnp.where(jnp.any(is_own & (ids >= 0)[:, None], axis=1)[:, None], own, rows)

        return if_adapted(adapters, replaced, lambda: rows)
