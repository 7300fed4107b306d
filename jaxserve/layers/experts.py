"""Mixture of experts: a router that chooses a few feed-forward layers for each token, and their products.

The rows of a product are the T * k pairs of a token and one of its experts, sorted by expert. No pair is dropped, and
no shape depends on what the router chooses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import LinearContext, Weight, as_matrix, linear
from jaxserve.layers.mlp import swiglu


class Experts(NamedTuple):
    """Experts of a layer.

    Attributes:
        num_experts: number of experts, E.
        per_token: number of experts of each token, k.
        normalized: True if the weights of a token's experts are scaled to sum to one.
    """

    num_experts: int
    per_token: int
    normalized: bool = True

    def most_read(self, num_tokens: int) -> int:
        """Return the largest number of experts that so many tokens read."""
        return min(self.num_experts, num_tokens * self.per_token)


def route(logits: Float[Array, "T E"], experts: Experts) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Return weights and numbers of each token's experts: the largest of a softmax over all, in float32."""
    weights, ids = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), experts.per_token)
    return weights / weights.sum(axis=-1, keepdims=True) if experts.normalized else weights, ids


class SortedPairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert.

    Attributes:
        order: number t * k + i of each pair, the i-th of token t.
        place: place of pair t * k + i in that order.
        group_sizes: number of pairs of each expert.
    """

    order: Int[Array, " M"]
    place: Int[Array, " M"]
    group_sizes: Int[Array, " E"]

    @classmethod
    def of(cls, ids: Int[Array, "T k"], num_experts: int) -> "SortedPairs":
        """Sort the pairs of tokens whose experts are `ids`."""
        expert_ids = ids.reshape(-1)
        numbers = jnp.arange(expert_ids.size, dtype=jnp.int32)
        order = jnp.argsort(expert_ids, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
        return cls(order, place, jnp.zeros(num_experts, jnp.int32).at[expert_ids].add(1))


class ExpertWeights(NamedTuple):
    """Matrices of a mixture.

    Attributes:
        router: matrix `[E, D]`.
        gate_up: matrices `[2F, D]` of all experts, one after the other.
        down: matrices `[D, F]` of all experts.
    """

    router: Weight
    gate_up: Weight
    down: Weight


def mixture(
    x: Float[Array, "T D"], matrices: ExpertWeights, experts: Experts, axis: str | None = None
) -> Float[Array, "T D"]:
    """Return the weighted sum of each token's experts, each a SwiGLU layer.

    Args:
        x: normed inputs.
        matrices: router and experts.
        experts: number of experts, and of those of a token.
        axis: mesh axis over whose devices F is split.
    """
    weights, ids = route(linear(x, matrices.router, LinearContext(dtype=jnp.float32)), experts)
    pairs = SortedPairs.of(ids, experts.num_experts)
    gated, plain = (LinearContext(activation=f, dtype=x.dtype) for f in (swiglu, None))
    inner = as_matrix(matrices.gate_up).linear_groups(x[pairs.order // experts.per_token], pairs.group_sizes, gated)
    outputs = as_matrix(matrices.down).linear_groups(inner, pairs.group_sizes, plain)
    of_tokens = outputs[pairs.place].reshape(*ids.shape, -1).astype(jnp.float32)
    y = jnp.sum(of_tokens * weights[:, :, None], axis=1).astype(x.dtype)
    return y if axis is None else lax.psum(y, axis)
