"""Phi-3 and Phi-4: Llama's layers with fused projections; some models have windows, LongRoPE or partial RoPE."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import TABLE, read_fields
from jaxserve.models.layer_kinds import same_windows
from jaxserve.models.layer_tensors import Names, decoder_specs

_ORIGINAL = "original_max_position_embeddings"
_DEFAULTS = {"max_position_embeddings": 4096, _ORIGINAL: 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
_FIELDS = {
    "rope_scaling": TABLE.or_null(),
    "rope_parameters": TABLE.or_null(),
}
_OLD_NAMES = ("su", "yarn")  # LongRoPE names in early checkpoints
_NAMES = Names(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2)


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Phi-3 or Phi-4 config.json."""
    config = {**_DEFAULTS, **config}
    values = read_fields(config, _FIELDS)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values[name] or {}
        if rope.get("rope_type", rope.get("type")) in _OLD_NAMES:
            config[name] = {**rope, "rope_type": "longrope"}
    return llama.arch(
        config, rope_fraction=1.0, windows=same_windows(config), qkv_bias=False, o_bias=False, mlp_bias=False
    )


PHI3 = ModelFamily(arch, partial(decoder_specs, names=_NAMES), block, rms_norm, FOLDS)
