"""Random tiny checkpoints of every family, written by transformers, with the model that wrote them as oracle."""

import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
import ml_dtypes
import numpy as np
import transformers
from numpy.typing import NDArray
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from jaxserve.models import registry
from jaxserve.weights import safetensors_store
from jaxserve.weights.rows import hf_shapes
from tests.oracles import Missing, has_torch, torch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
if has_torch:
    torch.set_num_threads(1)  # more threads than free cores make tiny models a hundred times slower
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "gemma4": transformers.Gemma4TextConfig,
    "gemma4_moe": transformers.Gemma4TextConfig,
    "gpt2": transformers.GPT2Config,
    "gpt_neo": transformers.GPTNeoConfig,
    "granite": transformers.GraniteConfig,
    "granite_swa": transformers.GraniteSWAConfig,
    "granite_moe": transformers.GraniteMoeConfig,
    "granite_moe_shared": transformers.GraniteMoeSharedConfig,
    "granite_moe_hybrid": transformers.GraniteMoeHybridConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "phi3": transformers.Phi3Config,
    "smollm3": transformers.SmolLM3Config,
    "seed_oss": transformers.SeedOssConfig,
    "arcee": transformers.ArceeConfig,
    "ministral3": transformers.Ministral3Config,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "glm": transformers.GlmConfig,
    "glm4": transformers.Glm4Config,
    "cohere": transformers.CohereConfig,
    "cohere2": transformers.Cohere2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "phi": transformers.PhiConfig,
    "starcoder2": transformers.Starcoder2Config,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "deepseek_v32": transformers.DeepseekV32Config,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "glm_moe_dsa": transformers.GlmMoeDsaConfig,
    "gpt_oss": transformers.GptOssConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
}
FAMILIES = tuple(CONFIGS)
# They differ most in their layers; by default tests that are alike for all families take only these.
VARIED = ("llama", "gpt2", "gemma3", "gemma4", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_5")
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # families whose queries choose their tokens
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", *INDEXED)  # families that attend over latents
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # families with gated delta nets
MIXTURES = (  # families with experts
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", *LATENT, "qwen3_next", "qwen3_5_moe", "gemma4_moe"),
    *("granite_moe", "granite_moe_shared", "granite_moe_hybrid"),
)
PARTIAL = ("phi3", "glm", "glm4", "gpt_neox", "phi")  # families that may rotate the first dimensions of heads alone
_NOT_IN_GPT = (
    *("attention_bias", "head_dim", "mlp_bias", "num_key_value_heads"),
    *("rope_parameters", "rope_scaling", "rope_theta"),
)
_GPT_NAMES: dict[str, str | None] = {
    **dict.fromkeys(_NOT_IN_GPT),
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_LATENT_NAMES: dict[str, str | None] = {
    "num_experts": "n_routed_experts",
    "head_dim": None,
    "mlp_bias": None,
    "num_key_value_heads": None,  # all heads read the same latents: `build_config` gives as many as heads
}
_GEMMA4_NAMES = {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts", "mlp_bias": None}
_GRANITE_MOE_NAMES = {"num_experts": "num_local_experts", "head_dim": None, "mlp_bias": None}
# Names of fields in families that do not have Llama's; a family has none of those that it maps to None.
FIELD_NAMES: dict[str, dict[str, str | None]] = {
    "gemma2": {"hidden_act": "hidden_activation"},
    "gemma3": {"hidden_act": "hidden_activation"},
    "gemma4": _GEMMA4_NAMES,
    "gemma4_moe": _GEMMA4_NAMES,
    "gpt2": {
        **_GPT_NAMES,
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "gpt_neo": {**_GPT_NAMES, "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    **dict.fromkeys(("granite_moe", "granite_moe_shared", "granite_moe_hybrid"), _GRANITE_MOE_NAMES),
    "mixtral": {"num_experts": "num_local_experts", "attention_bias": None, "mlp_bias": None},
    "qwen2_moe": {"head_dim": None, "attention_bias": "qkv_bias", "mlp_bias": None},
    "qwen3_moe": {"mlp_bias": None},
    "olmoe": {"head_dim": None, "mlp_bias": None},
    "phi3": {"head_dim": None, "attention_bias": None, "mlp_bias": None},
    "smollm3": {"head_dim": None},
    "seed_oss": {},
    "arcee": {"head_dim": None},
    "ministral3": {"attention_bias": None, "mlp_bias": None},
    "olmo2": {"head_dim": None, "mlp_bias": None},
    "olmo3": {"head_dim": None, "mlp_bias": None},
    "glm": {"mlp_bias": None},
    "glm4": {"mlp_bias": None},
    "cohere": {"head_dim": None, "mlp_bias": None, "rms_norm_eps": "layer_norm_eps"},
    "cohere2": {"head_dim": None, "mlp_bias": None, "rms_norm_eps": "layer_norm_eps"},
    "gpt_neox": {
        **dict.fromkeys(("head_dim", "num_key_value_heads", "mlp_bias")),
        "rms_norm_eps": "layer_norm_eps",
    },
    "phi": {"head_dim": None, "attention_bias": None, "mlp_bias": None, "rms_norm_eps": "layer_norm_eps"},
    "starcoder2": {"head_dim": None, "attention_bias": None, "mlp_bias": None, "rms_norm_eps": "norm_epsilon"},
    "deepseek_v2": _LATENT_NAMES,
    "deepseek_v3": _LATENT_NAMES,
    "glm4_moe_lite": _LATENT_NAMES,
    **dict.fromkeys(INDEXED, _LATENT_NAMES),
    "gpt_oss": {"num_experts": "num_local_experts", "mlp_bias": None},
    "qwen3_next": {"mlp_bias": None},
    "qwen3_5": {"mlp_bias": None},
    "qwen3_5_moe": {"mlp_bias": None, "intermediate_size": None},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
}
# Sequences of more than 16 tokens have the long factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
}
GROWING = {**ROPES["yarn"], "llama_4_scaling_beta": 0.1}
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
FACTORS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}
# Fewer tokens than prompts in tests have; with few heads most scores would be zero, and the order arbitrary.
_INDEX_SIZES = {"index_topk": 8, "index_head_dim": 20, "index_n_heads": 16}
_LATENT_SIZES = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 3,
    "topk_group": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
STATE_TYPES = ["linear_attention", "full_attention"]
_DELTA_SIZES = {
    "head_dim": 16,
    "layer_types": STATE_TYPES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
_GEMMA4_SIZES = {"head_dim": 16, "sliding_window": 9}
_SHARED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "layer_types": LAYER_TYPES},
    "gemma4": {
        **_GEMMA4_SIZES,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *LAYER_TYPES * 2],  # the first two have a page of the third's size
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_moe": {
        **_GEMMA4_SIZES,
        "layer_types": LAYER_TYPES,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "enable_moe_block": True,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["local", "global"], 1]], "window_size": 9},
    "granite": FACTORS,
    "granite_swa": {**FACTORS, "sliding_window": 9, "layer_types": LAYER_TYPES, "layer_rope_theta": [1e4, 0]},
    "granite_moe": {**FACTORS, "num_experts": 5, "num_experts_per_tok": 2},
    "granite_moe_shared": {**FACTORS, "num_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 56},
    "granite_moe_hybrid": {
        **FACTORS,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 56,
        "layer_types": STATE_TYPES,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
    },
    "mixtral": {"num_experts": 5, "sliding_window": 9},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": 9, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {"head_dim": 12, "attention_out_bias": True},
    "arcee": {},
    "ministral3": {"head_dim": 16, "rope_parameters": GROWING},
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "layer_types": LAYER_TYPES},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": 9, "layer_types": LAYER_TYPES, "logit_scale": 0.5},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 9},
    "deepseek_v2": {**_LATENT_SIZES, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT_SIZES, "norm_topk_prob": True},
    "glm4_moe_lite": {**_LATENT_SIZES, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**_LATENT_SIZES, **_INDEX_SIZES},
    "glm_moe_dsa": {
        **_LATENT_SIZES,
        **_INDEX_SIZES,
        "n_group": 1,
        "topk_group": 1,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
    "gpt_oss": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 9,
        "swiglu_limit": 0.5,
        "rope_parameters": {**ROPES["yarn"], "truncate": False},
    },
    "qwen3_next": {**_DELTA_SIZES, **_SHARED_EXPERTS},
    "qwen3_5": _DELTA_SIZES,
    "qwen3_5_moe": {**_DELTA_SIZES, **_SHARED_EXPERTS},
}
_WEIGHT_STD = 0.08  # several times the usual, so that logits differ by more than rounding


