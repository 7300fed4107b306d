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
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.layers.linear import LinearContext, StackedMatrix, TokenTerm, WrappedMatrix, as_matrix
from jaxserve.layers.norm import Norm, rms_norm
from jaxserve.layers.token_context import TokenAdapters
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS, PackedMatrix
from jaxserve.pallas_kernels.target import target_platform

RANK_GRAIN = PANEL_ROWS  # stacks have ranks that are multiples of this


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@dataclass(frozen=True)
class Factors(ABC):
    """S adapters' factors for a matrix whose output has P parts, each with its own factors.

    All factors have the same rank; smaller ones are padded by zeros.

    Attributes:
        a: all parts' first factors, by adapter.
        b: second factors by part, each by adapter.
    """

    a: Shaped[Array, "..."]
    b: tuple[Shaped[Array, "..."], ...]

    @abstractmethod
    def terms(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return adapted tokens' terms, in float32; arbitrary ones for the others.

        Args:
            x: inputs.
            norm: norm applied to them; None for no norm.
            adapters: the tokens' adapters.
        """


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatFactors(Factors):
    """Factors in float arrays: `a` [S * P * rank, in], each `b` [S * rank, out].

    All tokens are multiplied by all first factors, which is one matmul, and keep only their adapters' results.
    """

    def terms(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return the terms; see `Factors.terms`."""
        x = norm(x) if norm else x
        T, S, P = len(x), adapters.num_slots, len(self.b)
        r = len(self.a) // (S * P)
        inner = as_matrix(self.a).multiply(x.astype(self.a.dtype), LinearContext())
        is_own = adapters.slot[:, None] == 1 + jnp.arange(S, dtype=jnp.int32)[None]
        kept = jnp.where(is_own[:, :, None, None], inner.reshape(T, S, P, r), 0).astype(self.a.dtype)
        precision = lax.Precision.HIGHEST if self.a.dtype == jnp.float32 else None
        outputs = [
            jnp.dot(kept[:, :, part].reshape(T, S * r), b, precision=precision, preferred_element_type=jnp.float32)
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

    def terms(self, x: Float[Array, "T in"], norm: Norm | None, adapters: TokenAdapters) -> Float[Array, "T out"]:
        """Return the terms; see `Factors.terms`."""
        P, r = len(self.b), self.b[0].shape[1]
        x = _normed_alike(x, norm) if norm else x
        inner = self._multiply(x[adapters.order], self.a, P * r, adapters)
        outputs = [
            self._multiply(inner[:, part * r : (part + 1) * r], b, size, adapters)
            for part, (b, size) in enumerate(zip(self.b, self.part_sizes, strict=True))
        ]
        return jnp.concatenate(outputs, axis=1)[adapters.rank_of]

    @staticmethod
    def _multiply(
        x: Float[Array, "T in"],
        panels: Shaped[Array, "..."],
        num_outputs: int,
        adapters: TokenAdapters,
    ) -> Float[Array, "T out"]:
        """Multiply sorted tokens by their adapters' matrices [out, in]."""
        none = jnp.zeros((len(panels), 0, 1, PANEL_ROWS), jnp.float32)
        packed = PackedMatrix(panels, none, none, num_outputs, x.shape[1], adapters.num_slots, panels.dtype.name)
        return NativeMatrix(packed).multiply_groups(x, adapters.group_sizes, LinearContext())


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
            term = TokenTerm(self.factors.terms(x, context.norm, adapters), adapters)
            return base.linear(x, context._replace(term=term))

        return _if_adapted(adapters, adapted, lambda: base.linear(x, context))

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms."""
        return self._with_terms(super().multiply(x, context), x, context)

    def multiply_in_stack(
        self, x: Float[Array, "T in"], stack: Any, layer: Int[Array, ""], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T` with adapted tokens' terms, for one matrix in a stack."""
        return self._with_terms(StackedMatrix(stack.matrix, layer).multiply(x, context), x, context)

    def _with_terms(
        self, y: Float[Array, "T out"], x: Float[Array, "T in"], context: LinearContext
    ) -> Float[Array, "T out"]:
        """Return y with adapted tokens' terms."""
        adapters = _adapters(context)

        def added() -> Float[Array, "T out"]:
            return TokenTerm(self.factors.terms(x, None, adapters), adapters).added_to(y)

        return _if_adapted(adapters, added, lambda: y)


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
    assert context.tokens is not None, "an adapted matrix multiplies tokens"
    assert context.tokens.adapters is not None, "tokens have adapters if matrices do"
    return context.tokens.adapters


def _if_adapted(
    adapters: TokenAdapters, adapted: Callable[[], Array], plain: Callable[[], Array]
) -> Float[Array, "T out"]:
    """Call and return `adapted` if any token has an adapter, otherwise `plain`.

    Only CPUs branch: the terms cost accelerators little next to the matrix, and a branch would cost them more.
    """
    if target_platform() != "cpu":
        return adapted()
    return lax.cond(adapters.has_adapted, adapted, plain)


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
