"""Mistral and Ministral 3: Llama's block; some checkpoints have sliding windows."""

import dataclasses

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import NUMBER, ORIGINAL_LENGTH, POSITIVE, SIZE, HfConfig, read_field
from jaxserve.models.layer_kinds import SLIDING, read_windows, same_windows

_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3_DEFAULTS = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL_LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def arch(config: HfConfig) -> ArchConfig:
    """Parse a Mistral or Ministral config.json: all layers have the window unless `layer_types` specifies which."""
    return _arch(config, read_windows(config, lambda _: SLIDING))


def _arch(config: HfConfig, windows: tuple[int | None, ...]) -> ArchConfig:
    """Parse the fields that Mistral and Ministral 3 have, given each layer's sliding window."""
    return llama.arch(config, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


def ministral3_arch(config: HfConfig) -> ArchConfig:
    """Parse a Ministral 3 text config.json."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        read_field(config, "rope_theta", POSITIVE.or_null())  # ignored: the default parameters have a theta
        config = {**config, "rope_parameters": _MINISTRAL3_ROPE}
    parsed = _arch(config, same_windows(config))
    parameters = config.get("rope_scaling") or config["rope_parameters"]
    growth = read_field(parameters, "llama_4_scaling_beta", NUMBER.or_null())
    if growth is None:
        return parsed
    lengths = {**parameters, **(config if ORIGINAL_LENGTH in config else {})}
    pair = (float(growth), float(read_field(lengths, ORIGINAL_LENGTH, SIZE)))
    return parsed.with_attention(rope=[rope and dataclasses.replace(rope, query_growth=pair) for rope in parsed.ropes])


_MISTRAL = ModelFamily(arch, defaults=_DEFAULTS)
FAMILIES = {
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": ModelFamily(ministral3_arch, defaults=_MINISTRAL3_DEFAULTS),
}
