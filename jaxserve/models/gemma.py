"""Gemma 2 and 3: norms before and after attention and MLP, GeGLU, scaled embeddings, local and global layers."""

import dataclasses
import math
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.layers.norm import offset_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import POSITIVE, SIZE, HfConfig, one_of, read_field, read_fields, read_rope
from jaxserve.models.layer_kinds import by_kind, full_every, read_windows
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS = {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}
_FIELDS = {
    "hidden_activation": one_of(["gelu_pytorch_tanh"]),
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": POSITIVE.or_null(),
    "final_logit_softcapping": POSITIVE.or_null(),
    "rope_local_base_freq": POSITIVE.or_null(),
}


def gemma2_arch(config: HfConfig) -> ArchConfig:
    """Parse a Gemma 2 config.json."""
    read_field(config, "sliding_window_pattern", FieldType("2 or null", lambda value: value in (2, None)))
    return _arch(config, period=2)


def gemma3_arch(config: HfConfig) -> ArchConfig:
    """Parse a Gemma 3 text config.json, which may omit fields with default values."""
    fields = {"sliding_window_pattern": SIZE, "attn_logit_softcapping": FieldType("null", lambda value: value is None)}
    values = read_fields(config, {**fields, "rope_local_base_freq": POSITIVE})
    full, local = by_kind(config, float(values["rope_local_base_freq"]))
    arch, local_rope = _arch(full, values["sliding_window_pattern"], qk_norm="shared"), read_rope(local)
    ropes = [rope if window is None else local_rope for rope, window in zip(arch.ropes, arch.windows, strict=True)]
    # As in vLLM: checkpoints specify the extended length, so the linear RoPE factor is not applied again.
    longest = min(arch.max_position, read_field(config, "max_position_embeddings", SIZE))
    return dataclasses.replace(arch.with_attention(rope=ropes), max_position=longest)


def _arch(config: HfConfig, period: int, **overrides: Any) -> ArchConfig:
    """Parse the fields that Gemma 2 and 3 have.

    Args:
        config: content of config.json.
        period: number of layers after which one has full attention.
        overrides: as in `llama.arch`.
    """
    values = read_fields(config, _FIELDS)
    arch = llama.arch(
        {**config, "hidden_act": "silu"},  # the activation has another name and value here
        windows=read_windows(config, full_every(period)),
        mlp_bias=False,
        activation="geglu",
        scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        soft_cap=values["attn_logit_softcapping"],
        logit_soft_cap=values["final_logit_softcapping"],
        **overrides,
    )
    return dataclasses.replace(arch, embed_scale=math.sqrt(arch.hidden_size))


GEMMA_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_init="zeros",
)
FAMILIES = {
    "Gemma2ForCausalLM": ModelFamily(gemma2_arch, GEMMA_NAMES, _GEMMA2_DEFAULTS, norm=offset_norm),
    "Gemma3ForCausalLM": ModelFamily(gemma3_arch, GEMMA_NAMES, _GEMMA3_DEFAULTS, norm=offset_norm),
}
