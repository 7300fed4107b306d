"""Phi-3 and Phi-4: Llama's layers with fused projections; some models have windows, LongRoPE or partial RoPE."""

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import ORIGINAL_LENGTH, TABLE, HfConfig, read_fields
from jaxserve.models.layer_kinds import same_windows
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {"max_position_embeddings": 4096, ORIGINAL_LENGTH: 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
_OLD_NAMES = ("su", "yarn")  # LongRoPE names in early checkpoints
_NAMES = TensorNames(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2)


def arch(config: HfConfig) -> ArchConfig:
    """Parse a Phi-3 or Phi-4 config.json."""
    tables = read_fields(config, dict.fromkeys(("rope_scaling", "rope_parameters"), TABLE.or_null()))
    for name, rope in tables.items():
        if rope and rope.get("rope_type", rope.get("type")) in _OLD_NAMES:
            config = {**config, name: {**rope, "rope_type": "longrope"}}
    return llama.arch(
        config, rope_fraction=1.0, windows=same_windows(config), qkv_bias=False, o_bias=False, mlp_bias=False
    )


FAMILIES = {"Phi3ForCausalLM": ModelFamily(arch, _NAMES, _DEFAULTS)}
