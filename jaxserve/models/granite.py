"""Granite 3 and 4 (dense), and Granite with sliding windows: Llama's layers with factors on what they read and add."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import FULL, POSITIVE, SIZE, SLIDING, STRINGS, Kind, layer_windows, read_fields
from jaxserve.models.layer_facts import LayerOptions
from jaxserve.models.params import Params, ParamSpec

_FACTORS = {
    "embedding_multiplier": POSITIVE,
    "attention_multiplier": POSITIVE,
    "residual_multiplier": POSITIVE,
    "logits_scaling": POSITIVE,
}
_SWA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}


def _is_thetas(value: object) -> bool:
    return isinstance(value, list) and all(theta == 0 or POSITIVE.holds(theta) for theta in value)


_SWA_FIELDS = {
    "num_hidden_layers": SIZE,
    "sliding_window": SIZE.or_null(),
    "layer_types": STRINGS.or_null(),
    "layer_rope_theta": Kind("a list of numbers, 0 for a layer without rotation", _is_thetas).or_null(),
}


def granite_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse the config.json of a dense Granite model."""
    values = read_fields({**dict.fromkeys(_FACTORS, 1.0), **config}, _FACTORS)
    return llama.arch(
        config,
        embed_scale=float(values["embedding_multiplier"]),
        query_scale=float(values["attention_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=1.0 / float(values["logits_scaling"]),
    )


def granite_swa_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse the config.json of a Granite model with sliding windows."""
    config = {**_SWA_DEFAULTS, **config}
    arch, values = granite_arch(config), read_fields(config, _SWA_FIELDS)
    layers = range(arch.num_layers)
    kinds = values["layer_types"] or [SLIDING if layer % 4 else FULL for layer in layers]
    ropes, thetas = arch.ropes, values["layer_rope_theta"]
    if thetas is not None:
        read_fields(
            {"layer_rope_theta": thetas},
            {"layer_rope_theta": Kind(f"a list of {arch.num_layers}", lambda value: len(value) == arch.num_layers)},
        )
        ropes = tuple(
            dataclasses.replace(rope, theta=float(theta)) if rope and theta else None
            for rope, theta in zip(ropes, thetas, strict=True)
        )
    windows = layer_windows(kinds, arch.num_layers, values["sliding_window"])
    return dataclasses.replace(arch, windows=windows, ropes=ropes)


def swa_param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return Llama's rows, and the sinks of every layer's query heads."""
    return llama.param_specs(arch) + llama.sink_specs(arch)


def block(
    p: Params,
    x: Float[Array, "T D"],
    rope: Float[Array, "2 T half"] | None,
    carry: Any,
    layer: Any,
    *,
    arch: ArchConfig,
    options: LayerOptions,
    attend: Any,
) -> tuple[Float[Array, "T D"], Any]:
    """Apply one decoder layer: x + factor * attention, then + factor * SwiGLU. See `llama.block`."""
    with jax.named_scope("attention"):
        q, k, v = llama.project_qkv(p, x, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, carry = attend(q, k, v, rope, carry, layer, options, p.get("sinks"))
        x += arch.residual_scale * llama.project_out(p, out, arch)
    with jax.named_scope("mlp"):
        out = llama.swiglu_mlp(p, x, arch, RmsNorm(p["mlp_norm"], arch.norm_eps))
        return x + arch.residual_scale * out, carry


GRANITE = ModelFamily(granite_arch, llama.param_specs, block, rms_norm, llama.FOLDS)
GRANITE_SWA = ModelFamily(granite_swa_arch, swa_param_specs, block, rms_norm, llama.FOLDS)
