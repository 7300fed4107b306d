"""MoE: a router that chooses a few experts for each token, and their matmuls.

A matmul has T * k rows, the pairs (token, expert), sorted by expert. No pair is dropped, and no shape depends on the
router's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import LinearContext, SortedGroups, Weight, as_matrix, linear
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.token_context import TokenContext
from jaxserve.layers.token_exchange import all_tokens, sum_local_tokens


class Experts(NamedTuple):
    """Sizes and routing rules in an MoE layer.

    Attributes:
        num_experts: experts, E.
        per_token: experts per token, k.
        ffn_size: feed-forward size per expert, F.
        normalized: True if a token's weights are scaled to sum to one.
        sigmoid: True if scores are the logits' sigmoids; False for their softmax.
        num_groups: equal expert groups.
        top_groups: groups from which a token's experts are chosen.
        group_scores: number of best scores whose sum ranks a group.
        scale: factor on the weights.
        shared_ffn_size: feed-forward size for the shared experts together; 0 without shared experts.
        softmax_of_chosen: True if weights are the softmax over only the chosen experts' logits.
        activation: function between an expert's two matmuls.
        num_shards: number of equal expert shards; a device has a part of every expert in its shard.
        shard_axis: mesh axes that divide the shards, if these are one device's sizes.
    """

    num_experts: int
    per_token: int
    ffn_size: int
    normalized: bool = True
    sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_scores: int = 1
    scale: float = 1.0
    shared_ffn_size: int = 0
    softmax_of_chosen: bool = False
    activation: Callable[[Array], Array] = swiglu
    num_shards: int = 1
    shard_axis: tuple[str, ...] | None = None

    def local(self, num_devices: int, shard_axis: tuple[str, ...], num_data_shards: int = 1) -> Experts:
        """Return the experts' sizes on one device.

        Args:
            num_devices: number of devices that have all routed experts together.
            shard_axis: mesh axes that divide the shards.
            num_data_shards: number of equal device sets, each with whole shared experts.
        """
        return self._replace(
            ffn_size=self.ffn_size * self.num_shards // num_devices,
            shared_ffn_size=self.shared_ffn_size * num_data_shards // num_devices,
            shard_axis=shard_axis,
        )

    @property
    def num_held(self) -> int:
        """Number of local experts: on one device, its shard's."""
        return self.num_experts if self.shard_axis is None else self.num_experts // self.num_shards

    def max_read(self, num_tokens: int) -> int:
        """Return the maximum number of experts that a device reads for `num_tokens` tokens."""
        return min(self.num_held, num_tokens * self.per_token)


