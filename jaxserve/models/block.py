"""Decoder layer for all families: attention or a recurrent mixer, then an MLP or experts, between norms.

Sublayers have one signature, `sublayer(p, x, tokens, layer, arch, norm, residual) -> (y, tokens)`: they norm x if there
is a norm, and add their outputs to `residual` if it is given. If the model is split, each device has some
heads, a fraction of the feed-forward size, and all of x.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.experts import ExpertWeights, apply_experts
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import activation_function
from jaxserve.layers.norm import Norm
from jaxserve.layers.rope import pair_halves
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params

Sublayer = Callable[..., tuple[Array, TokenContext]]
Residual = Float[Array, "N D"] | None
Heads = tuple[Float[Array, "T Q H"], Float[Array, "T K H"] | None, Float[Array, "T K H"] | None]


def project_qkv(
    p: Params,
    x: Float[Array, "T inner"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm | None,
) -> Heads:
    """Return all tokens' queries, keys and values, after query and key norms if the layer has them."""
    attention = layer.attention
    T, Q, K, H = x.shape[0], attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias")).reshape(T, Q + 2 * K, H)
    q, k, v = jnp.split(qkv, [Q, Q + K], axis=1)
    if attention.qk_norm is not None:
        head_norm = partial(_whole_norm, axis=arch.tensor_axis) if attention.qk_norm == "whole" else layer.norm
        q, k = head_norm(q, p["q_norm"], arch.norm_eps), head_norm(k, p["k_norm"], arch.norm_eps)
    return pair_halves(q, attention.rope), pair_halves(k, attention.rope), v


def _whole_norm(
    x: Float[Array, "T heads H"], weight: Float[Array, " inner"], eps: float, *, axis: tuple[str, ...] | None
) -> Float[Array, "T heads H"]:
    """Apply the norm over all heads, including the heads on other devices."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=(1, 2), keepdims=True)
    # Every head is on the same number of devices, so that the mean over devices is the mean over heads.
    mean = mean if axis is None else lax.pmean(mean, axis)
    return (x32 * lax.rsqrt(mean + eps)).astype(x.dtype) * weight.reshape(1, *x.shape[1:])


def project_out(
    p: Params, out: Float[Array, "N Q H"], tokens: TokenContext, arch: ArchConfig, residual: Residual
) -> Float[Array, "N D"]:
    """Project all heads' outputs; add `residual` if it is given."""
    x, bias = out.reshape(out.shape[0], -1), p.get("o_bias")
    return linear(x, p["o_proj"], tokens, bias=bias, residual=residual, axis=arch.tensor_axis)


def attention(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm | None,
    residual: Residual,
    *,
    project: Callable[..., Heads] = project_qkv,
) -> tuple[Float[Array, "N D"], TokenContext]:
    """Apply attention to the heads that `project` returns."""
    q, k, v = project(p, x, tokens, layer, arch, norm)
    out, tokens = tokens.attend(q, k, v, layer, p.get("sinks"))
    return project_out(p, out, tokens, arch, residual), tokens


def mlp(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm | None,
    residual: Residual,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply an MLP: up projection (fused with the gate's if the MLP is gated), activation, down projection.

    Args:
        p: the layer's MLP parameters.
        x: inputs.
        tokens: the step's tokens, returned unchanged.
        layer: the layer's static parameters.
        arch: sizes on this device.
        norm: norm applied to x first; None for no norm.
        residual: residual stream, added to the outputs.
    """
    up, activation = "gate_up" if "gate_up_proj" in p else "up", activation_function(layer.mlp.activation)
    inner = linear(x, p[f"{up}_proj"], tokens, norm=norm, bias=p.get(f"{up}_bias"), activation=activation)
    bias = p.get("down_bias")
    return linear(inner, p["down_proj"], tokens, bias=bias, residual=residual, axis=arch.tensor_axis), tokens


def moe(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm | None,
    residual: Residual,
    routing: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply the experts; the router reads `routing` if it is given."""
    matrices = ExpertWeights(
        p["router"],
        p["experts_gate_up"],
        p["experts_down"],
        p.get("router_bias"),
        p.get("shared_gate_up"),
        p.get("shared_down"),
        p.get("shared_gate"),
        p.get("logit_bias"),
        p.get("experts_gate_up_bias"),
        p.get("experts_down_bias"),
        p.get("expert_factors"),
    )
    experts = layer.options.spec.experts
    assert experts is not None, "a layer with a router has experts"
    x = x if norm is None else norm(x)
    y, tokens = apply_experts(x, tokens, matrices, experts, arch.tensor_axis, routing, arch.token_axis)
    return y if residual is None else residual + y, tokens


def feed_forward(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm | None,
    residual: Residual,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply the layer's experts if it has some, otherwise its MLP."""
    return (moe if "router" in p else mlp)(p, x, tokens, layer, arch, norm, residual)


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    attention: Sublayer = attention,
    recurrent: Sublayer | None = None,
    feed_forward: Sublayer = feed_forward,
) -> tuple[Float[Array, "N D"], TokenContext]:
    """Apply one decoder layer: x + attention or a recurrent mixer, then + MLP or experts if the layer has them.

    If `layer.last_only`, only the rows' last tokens are left after attention, in the results too. Norms may precede
    these, follow them or both. With `arch.parallel` both read x, through one norm or two.
    """

    def added(
        sublayer: Sublayer, name: str, before: str, x: Array, residual: Array, tokens: TokenContext
    ) -> tuple[Array, TokenContext]:
        """Apply one sublayer to x and add its outputs to `residual`.

        Args:
            sublayer: attention, mixer, MLP or experts.
            name: prefix of its post-norm in `p`.
            before: its pre-norm in `p`; skipped if absent.
            x: inputs before the pre-norm.
            residual: residual stream.
            tokens: the step's tokens, which the sublayer returns updated.
        """
        norm = Norm(p[before], arch.norm_eps, layer.norm) if before in p else None
        after = p.get(f"{name}_post_norm")
        if after is None and arch.residual_scale == 1.0:
            return sublayer(p, x, tokens, layer, arch, norm, residual)  # its last matmul may add the residual
        y, tokens = sublayer(p, x, tokens, layer, arch, norm, None)
        y = y if after is None else layer.norm(y, after, arch.norm_eps)
        return residual + arch.residual_scale * y, tokens

    with jax.named_scope("attention"):
        mixer = attention if layer.state is None else recurrent
        assert mixer is not None, "families with recurrent layers pass a recurrent mixer"
        kept = tokens.kept(x, layer)
        attended, tokens = added(mixer, "attention", "input_norm", x, kept, tokens)
    if layer.options.spec.mlp is None and layer.options.spec.experts is None:
        return attended, tokens
    with jax.named_scope("mlp"):
        before = "input_norm" if arch.parallel and "mlp_norm" not in p else "mlp_norm"
        return added(feed_forward, "mlp", before, kept if arch.parallel else attended, attended, tokens)
