"""Llama 2, 3 and 3.x, and the config parser that most families share."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import (
    POSITIVE,
    SIZE,
    SWITCH,
    HfConfig,
    max_position,
    one_of,
    read_dtype,
    read_fields,
    read_rope,
    token_id_set,
)
from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec

_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings"),
)
_FIELDS = {
    **dict.fromkeys(_SIZES, SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), SIZE.or_null()),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), SWITCH),
    "rms_norm_eps": POSITIVE,
    "hidden_act": one_of(["silu"]),
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), False),
}
_ATTENTION_FIELDS = {field.name for field in dataclasses.fields(AttentionSpec)}


def arch(
    config: HfConfig,
    *,
    rope_fraction: float | None = None,
    interleaved: bool = False,
    windows: Sequence[int | None] | None = None,
    experts: Experts | None = None,
    dense_layers: Collection[int] = (),
    mlp_bias: bool | None = None,
    activation: str = "swiglu",
    **overrides: Any,
) -> ArchConfig:
    """Parse a Llama config.json; other families pass their differences.

    Args:
        config: content of config.json.
        rope_fraction: see `read_rope`.
        interleaved: True for interleaved RoPE.
        windows: each layer's sliding window.
        experts: experts in layers that are not dense.
        dense_layers: layers with an MLP although others have experts.
        mlp_bias: True if MLPs have biases; None for the file's `mlp_bias`.
        activation: see `MlpSpec`.
        overrides: `AttentionSpec` fields for all layers, or `ArchConfig` fields.

    Raises:
        ConfigError: a field is missing, malformed or not supported.
    """
    config = {**_DEFAULTS, **config}
    values = read_fields(config, _FIELDS)
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    rope = dataclasses.replace(read_rope(config, rope_fraction), interleaved=interleaved)
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
        """Return the spec for layer `index`, with experts unless it is dense."""
        mixer = AttentionSpec(**attention, window=window)
        if experts is None or index in dense_layers:
            return LayerSpec(mixer, mlp)
        return LayerSpec(mixer, experts=experts)

    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "layers": tuple(layer(*each) for each in zip(range(layers), windows or (None,) * layers, strict=True)),
        "max_position": longest,
        "norm_eps": float(values["rms_norm_eps"]),
        "tied_embeddings": values["tie_word_embeddings"],
        "eos_ids": token_id_set(config.get("eos_token_id")),
        "dtype": read_dtype(config),
    }
    return ArchConfig(**{**fields, **overrides})


FAMILIES = {"LlamaForCausalLM": ModelFamily(arch)}