def route(
    logits: Float[Array, "T E"], experts: Experts, bias: Float[Array, " E"] | None = None
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Return weights, in float32, and indices of each token's experts with the largest scores.

    Args:
        logits: router outputs.
        experts: sizes, and rules for scores and weights.
        bias: terms added to scores for the choice, but not to weights.
    """
    if experts.softmax_of_chosen:
        chosen, ids = lax.top_k(logits.astype(jnp.float32), experts.per_token)
        return jax.nn.softmax(chosen), ids
    score = jax.nn.sigmoid if experts.sigmoid else jax.nn.softmax
    scores = score(logits.astype(jnp.float32))
    ranked = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if experts.top_groups < experts.num_groups:
        ranked = _in_best_groups(ranked, experts)
    weights, ids = lax.top_k(ranked, experts.per_token)
    if ranked is not scores:
        weights = jnp.take_along_axis(scores, ids, axis=1)
    if experts.normalized:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20  # sigmoids may all be zero
    return weights if experts.scale == 1.0 else weights * experts.scale, ids


def _in_best_groups(ranked: Float[Array, "T E"], experts: Experts) -> Float[Array, "T E"]:
    """Return the scores `ranked` with minus infinity for experts outside each token's best expert groups."""
    grouped = ranked.reshape(ranked.shape[0], experts.num_groups, -1)
    group_scores = lax.top_k(grouped, experts.group_scores)[0].sum(axis=-1)
    best = lax.top_k(group_scores, experts.top_groups)[1]
    is_best = jnp.any(best[:, :, None] == jnp.arange(experts.num_groups)[None, None, :], axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


class ExpertWeights(NamedTuple):
    """Parameters of an MoE layer.

    Attributes:
        router: matrix `[E, D]`.
        gate_up: all experts' matrices `[2F, D]`, one after the other.
        down: all experts' matrices `[D, F]`.
        router_bias: terms added to scores for the choice, or None.
        shared_gate_up: matrix `[2F, D]` of the shared experts, or None.
        shared_down: their matrix `[D, F]`.
        shared_gate: matrix `[1, D]`, whose sigmoid output weights the shared experts; None for a weight of one.
        logit_bias: bias of the router, or None.
        gate_up_bias: all experts' first biases, or None.
        down_bias: all experts' second biases, whole on each device.
        weight_factors: factor on each expert's weights, or None.
    """

    router: Weight
    gate_up: Weight
    down: Weight
    router_bias: Float[Array, " E"] | None = None
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None
    shared_gate: Weight | None = None
    logit_bias: Float[Array, " E"] | None = None
    gate_up_bias: Float[Array, "E F2"] | None = None
    down_bias: Float[Array, "E D"] | None = None
    weight_factors: Float[Array, " E"] | None = None


def apply_experts(
    x: Float[Array, "T D"],
    tokens: TokenContext,
    matrices: ExpertWeights,
    experts: Experts,
    axis: str | tuple[str, ...] | None = None,
    routing: Float[Array, "T D"] | None = None,
    token_axis: str | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return the weighted sum over each token's experts, plus the shared experts, which are SwiGLU.

    Every device has all tokens and routes them alike. It computes its local experts, and the sum over the devices,
    which tensor parallelism needs too, completes the result. Along `token_axis` each device first gathers all tokens,
    and gets the sums for its own: an all-to-all by chosen experts would need the same capacity for the worst case, as
    no pair may be dropped.

    Args:
        x: normed inputs.
        tokens: the tokens, which are counted by expert.
        matrices: router and experts.
        experts: the layer's sizes and routing rules.
        axis: mesh axes that split experts and F, in addition to `token_axis`.
        routing: inputs of the router; None if it reads x.
        token_axis: mesh axis along which devices have different tokens and experts; None if all have the same tokens.
    """
    local, x = x, all_tokens(x, token_axis)
    routing = x if routing is None else all_tokens(routing, token_axis)
    adapters = tokens.adapters and tokens.adapters.select(lambda each: all_tokens(each, token_axis))
    logits = linear(routing, matrices.router, bias=matrices.logit_bias, dtype=jnp.float32, adapters=adapters)
    weights, ids = route(logits, experts, matrices.router_bias)
    if matrices.weight_factors is not None:
        weights *= matrices.weight_factors.astype(weights.dtype)[ids]
    if tokens.live is not None:  # padding has no experts, so that it reads none
        ids = jnp.where(tokens.live[:, None], ids, experts.num_experts)
    tokens = tokens.count_experts(ids)
    first = 0 if experts.num_shards == 1 else lax.axis_index(experts.shard_axis) * experts.num_held
    local_ids, num_held = ids - first, experts.num_held
    is_held = (local_ids >= 0) & (local_ids < num_held)
    pairs = SortedGroups.sort(jnp.where(is_held, local_ids, num_held).reshape(-1), num_held)
    parts = None if axis is None else _expert_axes(axis, experts)
    token = pairs.order // experts.per_token
    context = LinearContext(
        adapters=adapters and adapters.select(lambda each: each[token]),
        bias=_local_biases(matrices.gate_up_bias, first, experts),
        activation=experts.activation,
        dtype=x.dtype,
        num_shards=experts.num_shards,
    )
    inner = as_matrix(matrices.gate_up).linear_groups(x[token], pairs.sizes, context)
    down_bias = _local_biases(matrices.down_bias, first, experts)
    if parts is not None and down_bias is not None:  # outputs are summed over the devices with parts of an expert
        down_bias = jnp.where(lax.axis_index(parts) == 0, down_bias, 0)
    context = context._replace(bias=down_bias, activation=None, axis=parts)
    outputs = as_matrix(matrices.down).linear_groups(inner, pairs.sizes, context)
    by_token = outputs[pairs.position].reshape(*ids.shape, -1).astype(jnp.float32)
    y = jnp.sum(by_token * weights[:, :, None], axis=1).astype(x.dtype)
    y = sum_local_tokens(y, token_axis)
    if matrices.shared_gate_up is not None and matrices.shared_down is not None:
        inner = linear(local, matrices.shared_gate_up, tokens, activation=swiglu)
        context = LinearContext(tokens.adapters, dtype=x.dtype, axis=axis, num_live=tokens.num_live)
        shared = as_matrix(matrices.shared_down).multiply(inner, context).astype(x.dtype)  # reduced below
        if matrices.shared_gate is not None:
            shared *= jax.nn.sigmoid(linear(local, matrices.shared_gate, tokens))
        y += shared
    return y if axis is None else lax.psum(y, axis), tokens


def _local_biases(bias: Float[Array, "E N"] | None, first: Any, experts: Experts) -> Float[Array, "held N"] | None:
    """Return the rows of `bias` for a device's own experts, whose first index is `first`."""
    if bias is None or experts.num_shards == 1:
        return bias
    return lax.dynamic_slice_in_dim(bias, first, experts.num_held)


def _expert_axes(axis: str | tuple[str, ...], experts: Experts) -> tuple[str, ...]:
    """Return the mesh axes that split each expert; along other axes devices have different experts."""
    axes = (axis,) if isinstance(axis, str) else axis
    return tuple(name for name in axes if name not in (experts.shard_axis or ()))
