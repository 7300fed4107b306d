"""Random tiny checkpoints of every family, written by transformers, with the model that wrote them as oracle."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
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
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "gpt_oss": transformers.GptOssConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
}
FAMILIES = tuple(CONFIGS)
# Together they have every kind of layer; by default tests that are alike for all families take only these.
VARIED = ("llama", "gpt2", "gemma3", "gemma4", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_5")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # families that attend over latents
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # families with gated delta nets
MIXTURES = (  # families with experts
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", *LATENT, "qwen3_next", "qwen3_5_moe", "gemma4_moe"),
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
_SIZES = {
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
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_FACTORS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}
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
_HYBRID_TYPES = ["linear_attention", "full_attention"]
_HYBRID_SIZES = {
    "head_dim": 16,
    "layer_types": _HYBRID_TYPES,
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
    "gemma3": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "layer_types": _LAYER_TYPES},
    "gemma4": {
        **_GEMMA4_SIZES,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *_LAYER_TYPES * 2],  # the first two have a page of the third's size
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_moe": {
        **_GEMMA4_SIZES,
        "layer_types": _LAYER_TYPES,
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
    "granite": _FACTORS,
    "granite_swa": {**_FACTORS, "sliding_window": 9, "layer_types": _LAYER_TYPES, "layer_rope_theta": [1e4, 0]},
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
    "olmo3": {"sliding_window": 9, "layer_types": _LAYER_TYPES},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": 9, "layer_types": _LAYER_TYPES, "logit_scale": 0.5},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 9},
    "deepseek_v2": {**_LATENT_SIZES, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT_SIZES, "norm_topk_prob": True},
    "glm4_moe_lite": {**_LATENT_SIZES, "n_group": 1, "topk_group": 1},
    "gpt_oss": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 9,
        "swiglu_limit": 0.5,
        "rope_parameters": {**ROPES["yarn"], "truncate": False},
    },
    "qwen3_next": {**_HYBRID_SIZES, **_SHARED_EXPERTS},
    "qwen3_5": _HYBRID_SIZES,
    "qwen3_5_moe": {**_HYBRID_SIZES, **_SHARED_EXPERTS},
}
_WEIGHT_STD = 0.08  # several times the usual, so that logits differ by more than rounding


def build_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Return a tiny config of `family`: two layers, 131 tokens; `overrides` by Llama's names of fields, or its own."""
    fields = {**_SIZES, **_FAMILY_SIZES[family], **overrides}
    if family.startswith("gemma4"):
        fields.setdefault("vocab_size_per_layer_input", fields["vocab_size"])
    if (rope := fields.get("rope_parameters")) is LONGROPE:
        fields["rope_parameters"] = rope | _longrope(_head_dim(family, fields), rope, random.Random(0))
    own = {"num_key_value_heads": fields["num_attention_heads"]} if family in LATENT else {}
    return CONFIGS[family](**renamed(family, fields), **own)


