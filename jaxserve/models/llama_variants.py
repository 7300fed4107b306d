"""Llama variants: SmolLM3 (NoPE layers), Seed-OSS (biases on q, k and v) and Arcee (squared ReLU)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, UNGATED_FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, STRINGS, SWITCH, one_of, read_fields
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows
from jaxserve.models.layer_tensors import Names, decoder_specs

_SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
}
_SMOLLM3_FIELDS = {
    "num_hidden_layers": SIZE,
    "no_rope_layer_interval": SIZE,
    "no_rope_layers": FieldType(
        "a list of 0 and 1", lambda value: isinstance(value, list) and all(COUNT.holds(v) and v < 2 for v in value)
    ).or_null(),
}
_SEED_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
_ARCEE_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}


def smollm3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a SmolLM3 config.json."""
    config = {**_SMOLLM3_DEFAULTS, **config}
    values, arch = read_fields(config, _SMOLLM3_FIELDS), llama.arch(config)
    layers, interval = range(arch.num_layers), values["no_rope_layer_interval"]
    rotated = values["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in layers]
    if len(rotated) < len(layers):  # longer lists are cut off, as in transformers
        read_fields(
            {"no_rope_layers": rotated}, {"no_rope_layers": FieldType(f"a list of {len(layers)}", lambda _: False)}
        )
    given = read_fields(config, {"layer_types": STRINGS.or_null(), "use_sliding_window": SWITCH})
    if SLIDING in (given["layer_types"] or ()) and not given["use_sliding_window"] and config.get("sliding_window"):
        raise ConfigError(
            f"config.json: use_sliding_window must be true if layer_types has {SLIDING!r}, got false; remove "
            f"sliding_window if the model has none"
        )
    windows = read_windows(config, arch.num_layers, lambda layer: FULL if rotated[layer] else SLIDING, has_switch=True)
    ropes = tuple(rope if rotated[layer] else None for layer, rope in enumerate(arch.ropes))
    return arch.with_attention(rope=ropes, window=windows)


def seed_oss_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Seed-OSS config.json."""
    config = {**_SEED_OSS_DEFAULTS, **config}
    out_bias = read_fields(config, {"attention_out_bias": SWITCH})["attention_out_bias"]
    return llama.arch(config, o_bias=out_bias)


def arcee_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an Arcee config.json."""
    config = {**_ARCEE_DEFAULTS, **config}
    activation = read_fields(config, {"hidden_act": one_of(ACTIVATIONS)})["hidden_act"]
    return llama.arch({**config, "hidden_act": "silu"}, activation=activation)


SMOLLM3 = ModelFamily(smollm3_arch, decoder_specs, block, rms_norm, FOLDS)
SEED_OSS = ModelFamily(seed_oss_arch, decoder_specs, block, rms_norm, FOLDS)
ARCEE = ModelFamily(
    arcee_arch, partial(decoder_specs, names=Names(gate_up=("mlp.up_proj",))), block, rms_norm, UNGATED_FOLDS
)
