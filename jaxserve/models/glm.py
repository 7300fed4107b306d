"""GLM-4 (9B and 32B, dense): interleaved RoPE on half of each head; `Glm4ForCausalLM` also has post-norms."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.layer_tensors import Names, decoder_specs

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a dense GLM or GLM-4 config.json."""
    parsed = llama.arch({**_DEFAULTS, **config}, rope_fraction=0.5, o_bias=False, mlp_bias=False)
    return parsed.with_attention(rope=[rope and dataclasses.replace(rope, interleaved=True) for rope in parsed.ropes])


_GLM_NAMES = Names(gate_up=("mlp.gate_up_proj",) * 2)
_GLM4_NAMES = dataclasses.replace(
    _GLM_NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)
GLM = ModelFamily(arch, partial(decoder_specs, names=_GLM_NAMES), block, rms_norm, FOLDS)
GLM4 = ModelFamily(arch, partial(decoder_specs, names=_GLM4_NAMES), block, rms_norm, FOLDS)
