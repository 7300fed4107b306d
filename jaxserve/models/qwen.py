"""Qwen2 and 2.5 (biases on q, k, v) and Qwen3 (norms on q and k): Llama's block otherwise."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig, require

_FULL, _SLIDING = "full_attention", "sliding_attention"


def qwen2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Read a Qwen2 or Qwen2.5 config.json."""
    return llama.arch(config, windows=_windows(config), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Read a Qwen3 config.json."""
    return llama.arch(
        config, windows=_windows(config), qk_norm=True, head_dim=config.get("head_dim") or 128, mlp_bias=False
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer, from `layer_types` where given, else the last layers from `max_window_layers` on."""
    (layers,) = require(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    num_full = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [_FULL if layer < num_full else _SLIDING for layer in range(layers)]
    if len(kinds) != layers or not {_FULL, _SLIDING}.issuperset(kinds):
        raise ConfigError(f"layer_types must be {layers} of {_FULL!r} and {_SLIDING!r}, got {kinds}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
