"""GLM-4 (9B and 32B, dense): interleaved RoPE on half of each head; `Glm4ForCausalLM` also has post-norms."""

import dataclasses

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def arch(config: HfConfig) -> ArchConfig:
    """Parse a dense GLM or GLM-4 config.json."""
    return llama.arch(config, rope_fraction=0.5, interleaved=True, o_bias=False, mlp_bias=False)


_GLM_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",) * 2)
_GLM4_NAMES = dataclasses.replace(
    _GLM_NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)
FAMILIES = {
    "GlmForCausalLM": ModelFamily(arch, _GLM_NAMES, _DEFAULTS),
    "Glm4ForCausalLM": ModelFamily(arch, _GLM4_NAMES, _DEFAULTS),
}
