"""Llama 2, 3 and 3.x, and the decoder block, which Mistral and Qwen share."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.rope import pair_halves
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import Fold, ModelFamily
from jaxserve.models.hf_config import (
    POSITIVE,
    SIZE,
    SWITCH,
    max_position,
    one_of,
    read_dtype,
    read_fields,
    read_rope,
    token_id_set,
)
from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from jaxserve.models.layer_tensors import decoder_specs
from jaxserve.models.params import Params

_FIELDS = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE.or_null(),
    "head_dim": SIZE.or_null(),
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "rms_norm_eps": POSITIVE,
    "hidden_act": one_of(["silu"]),
    "tie_word_embeddings": SWITCH,
    "attention_bias": SWITCH,
    "mlp_bias": SWITCH,
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_ATTENTION_FIELDS = {field.name for field in dataclasses.fields(AttentionSpec)}


def arch(
    config: Mapping[str, Any],
    *,
    rope_fraction: float | None = None,
    windows: Sequence[int | None] | None = None,
    experts: Experts | None = None,
    dense_layers: Collection[int] = (),
    mlp_bias: bool | None = None,
    activation: str = "swiglu",
    **overrides: Any,
) -> ArchConfig:
    """Parse a Llama config.json; other families pass what differs.

    Args:
        config: content of config.json.
        rope_fraction: see `read_rope`.
        windows: sliding window of each layer.
        experts: experts of the layers that are not dense.
        dense_layers: layers with an MLP although others have experts.
        mlp_bias: True if MLPs have biases, by default `mlp_bias` of the file.
        activation: see `MlpSpec`.
        overrides: fields of each layer's attention, or of the result.

    Raises:
        ConfigError: a field is missing, malformed or not supported.
    """
    config = {**_DEFAULTS, **config}
    values = read_fields(config, _FIELDS)
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    rope = read_rope(config, rope_fraction)
    longest = max_position(values["max_position_embeddings"], rope)
    num_kv_heads = values["num_key_value_heads"] or heads
    if values["head_dim"] is None and hidden % heads and heads % num_kv_heads == 0:  # see ArchConfig
        raise ConfigError(
            f"hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"got {hidden} and {heads}"
        )
    attention: dict[str, Any] = {
        "num_heads": heads,
        "kv": HeadVectors(num_kv_heads, values["head_dim"] or hidden // heads),
        "rope": rope.within(longest),
        "qkv_bias": values["attention_bias"],
        "o_bias": values["attention_bias"],
    }
    attention |= {name: overrides.pop(name) for name in _ATTENTION_FIELDS & overrides.keys()}
    mlp = MlpSpec(values["intermediate_size"], values["mlp_bias"] if mlp_bias is None else mlp_bias, activation)

    def layer(index: int, window: int | None) -> LayerSpec:
        mixer = AttentionSpec(**attention, window=window)
        if experts is None or index in dense_layers:
            return LayerSpec(mixer, mlp)
        return LayerSpec(mixer, experts=experts)

    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "layers": tuple(map(layer, range(layers), windows or (None,) * layers)),
        "max_position": longest,
        "norm_eps": float(values["rms_norm_eps"]),
        "tied_embeddings": values["tie_word_embeddings"],
        "eos_ids": token_id_set(config.get("eos_token_id")),
        "dtype": read_dtype(config),
    }
    return ArchConfig(**{**fields, **overrides})


def project_qkv(
    p: Params,
    x: Float[Array, "T inner"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: RmsNorm | None,
) -> tuple[Float[Array, "T Q H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Norm the input and return queries, keys and values of every token, with norms of their own if these exist."""
    attention = layer.attention
    T, Q, K, H = x.shape[0], attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias")).reshape(T, Q + 2 * K, H)
    q, k, v = jnp.split(qkv, [Q, Q + K], axis=1)
    if attention.qk_norm is not None:
        head_norm = rms_norm if attention.qk_norm == "shared" else partial(_whole_norm, axis=arch.tensor_axis)
        q, k = head_norm(q, p["q_norm"], arch.norm_eps), head_norm(k, p["k_norm"], arch.norm_eps)
    return pair_halves(q, attention.rope), pair_halves(k, attention.rope), v


def _whole_norm(
    x: Float[Array, "T heads H"], weight: Float[Array, " inner"], eps: float, *, axis: tuple[str, ...] | None
) -> Float[Array, "T heads H"]:
    """Return the norm over all heads, which other devices may have."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=(1, 2), keepdims=True)
    # Every head is on the same number of devices, so that the mean over devices is the mean over heads.
    mean = mean if axis is None else lax.pmean(mean, axis)
    return (x32 * lax.rsqrt(mean + eps)).astype(x.dtype) * weight.reshape(1, *x.shape[1:])


def project_out(
    p: Params,
    out: Float[Array, "T Q H"],
    tokens: TokenContext,
    arch: ArchConfig,
    residual: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """Return the projection of the outputs of all heads, added to `residual` if it is given."""
    x, bias = out.reshape(out.shape[0], -1), p.get("o_bias")
    return linear(x, p["o_proj"], tokens, bias=bias, residual=residual, axis=arch.tensor_axis)


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    feed_forward: Callable[[Params, Array, TokenContext, LayerContext, ArchConfig], Array] | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one pre-norm decoder layer: x + attention, then + SwiGLU, or what `feed_forward` adds.

    If the model is split, each device has a part of the heads and of the feed-forward size, and all of x.
    """
    with jax.named_scope("attention"):
        q, k, v = project_qkv(p, x, tokens, layer, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, tokens = tokens.attend(q, k, v, layer)
        x = project_out(p, out, tokens, arch, x)
    with jax.named_scope("mlp"):
        if feed_forward is None:
            return mlp(p, x, tokens, arch), tokens
        return feed_forward(p, x, tokens, layer, arch), tokens


def mlp(p: Params, x: Float[Array, "T D"], tokens: TokenContext, arch: ArchConfig) -> Float[Array, "T D"]:
    """Return x + SwiGLU of its norm."""
    return swiglu_mlp(p, x, tokens, arch, RmsNorm(p["mlp_norm"], arch.norm_eps), x)


def swiglu_mlp(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    arch: ArchConfig,
    norm: RmsNorm | None = None,
    residual: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """Return SwiGLU of x, normed if there is a norm, added to `residual` if it is given."""
    inner = linear(x, p["gate_up_proj"], tokens, norm=norm, bias=p.get("gate_up_bias"), activation=swiglu)
    bias = p.get("down_bias")
    return linear(inner, p["down_proj"], tokens, bias=bias, residual=residual, axis=arch.tensor_axis)


FOLDS = (
    Fold("input_norm", "qkv_proj"),
    Fold("qkv_proj", "o_proj", part=2),
    Fold("mlp_norm", "gate_up_proj"),
    Fold("gate_up_proj", "down_proj", part=1),
)
LLAMA = ModelFamily(arch, decoder_specs, block, rms_norm, FOLDS)
