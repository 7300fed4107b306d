"""Mistral: Llama's block, with a sliding window over every layer in some checkpoints."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig, require


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Read a Mistral config.json."""
    (layers,) = require(config, "num_hidden_layers")
    windows = (config.get("sliding_window", 4096),) * layers
    return llama.arch(config, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)