def renamed(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of Llama by their names in `family`, without those that it does not have."""
    names = {name: FIELD_NAMES.get(family, {}).get(name, name) for name in fields}
    return {own: fields[name] for name, own in names.items() if own is not None}


def hf_dict(family: str, **overrides: Any) -> dict[str, Any]:
    """Return `build_config` as the content of a config.json."""
    config = build_config(family, **overrides)
    name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    return {**config.to_dict(), "architectures": [name]}


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
    model = build_model(family, seed, **overrides)
    scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    for tensor in (*model.parameters(), *scalars):  # rotary buffers stay float32 in the oracle
        tensor.data = tensor.data.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(path, max_shard_size=max_shard_size)
    for tensor in (*model.parameters(), *scalars):
        tensor.data = tensor.data.float()
    return model


def reference_logits(model: transformers.PreTrainedModel, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return logits [T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor(token_ids, dtype=torch.long)[None]).logits[0].numpy()


def _head_size(family: str, size: int) -> int:
    """Return the size of heads for a random width; rotations need an even one, where no other can be given."""
    is_free = "head_dim" in renamed(family, {"head_dim": size}) or not renamed(family, {"rope_parameters": {}})
    return size if is_free else size + size % 2


def _head_dim(family: str, overrides: dict[str, Any]) -> int:
    """Return the size of heads in a family."""
    if "head_dim" in renamed(family, overrides):
        return int(overrides["head_dim"])
    return int(overrides["hidden_size"]) // int(overrides["num_attention_heads"])


def _fraction(head_dim: int, rng: random.Random) -> dict[str, float]:
    """Return a random part of heads that rotates an even number of dimensions."""
    return {"partial_rotary_factor": 2 * rng.randint(1, head_dim // 2) / head_dim}


def _longrope(head_dim: int, rope: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random factors for the pairs of a partly rotated head."""
    num_pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
    factors = {name: [rng.uniform(1, 8) for _ in range(num_pairs)] for name in ("short_factor", "long_factor")}
    return {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}


def _dense(family: str, sizes: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random overrides of the settings that few families have."""

    def maybe(*names: str) -> dict[str, Any]:
        return {name: rng.random() < 0.5 for name in names}

    num_layers, rope = sizes["num_hidden_layers"], dict(sizes["rope_parameters"])
    if family.startswith("gemma4"):
        return _gemma4(family, sizes, rng)
    if family in HYBRID:
        return _hybrid(num_layers, rope, sizes["head_dim"], rng)
    if family in PARTIAL:
        rope |= _fraction(_head_dim(family, sizes), rng)
    if family == "phi3":
        rope |= _longrope(_head_dim(family, sizes), rope, rng)
    if family == "ministral3":
        rope = {**GROWING, "llama_4_scaling_beta": rng.uniform(0.05, 0.5)}
    if family == "olmo3":
        rope = {_LAYER_TYPES[0]: {"rope_type": "default", "rope_theta": 10 ** rng.uniform(3, 5)}, _LAYER_TYPES[1]: rope}
    windows = {"sliding_window": rng.choice([3, 8])}
    types = {"layer_types": rng.choice([None, [rng.choice(_LAYER_TYPES) for _ in range(num_layers)]])}
    no_rope = [rng.randint(0, 1) for _ in range(num_layers)]
    own: dict[str, dict[str, Any]] = {
        "phi3": {"sliding_window": rng.choice([None, 5, 16]), "original_max_position_embeddings": 16},
        "smollm3": {
            **maybe("use_sliding_window", "attention_bias", "mlp_bias"),
            **windows,
            "no_rope_layers": rng.choice([None, no_rope]),
            "no_rope_layer_interval": rng.choice([2, 3]),
        },
        "seed_oss": maybe("attention_bias", "attention_out_bias", "mlp_bias"),
        "arcee": maybe("attention_bias", "mlp_bias"),
        "ministral3": {"sliding_window": rng.choice([None, 5])},
        "olmo2": maybe("attention_bias"),
        "olmo3": {**maybe("attention_bias"), **windows, **types},
        "glm": maybe("attention_bias"),
        "glm4": maybe("attention_bias"),
        "cohere": {**maybe("attention_bias", "use_qk_norm"), "logit_scale": rng.uniform(0.2, 2.0)},
        "cohere2": {**maybe("attention_bias"), "logit_scale": rng.uniform(0.2, 2.0), **windows, **types},
        "gpt_neox": {
            **maybe("use_parallel_residual", "attention_bias"),
            "hidden_act": rng.choice(["gelu", "gelu_fast"]),
        },
        "phi": {},
        "starcoder2": {"sliding_window": rng.choice([None, 5, 16]), **maybe("use_bias")},
    }
    return {"rope_parameters": rope, **own[family]} if family in own else {}


def _mixture(family: str, rng: random.Random) -> dict[str, Any]:
    """Return random overrides of a family with experts."""
    num_experts = rng.choice([3, 4, 9, 32])
    sizes = {"num_experts": num_experts, "num_experts_per_tok": min(num_experts, rng.choice([1, 2, 8]))}
    if family == "mixtral":
        return {**sizes, "sliding_window": rng.choice([None, 5, 16])}
    if family == "gpt_oss":
        clamps = {"swiglu_limit": rng.choice([0.3, 1.0, 7.0]), "swiglu_alpha": rng.uniform(1, 3)}
        return {**sizes, **clamps, "attention_bias": rng.random() < 0.5, "sliding_window": rng.choice([3, 8])}
    switches = {"norm_topk_prob": rng.random() < 0.5, "attention_bias": rng.random() < 0.5}
    if family == "qwen3_5_moe":
        return {**sizes, "moe_intermediate_size": rng.randrange(17, 60)}
    if family == "qwen3_moe":
        switches |= {"use_sliding_window": rng.random() < 0.5, "sliding_window": rng.choice([3, 8])}
    if family.startswith("qwen"):
        switches |= {"mlp_only_layers": [rng.randrange(4)], "decoder_sparse_step": rng.choice([1, 2])}
        switches |= {"moe_intermediate_size": rng.randrange(17, 60)}
    return {**sizes, **switches}


def _hybrid(layers: int, rope: dict[str, Any], head_dim: int, rng: random.Random) -> dict[str, Any]:
    """Return random overrides of a family with gated delta nets."""
    kinds, key_heads = [rng.choice(_HYBRID_TYPES) for _ in range(layers)], rng.choice([1, 2, 3])
    kinds[rng.randrange(layers)] = _HYBRID_TYPES[1]
    return {
        "layer_types": kinds,
        "rope_parameters": rope | _fraction(head_dim, rng),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 4]),
        "linear_key_head_dim": rng.choice([6, 8, 17]),
        "linear_value_head_dim": rng.choice([5, 8, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
        "attention_bias": rng.random() < 0.5,
    }


def _gemma4(family: str, sizes: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random overrides of Gemma 4, with experts or with layers that read others' keys and values."""
    kv_heads, head_dim, num_layers = sizes["num_key_value_heads"], sizes["head_dim"], rng.randint(3, 6)
    is_mixture = family == "gemma4_moe"
    k_eq_v = is_mixture or rng.random() < 0.3
    global_heads = rng.choice([kv_heads, 1]) if k_eq_v else kv_heads
    kinds = [rng.choice(_LAYER_TYPES) for _ in range(num_layers)]
    kinds[:2] = rng.sample(_LAYER_TYPES, 2)
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    shared = {"num_kv_shared_layers": rng.randint(1, num_layers - 2), "use_double_wide_mlp": rng.random() < 0.7}
    sparse = {"num_experts": rng.choice([3, 9, 32]), "num_experts_per_tok": rng.choice([1, 2, 3])}
    return {
        "num_hidden_layers": num_layers,
        "layer_types": [*kinds[:-1], _LAYER_TYPES[1]],
        "sliding_window": rng.choice([3, 8]),
        "global_head_dim": head_dim * (rng.choice([1, 2]) if global_heads == kv_heads else 1),
        "num_global_key_value_heads": global_heads,
        "attention_k_eq_v": k_eq_v,
        "rope_parameters": {_LAYER_TYPES[0]: sizes["rope_parameters"], _LAYER_TYPES[1]: full},
        "hidden_size_per_layer_input": 0 if is_mixture else rng.choice([7, 16]),
        "vocab_size_per_layer_input": sizes["vocab_size"],
        "final_logit_softcapping": rng.choice([None, 1.5, 30.0]),
        "attention_bias": rng.random() < 0.3,
        **({**sparse, "moe_intermediate_size": rng.randrange(17, 60)} if is_mixture else shared),
    }


def _latent(family: str, rng: random.Random, layers: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Return random overrides of a family that attends over latents."""
    mscales = {"mscale": 0.7, "mscale_all_dim": rng.choice([0.7, 1.0])}
    groups, group_size = rng.choice([1, 2, 4]), rng.choice([2, 3, 8])
    top_groups = rng.randint(1, groups)
    overrides: dict[str, Any] = {
        "kv_lora_rank": rng.choice([16, 20, 34]),
        "q_lora_rank": rng.choice([24, 17, None]),
        "qk_nope_head_dim": rng.choice([8, 12, 14]),
        "qk_rope_head_dim": rng.choice([4, 8, 10]),
        "v_head_dim": rng.choice([8, 12, 16]),
        "num_experts": groups * group_size,
        "num_experts_per_tok": rng.randint(1, min(top_groups * group_size, 8)),
        "n_group": groups,
        "topk_group": top_groups,
        "moe_intermediate_size": rng.randrange(17, 60),
        "n_shared_experts": rng.randint(1, 3),
        "routed_scaling_factor": rng.uniform(0.5, 3),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": rope | (mscales if rope["rope_type"] == "yarn" else {}),
    }
    if family == "deepseek_v2":
        return {
            **overrides,
            "topk_method": rng.choice(["greedy", "group_limited_greedy"]),
            **_dense_layers(rng, layers),
        }
    overrides |= {"norm_topk_prob": rng.random() < 0.5, "rope_interleave": rng.random() < 0.7}
    if family == "deepseek_v3":
        return {**overrides, **_dense_layers(rng, layers)}
    return {**overrides, "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(layers)]}


def _dense_layers(rng: random.Random, layers: int) -> dict[str, Any]:
    return {"first_k_dense_replace": rng.randint(0, layers)}


def random_configs(family: str, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Return overrides for `build_config`: odd sizes, query groups of 1 to 8, every RoPE, ties, biases, windows."""
    rng = random.Random(f"{family}-{seed}")
    for case in range(count):
        kv_heads, group, layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 4)
        heads = kv_heads * group
        rope = dict(ROPES[list(ROPES)[case % len(ROPES)]])
        overrides: dict[str, Any] = {
            "vocab_size": rng.randrange(67, 301, 2),
            # transformers requires a multiple
            "hidden_size": heads * _head_size(family, rng.randint(-(-24 // heads), -(-64 // heads))),
            "intermediate_size": rng.randrange(33, 100),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": rng.choice([6, 8, 12, 16]),
            "rope_parameters": {**rope, "rope_theta": 10 ** rng.uniform(3, 7)},
            "rms_norm_eps": rng.choice([1e-5, 1e-6]),
            "tie_word_embeddings": rng.random() < 0.5,
        }
        if family in ("llama", "granite"):
            overrides |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        if family == "mistral":
            overrides |= {"sliding_window": rng.choice([None, 5, 16])}
        if family in ("qwen2", "qwen3"):
            overrides |= {"use_sliding_window": rng.random() < 0.7, "sliding_window": rng.choice([3, 8])}
            overrides |= {"max_window_layers": rng.randint(0, layers)}
        if family in ("gemma2", "gemma3"):
            overrides |= {"sliding_window": rng.choice([3, 8]), "query_pre_attn_scalar": rng.choice([8, 40])}
            overrides |= {"tie_word_embeddings": True}
            overrides |= {"layer_types": [rng.choice(_LAYER_TYPES) for _ in range(layers)]}
        if family == "gemma2":
            caps = [None, 1.5, 30.0]
            overrides |= {"attn_logit_softcapping": rng.choice(caps), "final_logit_softcapping": rng.choice(caps)}
        if family == "gpt2":
            overrides |= {"intermediate_size": rng.choice([None, 50]), "scale_attn_weights": rng.random() < 0.5}
        if family == "gpt_neo":
            kinds = [rng.choice(["global", "local"]) for _ in range(layers)]
            overrides |= {"attention_types": [[kinds, 1]], "window_size": rng.choice([3, 8])}
        if family.startswith("granite"):
            overrides |= {name: value * rng.uniform(0.5, 1.5) for name, value in _FACTORS.items()}
        if family == "granite_swa":
            overrides |= {"sliding_window": rng.choice([3, 8])}
            overrides |= {"layer_types": [rng.choice(_LAYER_TYPES) for _ in range(layers)]}
            overrides |= {"layer_rope_theta": [rng.choice([0, 1e4, 1e6]) for _ in range(layers)]}
        if family in MIXTURES:
            overrides |= (
                _latent(family, rng, layers, overrides["rope_parameters"])
                if family in LATENT
                else _mixture(family, rng)
            )
        overrides |= _dense(family, overrides, rng)
        if family == "gemma3":
            local = {"rope_type": "default", "rope_theta": 10 ** rng.uniform(3, 5)}
            overrides["rope_parameters"] = {_LAYER_TYPES[0]: local, _LAYER_TYPES[1]: overrides["rope_parameters"]}
        yield overrides
