"""Mistral: Llama's block, with a sliding window in every layer of some checkpoints."""

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import SIZE, read_fields

_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_FIELDS = {"num_hidden_layers": SIZE, "sliding_window": SIZE.or_null()}


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Mistral config.json."""
    config = {**_DEFAULTS, **config}
    values = read_fields(config, _FIELDS)
    windows = (values["sliding_window"],) * values["num_hidden_layers"]
    return llama.arch(config, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


MISTRAL = ModelFamily(arch, llama.param_specs, llama.block, rms_norm, llama.FOLDS)
