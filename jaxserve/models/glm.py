"""GLM-4 (9B and 32B, dense): half of each head rotated, in neighbouring pairs; norms behind attention and MLP too."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.params import ParamSpec
from jaxserve.models.post_normed import block, post_norm_specs

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse the config.json of a dense GLM or GLM-4 model."""
    parsed = llama.arch({**_DEFAULTS, **config}, rope_fraction=0.5, o_bias=False, mlp_bias=False)
    return parsed.with_attention(rope=[rope and dataclasses.replace(rope, interleaved=True) for rope in parsed.ropes])


_glm_specs = partial(llama.fused_param_specs, names={"gate_up_proj": "mlp.gate_up_proj"})


def glm4_param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return GLM's rows, and those of the norms behind attention and MLP."""
    return _glm_specs(arch) + post_norm_specs(arch, "post_self_attn_layernorm", "post_mlp_layernorm")


GLM = ModelFamily(arch, _glm_specs, llama.block, rms_norm, llama.FOLDS)
GLM4 = ModelFamily(arch, glm4_param_specs, block, rms_norm, llama.FOLDS)
