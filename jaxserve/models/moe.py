"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: Llama's attention with experts in place of the MLP."""

from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, SWITCH, HfConfig, read_field, read_fields
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows, same_windows
from jaxserve.models.layer_tensors import GATED_SHARED, MoeNames, TensorNames

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
    """Return whether a value is a list of layer indices."""
    return isinstance(value, list) and all(COUNT.holds(layer) for layer in value)


_SPARSE_FIELDS = {
    "num_hidden_layers": SIZE,
    "decoder_sparse_step": SIZE,
    "mlp_only_layers": FieldType("a list of layers", _is_layers).or_null(),
}
_QWEN2_DEFAULTS = {
    **_QWEN3_DEFAULTS,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
    "max_window_layers": 28,
}
_QWEN2_FIELDS = {"qkv_bias": SWITCH, "max_window_layers": COUNT}
_QWEN3_VL_DEFAULTS = {
    **_QWEN3_DEFAULTS,
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
    config: HfConfig,
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


def read_qwen_experts(config: HfConfig, *, has_shared: bool = False) -> Experts:
    """Read Qwen's experts; `has_shared` specifies whether the model has shared experts alongside them."""
    return read_experts(
        config,
        size="moe_intermediate_size",
        normalized=read_field(config, "norm_topk_prob", SWITCH),
        shared_ffn_size=read_field(config, "shared_expert_intermediate_size", SIZE) if has_shared else 0,
    )


def mixtral_arch(config: HfConfig) -> ArchConfig:
    """Parse a Mixtral config.json."""
    experts, windows = read_experts(config), same_windows(config)
    return llama.arch(config, experts=experts, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


def qwen2_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen2-MoE config.json."""
    values = read_fields(config, _QWEN2_FIELDS)

    def default(layer: int) -> str:
        """Return a layer's attention type by its index."""
        return FULL if layer % 2 or layer >= values["max_window_layers"] else SLIDING

    windows = read_windows(config, default, has_switch=True)
    return _qwen_arch(config, has_shared=True, windows=windows, qkv_bias=values["qkv_bias"], o_bias=False)


def qwen3_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen3-MoE config.json."""
    if not read_field(config, "use_sliding_window", SWITCH):
        config = {**config, "sliding_window": None}
    return _qwen_arch(config, windows=same_windows(config), qk_norm="shared")


def qwen3_vl_arch(config: HfConfig) -> ArchConfig:
    """Parse the text part in a Qwen3-VL-MoE config.json; expert weights always sum to one."""
    return _qwen_arch({**config, "norm_topk_prob": True}, qk_norm="shared")


def _qwen_arch(config: HfConfig, *, has_shared: bool = False, **overrides: Any) -> ArchConfig:
    """Parse the fields that Qwen's MoE models have; `overrides` as in `llama.arch`."""
    experts = read_qwen_experts(config, has_shared=has_shared)
    return llama.arch(config, experts=experts, dense_layers=dense_layers(config), mlp_bias=False, **overrides)


def dense_layers(config: HfConfig) -> frozenset[int]:
    """Return the layers with an MLP instead of experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    values = read_fields(config, _SPARSE_FIELDS)
    step, only = values["decoder_sparse_step"], values["mlp_only_layers"] or []
    return frozenset(layer for layer in range(values["num_hidden_layers"]) if layer in only or (layer + 1) % step)


def olmoe_arch(config: HfConfig) -> ArchConfig:
    """Parse an OLMoE config.json."""
    experts = read_experts(config, normalized=read_fields(config, _OLMOE_FIELDS)["norm_topk_prob"])
    return llama.arch(config, experts=experts, qk_norm="whole", mlp_bias=False)


_FOLDS = FOLDS[:2]  # the norm before the experts also feeds the router
_MIXTRAL_NAMES = TensorNames(
    moe=MoeNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", parts=("w1", "w3", "w2"))
)
_QWEN2_NAMES = TensorNames(moe=GATED_SHARED)
_QWEN3_VL_NAMES = TensorNames(moe=MoeNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")))
FAMILIES = {
    "MixtralForCausalLM": ModelFamily(mixtral_arch, _MIXTRAL_NAMES, _MIXTRAL_DEFAULTS, folds=_FOLDS),
    "Qwen2MoeForCausalLM": ModelFamily(qwen2_arch, _QWEN2_NAMES, _QWEN2_DEFAULTS, folds=_FOLDS),
    "Qwen3MoeForCausalLM": ModelFamily(qwen3_arch, defaults=_QWEN3_DEFAULTS, folds=_FOLDS),
    "Qwen3VLMoeForConditionalGeneration": ModelFamily(qwen3_vl_arch, _QWEN3_VL_NAMES, _QWEN3_VL_DEFAULTS, folds=_FOLDS),
    "OlmoeForCausalLM": ModelFamily(olmoe_arch, defaults=_OLMOE_DEFAULTS, folds=_FOLDS),
}
