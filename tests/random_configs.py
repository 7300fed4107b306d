"""Random configurations of every family, small but with any of its settings."""

import random
from collections.abc import Iterator
from typing import Any

from tests.checkpoints import (
    DELTA,
    FACTORS,
    GROWING,
    INDEXED,
    LATENT,
    LAYER_TYPES,
    MIXTURES,
    PARTIAL,
    ROPES,
    STATE_TYPES,
    head_dim_of,
    head_size,
    longrope,
)


def _kinds(names: list[str], layers: int, rng: random.Random) -> list[str]:
    """Return the kinds of layers, both of them if there are two layers."""
    return rng.sample(names, 2) if layers == 2 else [rng.choice(names) for _ in range(layers)]


def _fraction(head_dim: int, rng: random.Random) -> dict[str, float]:
    """Return a random part of heads that rotates an even number of dimensions."""
    return {"partial_rotary_factor": 2 * rng.randint(1, head_dim // 2) / head_dim}


def _dense(family: str, sizes: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random overrides of the settings that few families have."""

    def maybe(*names: str) -> dict[str, Any]:
        return {name: rng.random() < 0.5 for name in names}

    num_layers, rope = sizes["num_hidden_layers"], dict(sizes["rope_parameters"])
    if family.startswith("gemma4"):
        return _gemma4(family, sizes, rng)
    if family in DELTA:
        return _delta(num_layers, rope, sizes["head_dim"], rng)
    if family in PARTIAL:
        rope |= _fraction(head_dim_of(family, sizes), rng)
    if family == "phi3":
        rope |= longrope(head_dim_of(family, sizes), rope, rng)
    if family == "ministral3":
        rope = {**GROWING, "llama_4_scaling_beta": rng.uniform(0.05, 0.5)}
    if family == "olmo3":
        rope = {LAYER_TYPES[0]: {"rope_type": "default", "rope_theta": 10 ** rng.uniform(3, 5)}, LAYER_TYPES[1]: rope}
    windows = {"sliding_window": rng.choice([3, 8])}
    types = {"layer_types": rng.choice([None, _kinds(LAYER_TYPES, num_layers, rng)])}
    no_rope = rng.sample([0, 1], 2) if num_layers == 2 else [rng.randint(0, 1) for _ in range(num_layers)]
    own: dict[str, dict[str, Any]] = {
        "phi3": {"sliding_window": rng.choice([None, 5, 16]), "original_max_position_embeddings": 16},
        "smollm3": {
            **maybe("use_sliding_window", "attention_bias", "mlp_bias"),
            **windows,
            "no_rope_layers": rng.choice([None, no_rope] if num_layers != 2 else [no_rope]),
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


def _state_types(layers: int, rng: random.Random) -> list[str]:
    """Return random kinds of layers, some of which have attention."""
    if layers == 2:
        return rng.sample(STATE_TYPES, 2)
    kinds = [rng.choice(STATE_TYPES) for _ in range(layers)]
    kinds[rng.randrange(layers)] = STATE_TYPES[1]
    return kinds


def _delta(layers: int, rope: dict[str, Any], head_dim: int, rng: random.Random) -> dict[str, Any]:
    """Return random overrides of a family with gated delta nets."""
    key_heads = rng.choice([1, 2, 3])
    return {
        "layer_types": _state_types(layers, rng),
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
    kinds = [rng.choice(LAYER_TYPES) for _ in range(num_layers)]
    kinds[:2] = rng.sample(LAYER_TYPES, 2)
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    shared = {"num_kv_shared_layers": rng.randint(1, num_layers - 2), "use_double_wide_mlp": rng.random() < 0.7}
    sparse = {"num_experts": rng.choice([3, 9, 32]), "num_experts_per_tok": rng.choice([1, 2, 3])}
    return {
        "num_hidden_layers": num_layers,
        "layer_types": [*kinds[:-1], LAYER_TYPES[1]],
        "sliding_window": rng.choice([3, 8]),
        "global_head_dim": head_dim * (rng.choice([1, 2]) if global_heads == kv_heads else 1),
        "num_global_key_value_heads": global_heads,
        "attention_k_eq_v": k_eq_v,
        "rope_parameters": {LAYER_TYPES[0]: sizes["rope_parameters"], LAYER_TYPES[1]: full},
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
    if family in INDEXED:
        heads, rope_dim = rng.choice([16, 24]), int(overrides["qk_rope_head_dim"])
        overrides |= {"q_lora_rank": rng.choice([24, 17]), "index_topk": rng.choice([3, 9, 64])}
        overrides |= {"index_n_heads": heads, "index_head_dim": rope_dim + rng.choice([0, 8, 14])}
    if family == "glm_moe_dsa":
        overrides["indexer_types"] = ["full", *_kinds(["full", "shared"], layers, rng)[1:]]
    if family == "deepseek_v2":
        return {
            **overrides,
            "topk_method": rng.choice(["greedy", "group_limited_greedy"]),
            **_dense_layers(rng, layers),
        }
    overrides |= {"norm_topk_prob": rng.random() < 0.5}
    if family not in INDEXED:
        overrides["rope_interleave"] = rng.random() < 0.7
    if family == "deepseek_v3":
        return {**overrides, **_dense_layers(rng, layers)}
    return {**overrides, "mlp_layer_types": _kinds(["dense", "sparse"], layers, rng)}


def _granite(family: str, sizes: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random overrides of one of Granite's families."""
    if not family.startswith("granite"):
        return {}
    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    factors = {name: value * rng.uniform(0.5, 1.5) for name, value in FACTORS.items()}
    if family == "granite_swa":
        types = _kinds(LAYER_TYPES, layers, rng)
        thetas = [rng.choice([0, 1e4, 1e6]) for _ in range(layers)]
        return {**factors, "sliding_window": rng.choice([3, 8]), "layer_types": types, "layer_rope_theta": thetas}
    if family == "granite_moe_hybrid":
        dense: dict[str, Any] = {"num_experts": 0} if rng.random() < 0.5 else {}
        return {
            **factors,
            **dense,
            "position_embedding_type": rng.choice(["rope", None]),
            "layer_types": _state_types(layers, rng),
            "mamba_n_heads": heads * rng.choice([1, 2]),  # a divisor of the doubled hidden size
            "mamba_n_groups": rng.choice([1, heads // sizes["num_key_value_heads"], heads]),
            "mamba_d_state": rng.choice([6, 8, 17]),
            "mamba_d_conv": rng.choice([2, 3, 4]),
            "mamba_conv_bias": rng.random() < 0.5,
            "mamba_proj_bias": rng.random() < 0.5,
            "mamba_chunk_size": rng.choice([8, 64]),
            "time_step_limit": rng.choice([(0.0, float("inf")), (0.6, 0.8)]),
            "shared_intermediate_size": 41,
        }
    return factors


def _dense_layers(rng: random.Random, layers: int) -> dict[str, Any]:
    return {"first_k_dense_replace": rng.randint(0, layers if layers > 2 else layers - 1)}


def random_configs(family: str, count: int, seed: int = 0, num_layers: int | None = None) -> Iterator[dict[str, Any]]:
    """Return overrides for `build_config`: odd sizes, query groups of 1 to 8, every RoPE, ties, biases, windows.

    Models have up to six layers, or `num_layers`, to which some families add.
    """
    rng = random.Random(f"{family}-{seed}")
    for case in range(count):
        kv_heads, group, layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8]), num_layers or rng.randint(1, 4)
        heads = kv_heads * group
        rope = dict(ROPES[list(ROPES)[case % len(ROPES)]])
        overrides: dict[str, Any] = {
            "vocab_size": rng.randrange(67, 301, 2),
            # transformers requires a multiple
            "hidden_size": heads * head_size(family, rng.randint(-(-24 // heads), -(-64 // heads))),
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
            overrides |= {"layer_types": _kinds(LAYER_TYPES, layers, rng)}
        if family == "gemma2":
            caps = [None, 1.5, 30.0]
            overrides |= {"attn_logit_softcapping": rng.choice(caps), "final_logit_softcapping": rng.choice(caps)}
        if family == "gpt2":
            overrides |= {"intermediate_size": rng.choice([None, 50]), "scale_attn_weights": rng.random() < 0.5}
        if family == "gpt_neo":
            kinds = [rng.choice(["global", "local"]) for _ in range(layers)]
            overrides |= {"attention_types": [[kinds, 1]], "window_size": rng.choice([3, 8])}
        if family in MIXTURES:
            overrides |= (
                _latent(family, rng, layers, overrides["rope_parameters"])
                if family in LATENT
                else _mixture(family, rng)
            )
        overrides |= _granite(family, overrides, rng) | _dense(family, overrides, rng)
        if family == "gemma3":
            local = {"rope_type": "default", "rope_theta": 10 ** rng.uniform(3, 5)}
            overrides["rope_parameters"] = {LAYER_TYPES[0]: local, LAYER_TYPES[1]: overrides["rope_parameters"]}
        yield overrides
