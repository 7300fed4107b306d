"""Mistral and Ministral 3: Llama's block; some checkpoints have sliding windows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import NUMBER, POSITIVE, SIZE, read_fields, read_num_layers
from jaxserve.models.layer_kinds import SLIDING, read_windows, same_windows
from jaxserve.models.layer_tensors import decoder_specs

_ORIGINAL = "original_max_position_embeddings"
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
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Mistral or Ministral config.json: all layers have the window unless `layer_types` specifies which."""
    config = {**_DEFAULTS, **config}
    windows = read_windows(config, read_num_layers(config), lambda _: SLIDING)
    return _arch(config, windows)


def _arch(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> ArchConfig:
    return llama.arch(config, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


def ministral3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Ministral 3 text config.json."""
    config = {**_MINISTRAL3_DEFAULTS, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        read_fields(config, {"rope_theta": POSITIVE.or_null()})  # ignored: the default parameters have a theta
        config["rope_parameters"] = _MINISTRAL3_ROPE
    parsed = _arch(config, same_windows(config))
    parameters = config.get("rope_scaling") or config["rope_parameters"]
    growth = read_fields(parameters, {"llama_4_scaling_beta": NUMBER.or_null()})["llama_4_scaling_beta"]
    if growth is None:
        return parsed
    lengths = {**parameters, **(config if _ORIGINAL in config else {})}
    trained = read_fields(lengths, {_ORIGINAL: SIZE})[_ORIGINAL]
    pair = (float(growth), float(trained))
    return parsed.with_attention(rope=[rope and dataclasses.replace(rope, query_growth=pair) for rope in parsed.ropes])


MINISTRAL3 = ModelFamily(ministral3_arch, decoder_specs, block, rms_norm, FOLDS)
MISTRAL = ModelFamily(arch, decoder_specs, block, rms_norm, FOLDS)
