"""GPT-NeoX (Pythia), Phi-1 and 2, and StarCoder2: layer norms, biases and GELU with rotary embeddings."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.api.schema import FieldType
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import Norm, layer_norm
from jaxserve.layers.rope import pair_halves
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import Heads, attention, block
from jaxserve.models.family import UNGATED_FOLDS, Fold, ModelFamily
from jaxserve.models.hf_config import FRACTION, POSITIVE, SWITCH, HfConfig, one_of, read_field, read_fields
from jaxserve.models.layer_kinds import same_windows
from jaxserve.models.layer_tensors import TensorNames
from jaxserve.models.params import Params

_NEOX_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "rotary_emb_base": 1e4,
    "use_parallel_residual": True,
    "attention_bias": True,
}
_NEOX_FIELDS = {
    "use_parallel_residual": SWITCH,
    "attention_bias": SWITCH,
    "rotary_pct": FRACTION,
    "rotary_emb_base": POSITIVE,
    "rope_theta": POSITIVE.or_null(),
    "head_dim": FieldType(
        "null, as hidden_size / num_attention_heads is the size of heads", lambda value: value is None
    ),
}
_PHI_DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False}
_NO_QK_NORM = FieldType("false: norms of q and k are not supported", lambda value: value is False)
_STARCODER2_DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "sliding_window": None,
    "use_bias": True,
    "tie_word_embeddings": True,
}


def neox_arch(config: HfConfig) -> ArchConfig:
    """Parse a GPT-NeoX config.json."""
    values = read_fields(config, _NEOX_FIELDS)
    shared = {
        "num_key_value_heads": None,
        "rope_theta": values["rotary_emb_base"],
        "partial_rotary_factor": values["rotary_pct"],
    }
    bias = values["attention_bias"]
    return _arch(
        {**config, **shared},
        "layer_norm_eps",
        fraction=values["rotary_pct"],
        parallel=values["use_parallel_residual"],
        qkv_bias=bias,
        o_bias=bias,
    )


def phi_arch(config: HfConfig) -> ArchConfig:
    """Parse a Phi-1, 1.5 or 2 config.json."""
    read_field(config, "qk_layernorm", _NO_QK_NORM)
    return _arch(config, "layer_norm_eps", fraction=0.5, parallel=True, qkv_bias=True, o_bias=True)


def starcoder2_arch(config: HfConfig) -> ArchConfig:
    """Parse a StarCoder2 config.json."""
    bias, windows = read_field(config, "use_bias", SWITCH), same_windows(config)
    return _arch(config, "norm_epsilon", windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _arch(config: HfConfig, epsilon: str, *, fraction: float | None = None, **fields: Any) -> ArchConfig:
    """Parse Llama's fields, two of them under other names or with other values."""
    values = read_fields(config, {"hidden_act": one_of(ACTIVATIONS), epsilon: POSITIVE})
    return llama.arch(
        {**config, "hidden_act": "silu", "rms_norm_eps": values[epsilon]},
        rope_fraction=fraction,
        activation=values["hidden_act"],
        **{"mlp_bias": True, **fields},
    )


def _project_fused(
    p: Params, x: Float[Array, "T D"], tokens: TokenContext, layer: LayerContext, arch: ArchConfig, norm: Norm | None
) -> Heads:
    """Return queries, keys and values; the matrix has each head's three next to each other."""
    attention = layer.attention
    fused = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias"))
    by_head = fused.reshape(len(x), attention.num_heads, 3, attention.head_dim)
    q, k, v = (part[:, :, 0] for part in jnp.split(by_head, 3, axis=2))
    return pair_halves(q, attention.rope), pair_halves(k, attention.rope), v


_neox_block = partial(block, attention=partial(attention, project=_project_fused))
_NEOX_NAMES = TensorNames(
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layers="gpt_neox.layers",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    norm_parts=("weight", "bias"),
)
_PHI_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    out="self_attn.dense",
    mlp_norm=None,
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    norm_parts=("weight", "bias"),
    head_bias=True,
)
_STARCODER2_NAMES = TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj", norm_parts=("weight", "bias"))
# Factors cannot move to a norm that two matrices read, or to values stored between queries and keys.
_NEOX_FOLDS, _PHI_FOLDS = (UNGATED_FOLDS[0], UNGATED_FOLDS[2]), (Fold("qkv_proj", "o_proj", part=2),)
FAMILIES = {
    "GPTNeoXForCausalLM": ModelFamily(neox_arch, _NEOX_NAMES, _NEOX_DEFAULTS, _neox_block, layer_norm, _NEOX_FOLDS),
    "PhiForCausalLM": ModelFamily(phi_arch, _PHI_NAMES, _PHI_DEFAULTS, norm=layer_norm, folds=_PHI_FOLDS),
    "Starcoder2ForCausalLM": ModelFamily(
        starcoder2_arch, _STARCODER2_NAMES, _STARCODER2_DEFAULTS, norm=layer_norm, folds=UNGATED_FOLDS
    ),
}
