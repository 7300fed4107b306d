"""Llama 2, 3 and 3.x, and the decoder block, which Mistral and Qwen share."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
from jaxserve.models.params import Params, ParamSpec

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


def param_specs(arch: ArchConfig, *, gated: bool = True, mlp_norm: str = "post_attention_layernorm") -> list[ParamSpec]:
    """Return one row per tensor of the model.

    Args:
        arch: sizes of the model.
        gated: True if SwiGLU follows the first product of the MLP.
        mlp_norm: name of the norm before the MLP in checkpoints.
    """
    D, V = arch.hidden_size, arch.vocab_size
    specs = [ParamSpec(("embed",), (V, D), ("vocab", "embed"), ("model.embed_tokens.weight",), (V,))]
    for layer in range(arch.num_layers):
        specs += _layer_specs(arch, layer, gated, mlp_norm)
    specs.append(ParamSpec(("final_norm",), (D,), (None,), ("model.norm.weight",), (D,), "ones"))
    if not arch.tied_embeddings:
        specs.append(ParamSpec(("lm_head",), (V, D), ("vocab", "embed"), ("lm_head.weight",), (V,)))
    return specs


def sink_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return the rows of the sinks of every layer's query heads."""
    Q = arch.num_heads

    def sinks(layer: int) -> ParamSpec:
        path, names = ("layers", layer, "sinks"), (f"model.layers.{layer}.self_attn.sinks",)
        return ParamSpec(path, (Q,), ("heads",), names, (Q,), "zeros", heads=(Q,))

    return [sinks(layer) for layer in range(arch.num_layers)]


def fused_param_specs(arch: ArchConfig, names: Mapping[str, str]) -> list[ParamSpec]:
    """Return the rows of `param_specs` with several matrices in one tensor of a checkpoint.

    Args:
        arch: sizes of the model.
        names: name of the tensor in a layer of a checkpoint, by the name of the row.
    """

    def fused(spec: ParamSpec) -> ParamSpec:
        if (own := names.get(str(spec.path[-1]))) is None:
            return spec
        name = f"model.layers.{spec.path[1]}.{own}.weight"
        return dataclasses.replace(spec, hf_names=(name,) * len(spec.hf_names))

    return [fused(spec) for spec in param_specs(arch)]


def _layer_specs(arch: ArchConfig, layer: int, gated: bool, mlp_norm: str) -> list[ParamSpec]:
    D, F, H = arch.hidden_size, arch.ffn_size, arch.head_dim
    q_rows, kv_rows = arch.num_heads * H, arch.num_kv_heads * H
    attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"

    def matrix(
        name: str, axes: tuple[str, str], names: list[str], rows: list[int], inner: int, **facts: Any
    ) -> ParamSpec:
        hf_names = tuple(f"{n}.weight" for n in names)
        return ParamSpec(("layers", layer, name), (sum(rows), inner), axes, hf_names, tuple(rows), **facts)

    def vector(name: str, axis: str | None, names: list[str], rows: list[int], init: str, **facts: Any) -> ParamSpec:
        return ParamSpec(("layers", layer, name), (sum(rows),), (axis,), tuple(names), tuple(rows), init, **facts)

    def norm(name: str, hf_name: str, size: int) -> ParamSpec:
        return vector(name, None, [f"{hf_name}.weight"], [size], "ones")

    qkv, qkv_rows = [f"{attn}.{x}_proj" for x in "qkv"], [q_rows, kv_rows, kv_rows]
    heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
    gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    specs = [
        norm("input_norm", f"model.layers.{layer}.input_layernorm", D),
        matrix("qkv_proj", ("heads", "embed"), qkv, qkv_rows, D, heads=heads),
        matrix("o_proj", ("embed", "heads"), [f"{attn}.o_proj"], [D], q_rows),
        norm("mlp_norm", f"model.layers.{layer}.{mlp_norm}", D),
        matrix("gate_up_proj", ("ffn", "embed"), gate_up, [F, F], D, gated=gated),
        matrix("down_proj", ("embed", "ffn"), [f"{mlp}.down_proj"], [D], F),
    ]
    if arch.qkv_bias:
        specs.append(vector("qkv_bias", "heads", [f"{n}.bias" for n in qkv], qkv_rows, "zeros", heads=heads))
    if arch.o_bias:
        specs.append(vector("o_bias", "embed", [f"{attn}.o_proj.bias"], [D], "zeros"))
    if arch.mlp_bias:
        specs.append(vector("gate_up_bias", "ffn", [f"{n}.bias" for n in gate_up], [F, F], "zeros"))
        specs.append(vector("down_bias", "embed", [f"{mlp}.down_proj.bias"], [D], "zeros"))
    if arch.qk_norm:
        specs += [norm("q_norm", f"{attn}.q_norm", H), norm("k_norm", f"{attn}.k_norm", H)]
    return specs


def project_qkv(
    p: Params, x: Float[Array, "T inner"], tokens: TokenContext, arch: ArchConfig, norm: RmsNorm | None
) -> tuple[Float[Array, "T Q H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Norm the input and return queries, keys and values of every token, normed per head if `arch.qk_norm`."""
    T, Q, K, H = x.shape[0], arch.num_heads, arch.num_kv_heads, arch.head_dim
    qkv = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias")).reshape(T, Q + 2 * K, H)
    q, k, v = jnp.split(qkv, [Q, Q + K], axis=1)
    if arch.qk_norm:
        q, k = rms_norm(q, p["q_norm"], arch.norm_eps), rms_norm(k, p["k_norm"], arch.norm_eps)
    return pair_halves(q, arch.rope_pairs), pair_halves(k, arch.rope_pairs), v


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
    feed_forward: Callable[[Params, Array, TokenContext, ArchConfig], Array] | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one pre-norm decoder layer: x + attention, then + SwiGLU, or what `feed_forward` adds.

    If the model is split, each device has a part of the heads and of the feed-forward size, and all of x.
    """
    with jax.named_scope("attention"):
        q, k, v = project_qkv(p, x, tokens, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, tokens = tokens.attend(q, k, v, layer)
        x = project_out(p, out, tokens, arch, x)
    with jax.named_scope("mlp"):
        return (feed_forward or mlp)(p, x, tokens, arch), tokens


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
LLAMA = ModelFamily(arch, param_specs, block, rms_norm, FOLDS)
