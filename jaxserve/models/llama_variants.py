"""Llama variants: SmolLM3 (NoPE layers), Seed-OSS (biases on q, k and v) and Arcee (squared ReLU)."""

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import UNGATED_FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, STRINGS, SWITCH, HfConfig, one_of, read_field, read_fields
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows
from jaxserve.models.layer_tensors import TensorNames

_SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
}
_SMOLLM3_FIELDS = {
    "no_rope_layer_interval": SIZE,
    "no_rope_layers": FieldType(
        "a list of 0 and 1", lambda value: isinstance(value, list) and all(COUNT.holds(v) and v < 2 for v in value)
    ).or_null(),
    "layer_types": STRINGS.or_null(),
    "use_sliding_window": SWITCH,
}
_SEED_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
_ARCEE_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}


def smollm3_arch(config: HfConfig) -> ArchConfig:
    """Parse a SmolLM3 config.json."""
    values, arch = read_fields(config, _SMOLLM3_FIELDS), llama.arch(config)
    layers, interval = range(arch.num_layers), values["no_rope_layer_interval"]
    rotated = values["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in layers]
    if len(rotated) < len(layers):  # longer lists are cut off, as in transformers
        raise ConfigError(f"config.json: no_rope_layers must be a list of {len(layers)}, got {rotated}")
    if SLIDING in (values["layer_types"] or ()) and not values["use_sliding_window"] and config.get("sliding_window"):
        raise ConfigError(
            f"config.json: use_sliding_window must be true if layer_types has {SLIDING!r}, got false; remove "
            f"sliding_window if the model has none"
        )
    windows = read_windows(config, lambda layer: FULL if rotated[layer] else SLIDING, has_switch=True)
    ropes = tuple(rope if rotated[layer] else None for layer, rope in enumerate(arch.ropes))
    return arch.with_attention(rope=ropes, window=windows)


def seed_oss_arch(config: HfConfig) -> ArchConfig:
    """Parse a Seed-OSS config.json."""
    return llama.arch(config, o_bias=read_field(config, "attention_out_bias", SWITCH))


def arcee_arch(config: HfConfig) -> ArchConfig:
    """Parse an Arcee config.json."""
    activation = read_field(config, "hidden_act", one_of(ACTIVATIONS))
    return llama.arch({**config, "hidden_act": "silu"}, activation=activation)


FAMILIES = {
    "SmolLM3ForCausalLM": ModelFamily(smollm3_arch, defaults=_SMOLLM3_DEFAULTS),
    "SeedOssForCausalLM": ModelFamily(seed_oss_arch, defaults=_SEED_OSS_DEFAULTS),
    "ArceeForCausalLM": ModelFamily(
        arcee_arch, TensorNames(gate_up=("mlp.up_proj",)), _ARCEE_DEFAULTS, folds=UNGATED_FOLDS
    ),
}
