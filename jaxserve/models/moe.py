"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: Llama's attention with experts in place of the MLP."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, SWITCH, read_fields, read_num_layers
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows, same_windows
from jaxserve.models.layer_tensors import GATED_SHARED, MoeNames, decoder_specs

_MIXTRAL_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
_QWEN3_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and all(COUNT.holds(layer) for layer in value)


_QWEN_FIELDS = {"moe_intermediate_size": SIZE, "norm_topk_prob": SWITCH}
_SPARSE_FIELDS = {
    "num_hidden_layers": SIZE,
    "decoder_sparse_step": SIZE,
    "mlp_only_layers": FieldType("a list of layers", _is_layers).or_null(),
}
_QWEN2_DEFAULTS = {
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
    "max_window_layers": 28,
}
_QWEN2_FIELDS = {
    "shared_expert_intermediate_size": SIZE,
    "qkv_bias": SWITCH,
    "max_window_layers": COUNT,
}
_QWEN3_VL_DEFAULTS = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_OLMOE_DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
    "clip_qkv": None,
}
_OLMOE_FIELDS = {
    "norm_topk_prob": SWITCH,
    "clip_qkv": FieldType("null: bounds of q, k and v are not supported", lambda value: value is None),
}


def read_experts(
    config: Mapping[str, Any],
    *,
    size: str = "intermediate_size",
    per_token: str = "num_experts_per_tok",
    **fields: Any,
) -> Experts:
    """Read the number of experts, from `num_local_experts` or `num_experts`, and their size.

    Args:
        config: content of config.json.
        size: field with an expert's feed-forward size.
        per_token: field with the number of experts per token.
        fields: other fields in `Experts`.
    """
    count = config.get("num_local_experts")
    count = config.get("num_experts") if count is None else count
    values = read_fields({**config, "num_experts": count}, {"num_experts": SIZE, per_token: SIZE, size: SIZE})
    experts = Experts(values["num_experts"], values[per_token], values[size], **fields)
    if experts.per_token > experts.num_experts:
        raise ConfigError(f"{per_token} must be at most num_experts, got {experts.per_token} and {experts.num_experts}")
    return experts


def mixtral_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Mixtral config.json."""
    config = {**_MIXTRAL_DEFAULTS, **config}
    experts = read_experts(config)
    return llama.arch(
        config, experts=experts, windows=same_windows(config), qkv_bias=False, o_bias=False, mlp_bias=False
    )


def qwen2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen2-MoE config.json."""
    config = {**_QWEN3_DEFAULTS, **_QWEN2_DEFAULTS, **config}
    values = read_fields(config, _QWEN2_FIELDS)

    def default(layer: int) -> str:
        return FULL if layer % 2 or layer >= values["max_window_layers"] else SLIDING

    windows = read_windows(config, read_num_layers(config), default, has_switch=True)
    shared = values["shared_expert_intermediate_size"]
    return _qwen_arch(config, shared_ffn_size=shared, windows=windows, qkv_bias=values["qkv_bias"], o_bias=False)


def qwen3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen3-MoE config.json."""
    config = {**_QWEN3_DEFAULTS, **config}
    is_wide = not read_fields(config, {"use_sliding_window": SWITCH})["use_sliding_window"]
    windows = same_windows({**config, "sliding_window": None} if is_wide else config)
    return _qwen_arch(config, windows=windows, qk_norm="shared")


def qwen3_vl_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse the text part in a Qwen3-VL-MoE config.json; expert weights always sum to one."""
    config = {**_QWEN3_DEFAULTS, **_QWEN3_VL_DEFAULTS, **config, "norm_topk_prob": True}
    return _qwen_arch(config, qk_norm="shared")


def _qwen_arch(config: Mapping[str, Any], *, shared_ffn_size: int = 0, **overrides: Any) -> ArchConfig:
    values = read_fields(config, _QWEN_FIELDS)
    return llama.arch(
        config,
        experts=read_experts(
            config,
            size="moe_intermediate_size",
            normalized=values["norm_topk_prob"],
            shared_ffn_size=shared_ffn_size,
        ),
        dense_layers=dense_layers(config),
        mlp_bias=False,
        **overrides,
    )


def dense_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Read which layers have an MLP instead of experts."""
    values = read_fields(config, _SPARSE_FIELDS)
    step, only = values["decoder_sparse_step"], values["mlp_only_layers"] or []
    return frozenset(layer for layer in range(values["num_hidden_layers"]) if layer in only or (layer + 1) % step)


def olmoe_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMoE config.json."""
    config = {**_OLMOE_DEFAULTS, **config}
    values = read_fields(config, _OLMOE_FIELDS)
    return llama.arch(
        config, experts=read_experts(config, normalized=values["norm_topk_prob"]), qk_norm="whole", mlp_bias=False
    )


_FOLDS = FOLDS[:2]  # the norm before the experts also feeds the router
_MIXTRAL = MoeNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", parts=("w1", "w3", "w2"))
_QWEN3_VL = MoeNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
MIXTRAL = ModelFamily(mixtral_arch, partial(decoder_specs, moe=_MIXTRAL), block, rms_norm, _FOLDS)
QWEN2_MOE = ModelFamily(qwen2_arch, partial(decoder_specs, moe=GATED_SHARED), block, rms_norm, _FOLDS)
QWEN3_MOE = ModelFamily(qwen3_arch, decoder_specs, block, rms_norm, _FOLDS)
QWEN3_VL_MOE = ModelFamily(qwen3_vl_arch, partial(decoder_specs, moe=_QWEN3_VL), block, rms_norm, _FOLDS)
OLMOE = ModelFamily(olmoe_arch, decoder_specs, block, rms_norm, _FOLDS)
