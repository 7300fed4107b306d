"""Layers with layer norms, biases and an MLP without a gate, one after the other or in parallel: rows and block."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import layer_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import Fold
from jaxserve.models.params import Params


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    project: Callable[..., Any] = llama.project_qkv,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one decoder layer: x + attention, then + MLP, each behind a layer norm. See `llama.block`.

    With `arch.parallel` the MLP reads x as attention does, behind the same norm where it has none of its own.
    """
    with jax.named_scope("attention"):
        normed = layer_norm(x, p["input_norm"], arch.norm_eps)
        q, k, v = project(p, normed, tokens, layer, arch, None)
        out, tokens = tokens.attend(q, k, v, layer)
        attended = llama.project_out(p, out, tokens, arch, x)
    with jax.named_scope("mlp"):
        if "mlp_norm" in p:
            normed = layer_norm(x if arch.parallel else attended, p["mlp_norm"], arch.norm_eps)
        activation, bias = ACTIVATIONS[layer.mlp.activation], p.get("down_bias")
        inner = linear(normed, p["up_proj"], tokens, bias=p.get("up_bias"), activation=activation)
        return linear(inner, p["down_proj"], tokens, bias=bias, residual=attended, axis=arch.tensor_axis), tokens


FOLDS = (Fold("input_norm", "qkv_proj"), Fold("qkv_proj", "o_proj", part=2), Fold("mlp_norm", "up_proj"))