def build_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Return a tiny config of `family`: two layers, 131 tokens; `overrides` by Llama's names of fields, or its own."""
    fields = {**SIZES, **_FAMILY_SIZES[family], **overrides}
    if family.startswith("gemma4"):
        fields.setdefault("vocab_size_per_layer_input", fields["vocab_size"])
    if (rope := fields.get("rope_parameters")) is LONGROPE:
        fields["rope_parameters"] = rope | longrope(head_dim_of(family, fields), rope, random.Random(0))
    own = {"num_key_value_heads": fields["num_attention_heads"]} if family in LATENT else {}
    return CONFIGS[family](**renamed(family, fields), **own)


def renamed(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of Llama by their names in `family`, without those that it does not have."""
    names = {name: FIELD_NAMES.get(family, {}).get(name, name) for name in fields}
    return {own: fields[name] for name, own in names.items() if own is not None}


def hf_dict(family: str, **overrides: Any) -> dict[str, Any]:
    """Return `build_config` as the content of a config.json."""
    config = build_config(family, **overrides)
    return {**config.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def build_model(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Return a model of `build_config` in float32 with every parameter random, norms and biases included."""
    model = transformers.AutoModelForCausalLM.from_config(build_config(family, **overrides), dtype=torch.float32).eval()
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # torch's grouped product takes no odd sizes
    randomize(model, seed)
    return model


def randomize(model: transformers.PreTrainedModel, seed: int = 0) -> None:
    """Make every parameter random, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _WEIGHT_STD
            is_factor = "norm" in name or ".ln_" in name or name.endswith("scale")
            parameter.copy_(noise + (1.0 if is_factor else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _WEIGHT_STD)
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * _WEIGHT_STD)


def write_checkpoint(
    path: Path, family: str, seed: int = 0, *, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
) -> transformers.PreTrainedModel:
    """Write a random checkpoint in `dtype` to `path`; return the model in float32, with the values as written."""
    if not has_torch:
        write_plain_checkpoint(path, family, seed, dtype=dtype, max_shard_size=max_shard_size, **overrides)
        return Missing()
    model = build_model(family, seed, **overrides)
    scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    for tensor in (*model.parameters(), *scalars):  # rotary buffers stay float32 in the oracle
        tensor.data = tensor.data.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(path, max_shard_size=max_shard_size)
    for tensor in (*model.parameters(), *scalars):
        tensor.data = tensor.data.float()
    return model


def write_plain_checkpoint(
    path: Path, family: str, seed: int = 0, *, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
) -> None:
    """Write a random checkpoint, with other values than `write_checkpoint`, without torch.

    Names and shapes of tensors are those that jaxserve reads, so that it is no oracle by itself.
    """
    config = hf_dict(family, **overrides) | {"dtype": dtype}
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for row in sorted(registry.param_specs(registry.from_hf_config(config)), key=lambda row: row.hf_names):
        for name, shape in hf_shapes(row).items():
            noise = rng.standard_normal(shape, np.float32) * np.float32(_WEIGHT_STD)
            tensors[name] = (noise + (row.init == "ones")).astype(getattr(ml_dtypes, dtype, dtype))
    path.mkdir(parents=True, exist_ok=True)
    max_bytes = int(max_shard_size[:-2]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[max_shard_size[-2:]]
    safetensors_store.write_tensors(path, tensors, max_shard_bytes=max_bytes)
    safetensors_store.write_config(path, config)


def reference_logits(model: transformers.PreTrainedModel, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return logits [T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor(token_ids, dtype=torch.long)[None]).logits[0].numpy()


def head_size(family: str, size: int) -> int:
    """Return the size of heads for a random width; rotations need an even one, where no other can be given."""
    is_free = "head_dim" in renamed(family, {"head_dim": size}) or not renamed(family, {"rope_parameters": {}})
    return size if is_free else size + size % 2


def head_dim_of(family: str, overrides: dict[str, Any]) -> int:
    """Return the size of heads in a family."""
    if "head_dim" in renamed(family, overrides):
        return int(overrides["head_dim"])
    return int(overrides["hidden_size"]) // int(overrides["num_attention_heads"])


def longrope(head_dim: int, rope: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random factors for the pairs of a partly rotated head."""
    num_pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
    factors = {name: [rng.uniform(1, 8) for _ in range(num_pairs)] for name in ("short_factor", "long_factor")}
    return {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
