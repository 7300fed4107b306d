"""Qwen2 and 2.5 (biases on q, k and v) and Qwen3 (norms on q and k); otherwise Llama's block."""

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, read_fields, read_num_layers
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows
from jaxserve.models.layer_tensors import decoder_specs

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen2 or Qwen2.5 config.json."""
    config = {**_DEFAULTS, **config}
    return llama.arch(config, windows=_windows(config), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen3 config.json."""
    config = {**_DEFAULTS, "head_dim": 128, **config}
    read_fields(config, {"head_dim": SIZE})  # null is not allowed
    return llama.arch(config, windows=_windows(config), qk_norm="shared", mlp_bias=False)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types` if given, else in layers from `max_window_layers` on."""
    num_full = read_fields(config, {"max_window_layers": COUNT})["max_window_layers"]
    return read_windows(
        config, read_num_layers(config), lambda layer: FULL if layer < num_full else SLIDING, has_switch=True
    )


QWEN2 = ModelFamily(qwen2_arch, decoder_specs, block, rms_norm, FOLDS)
QWEN3 = ModelFamily(qwen3_arch, decoder_specs, block, rms_norm, FOLDS)
