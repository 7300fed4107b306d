"""Reading config.json: what is odd but valid reads as in transformers, everything else is refused by name."""

import dataclasses
from operator import attrgetter
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.models import registry
from jaxserve.models.layer_spec import MlaSizes
from tests.checkpoints import CONFIGS, DELTA, FAMILIES, INDEXED, LONGROPE, PARTIAL, ROPES, hf_dict, renamed

YARN, LLAMA3 = ROPES["yarn"], ROPES["llama3"]
LLAMA_FIELDS = [family for family in FAMILIES if "rms_norm_eps" in hf_dict(family)]  # families with Llama's fields


UNSUPPORTED: list[tuple[dict[str, Any], list[str]]] = [
    ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "LlamaForCausalLM"]),
    ({"architectures": None}, ["architectures"]),
    ({"hidden_act": "swish"}, ["swish"]),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["short_factor", "long_factor"]),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic"]),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes", "awq"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, ["4 or 8 bits", "3 bits"]),
    ({"num_attention_heads": 5}, ["num_attention_heads", "num_key_value_heads", "5"]),
    ({"head_dim": 15}, ["head_dim", "15"]),
    ({"num_hidden_layers": None}, ["num_hidden_layers"]),
    ({"vocab_size": -1}, ["vocab_size"]),
    ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
    ({"architectures": [["LlamaForCausalLM"]]}, ["architectures"]),
    ({"quantization_config": "gptq"}, ["quantization_config", "gptq"]),
    ({"vocab_size": True}, ["vocab_size", "True"]),
    ({"vocab_size": "big", "hidden_size": None}, ["vocab_size", "big", "hidden_size", "None"]),
    ({"max_position_embeddings": None}, ["max_position_embeddings"]),
    ({"num_key_value_heads": "2"}, ["num_key_value_heads", "'2'"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads"]),
    ({"head_dim": 0}, ["head_dim"]),
    ({"rms_norm_eps": None}, ["rms_norm_eps"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
    ({"hidden_act": None}, ["hidden_act", "one of ['"]),
    ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
    ({"eos_token_id": [1, None]}, ["eos_token_id", "[1, None]"]),
    ({"eos_token_id": "2"}, ["eos_token_id"]),
    ({"eos_token_id": -1}, ["eos_token_id"]),
    ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
    ({"dtype": 16}, ["dtype", "16"]),
    ({"rope_scaling": [1]}, ["rope_scaling", "[1]"]),
    ({"rope_parameters": {"rope_theta": "x"}}, ["rope_theta", "'x'"]),
    ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta"]),
    ({"rope_parameters": {"full_attention": [1]}}, ["full_attention"]),
    ({"rope_parameters": None, "rope_theta": "x"}, ["rope_theta", "'x'"]),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type"]),
]
GPT_UNSUPPORTED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "True"]),
    ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
    ("gpt2", {"scale_attn_weights": 1}, ["scale_attn_weights"]),
    ("gpt2", {"reorder_and_upcast_attn": "yes"}, ["reorder_and_upcast_attn"]),
    ("gpt2", {"n_inner": 0}, ["n_inner"]),
    ("gpt2", {"activation_function": "swish"}, ["activation_function", "gelu_new"]),
    ("gpt_neo", {"window_size": 0}, ["window_size"]),
    ("gpt_neo", {"attention_types": [[["global"], 3]], "attention_layers": None}, ["attention_types", "2", "3"]),
    ("gpt_neo", {"attention_types": [[["chunked"], 2]]}, ["attention_types", "local", "chunked"]),
    ("gpt_neo", {"attention_types": [["global", 2]]}, ["attention_types"]),
    ("gpt_neo", {"attention_types": None}, ["attention_types"]),
    ("gpt_neo", {"attention_layers": ["global"]}, ["attention_layers", "2", "1"]),
]
MIXTURE_UNSUPPORTED = [
    ("mixtral", {"num_local_experts": 0}, ["num_experts", "0"]),
    ("mixtral", {"num_experts_per_tok": 6}, ["num_experts_per_tok", "6", "5"]),
    ("mixtral", {"sliding_window": 0}, ["sliding_window"]),
    ("qwen3_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
    ("qwen3_moe", {"mlp_only_layers": [-1]}, ["mlp_only_layers", "[-1]"]),
    ("qwen3_moe", {"norm_topk_prob": None}, ["norm_topk_prob"]),
    ("qwen3_moe", {"moe_intermediate_size": None}, ["moe_intermediate_size"]),
    ("qwen2_moe", {"use_sliding_window": "yes"}, ["use_sliding_window", "'yes'"]),
    ("mistral", {"layer_types": ["full_attention"]}, ["layer_types", "2"]),
    ("mixtral", {"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "full_attention"]),
    ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, ["layer_types", "sliding_attention"]),
    ("llama", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "[1, 0]", "LlamaForCausalLM"]),
    ("granite", {"is_causal": False}, ["is_causal", "False"]),
    ("smollm3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, ["use_sliding_window"]),
    ("olmoe", {"rope_parameters": {"full_attention": YARN, "sliding_attention": LLAMA3}}, ["all kinds of layers"]),
    ("gemma3", {"rope_parameters": ROPES["linear"]}, ["full_attention", "sliding_attention"]),
    ("gemma3", {"attn_logit_softcapping": 2.0}, ["attn_logit_softcapping"]),
    ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "greedy"]),
    ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob", "True"]),
    ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func", "softmax"]),
    ("deepseek_v3", {"n_group": 4}, ["n_routed_experts", "n_group", "6", "4"]),
    ("deepseek_v3", {"topk_group": 4}, ["topk_group", "3", "4"]),
    ("deepseek_v3", {"num_experts_per_tok": 5}, ["groups of at least 3", "6, 3 and 2"]),
    ("deepseek_v3", {"num_key_value_heads": 2}, ["num_key_value_heads", "2 and 4"]),
    ("deepseek_v3", {"kv_lora_rank": None}, ["kv_lora_rank"]),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, ["head_dim", "7"]),
    ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
    ("deepseek_v32", {"index_head_dim": 7}, ["index_head_dim", "qk_rope_head_dim", "7 and 8"]),
    ("deepseek_v32", {"index_topk": 0}, ["index_topk", "0"]),
    ("deepseek_v32", {"q_lora_rank": None}, ["q_lora_rank", "None"]),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, ["first layer", "'full'", "shared"]),
    ("glm_moe_dsa", {"indexer_types": ["full", "none"]}, ["indexer_types", "'shared'", "none"]),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": -1}, ["index_topk_freq", "-1"]),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "F"}, ["index_topk_pattern", "2 layers", "'F'"]),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FX"}, ["index_topk_pattern", '"F" and "S"', "FX"]),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": ["F", "S"]}, ["index_topk_pattern", '"shared"']),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "2", "['dense']"]),
    ("granite_moe_hybrid", {"layer_types": ["mamba", "mamba2"]}, ["layer_types", "'mamba2'"]),
    ("granite_moe_hybrid", {"layer_types": ["attention"]}, ["layer_types", "2"]),
    ("granite_moe_hybrid", {"layer_types": None}, ["a layer with attention"]),
    ("granite_moe_hybrid", {"mamba_d_head": 12}, ["mamba_d_head", "8 x 12 and 2 x 64"]),
    ("granite_moe_hybrid", {"mamba_n_groups": 3}, ["mamba_n_groups", "8 and 3"]),
    ("granite_moe_hybrid", {"time_step_limit": [0.1, "x"]}, ["time_step_limit", "'x'"]),
    ("granite_moe_hybrid", {"mamba_conv_bias": None}, ["mamba_conv_bias"]),
    ("granite_moe_hybrid", {"position_embedding_type": "alibi"}, ["position_embedding_type", "'alibi'"]),
    ("granite_moe_hybrid", {"num_local_experts": 0, "shared_intermediate_size": 0}, ["shared_intermediate_size", "0"]),
    ("granite_moe", {"num_local_experts": 1}, ["num_experts_per_tok", "2 and 1"]),
    ("gpt_oss", {"num_local_experts": 2}, ["num_experts_per_tok", "3", "2"]),
    ("gpt_oss", {"swiglu_limit": 0}, ["swiglu_limit", "0"]),
    ("gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types", "2"]),
]

DENSE_UNSUPPORTED = [
    ("phi3", {"rope_parameters": {**LONGROPE, "short_factor": [1.0], "long_factor": [2.0]}}, ["short_factor", "6"]),
    ("phi3", {"rope_parameters": {**LONGROPE, "short_factor": "x"}}, ["short_factor", "'x'"]),
    ("smollm3", {"no_rope_layers": [1]}, ["no_rope_layers", "2"]),
    ("smollm3", {"no_rope_layers": [2, 1]}, ["no_rope_layers", "[2, 1]"]),
    ("seed_oss", {"attention_out_bias": None}, ["attention_out_bias"]),
    ("arcee", {"hidden_act": "silu"}, ["hidden_act", "relu2"]),
    ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": "x"}}, ["llama_4_scaling_beta", "'x'"]),
    ("olmo3", {"rope_parameters": {"sliding_attention": [1], "full_attention": {}}}, ["sliding_attention"]),
    ("olmo3", {"layer_types": ["full_attention"]}, ["layer_types", "2"]),
    ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.2}}, ["partial_rotary_factor", "even", "16"]),
    ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
    ("cohere", {"use_qk_norm": None}, ["use_qk_norm"]),
    ("cohere", {"logit_scale": 0}, ["logit_scale"]),
    ("cohere", {"model_max_length": 0}, ["model_max_length", "0"]),
    ("cohere2", {"model_max_length": "8192"}, ["model_max_length", "'8192'"]),
    ("cohere2", {"layer_types": ["chunked", "full_attention"]}, ["layer_types", "chunked"]),
    ("gpt_neox", {"use_parallel_residual": 1}, ["use_parallel_residual"]),
    ("gpt_neox", {"rotary_pct": None}, ["rotary_pct", "None"]),
    ("gpt_neox", {"rotary_pct": 0}, ["rotary_pct", "0"]),
    ("phi", {"qk_layernorm": True}, ["qk_layernorm"]),
    ("starcoder2", {"use_bias": "yes"}, ["use_bias"]),
    ("gemma4", {"num_kv_shared_layers": 4}, ["num_kv_shared_layers", "4 of 5"]),
    ("gemma4", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
    ("gemma4", {"per_layer_config": {"2": {"head_dim": 24}}}, ["full_attention", "head_dim", "24"]),
    ("gemma4", {"per_layer_config": {"2": {"head_dim": 24}, "4": {"head_dim": 24}}}, ["multiple", "32 and 48"]),
    ("gemma4", {"rope_parameters": {"full_attention": {}}}, ["sliding_attention"]),
    ("gemma4", {"per_layer_config": {"full_attention": {"head_dim": 24}}}, ["numbers of layers", "full_attention"]),
    ("gemma4", {"per_layer_config": {"2": None}}, ["2", "None"]),
    ("gemma4", {"per_layer_config": {"2": {"sliding_window": 8}, "4": {"sliding_window": 8}}}, ["nothing else"]),
    ("gemma4", {"vocab_size_per_layer_input": 8}, ["vocab_size_per_layer_input", "vocab_size", "got 8 and"]),
    ("gemma4_moe", {"top_k_experts": 7}, ["top_k_experts", "7 and 6"]),
]


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        *(
            (f, renamed(f, change), renamed(f, dict.fromkeys(named)))
            for f in FAMILIES
            for change, named in UNSUPPORTED
            if renamed(f, change) and not (f in (*PARTIAL, *DELTA) and "partial_rotary_factor" in named)
        ),
        *GPT_UNSUPPORTED,
        *MIXTURE_UNSUPPORTED,
        *DENSE_UNSUPPORTED,
    ],
)
def test_unsupported_config_is_named(family, change, named):
    with pytest.raises(ConfigError) as error:
        registry.from_hf_config({**hf_dict(family), **change})
    assert all(word in str(error.value) for word in named)


def test_layer_types_must_fit():
    with pytest.raises(ConfigError, match="layer_types"):
        registry.from_hf_config({**hf_dict("qwen2"), "layer_types": ["chunked_attention", "full_attention"]})


@pytest.mark.parametrize("value", [0, "7", 7.0, True])
def test_sliding_window_must_be_a_size(value):
    with pytest.raises(ConfigError, match="sliding_window"):
        registry.from_hf_config({**hf_dict("mistral"), "sliding_window": value})
    with pytest.raises(ConfigError, match="sliding_window"):
        registry.from_hf_config({**hf_dict("qwen2"), "use_sliding_window": True, "sliding_window": value})


@pytest.mark.parametrize("field", ["use_sliding_window", "max_window_layers", "layer_types"])
def test_window_fields_are_checked(field):
    with pytest.raises(ConfigError, match=field):
        registry.from_hf_config({**hf_dict("qwen3"), field: "x"})


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3", "gpt_neo"])
def test_windows_that_hold_every_sequence_need_no_groups_of_their_own(family):
    arch = registry.from_hf_config(hf_dict(family))
    [window] = {window for window in arch.windows if window is not None}
    assert arch.within(window + 1) == arch
    assert arch.within(window).windows == (None, None)
    assert arch.within(window).kv_layout.windows == (None,)


def without(options, name):
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        (without(YARN, "factor"), "factor"),
        (YARN | {"factor": None}, "factor"),
        (YARN | {"factor": "4"}, "factor"),
        (YARN | {"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        (YARN | {"beta_fast": "x"}, "beta_fast"),
        (YARN | {"truncate": "no"}, "truncate"),
        (without(LLAMA3, "factor"), "factor"),
        (without(LLAMA3, "low_freq_factor"), "low_freq_factor"),
        (without(LLAMA3, "high_freq_factor"), "high_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_parameters_are_checked_on_reading(rope, named, spelling):
    with pytest.raises(ConfigError, match=named):
        registry.from_hf_config({**hf_dict("llama"), spelling: rope})


def test_head_dim_must_follow_from_the_sizes():
    config = {**hf_dict("llama"), "hidden_size": 66, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ConfigError, match="hidden_size must be a multiple of num_attention_heads"):
        registry.from_hf_config({**config, "head_dim": None})
    assert registry.from_hf_config({**config, "head_dim": 16}).attention.head_dim == 16


@pytest.mark.parametrize(
    ("family", "change", "field", "value"),
    [
        ("llama", {"num_key_value_heads": None, "num_attention_heads": 4}, "attention.num_kv_heads", 4),
        ("llama", {"head_dim": None, "hidden_size": 96, "num_attention_heads": 4}, "attention.head_dim", 24),
        ("llama", {"rope_parameters": None, "rope_scaling": None}, "max_position", 512),
        ("llama", {"eos_token_id": None}, "eos_ids", frozenset()),
        ("llama", {"eos_token_id": [3, 5, 3]}, "eos_ids", {3, 5}),
        ("llama", {"dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ("llama", {"dtype": None, "torch_dtype": "torch.float16"}, "dtype", "float16"),
        ("llama", {"dtype": None}, "dtype", "float32"),
        ("llama", {"rms_norm_eps": 1}, "norm_eps", 1.0),
        ("mistral", {"sliding_window": None}, "windows", (None, None)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 0}, "windows", (None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "windows", (None, None)),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "max_position",
            512,
        ),
        ("gpt2", {"n_inner": None}, "mlp.ffn_size", 256),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, "max_position", 512),
        ("gpt2", {"reorder_and_upcast_attn": True}, "attention.scale", None),
        ("gpt2", {"scale_attn_weights": False}, "attention.scale", 1.0),
        ("gpt_neo", {"intermediate_size": None}, "mlp.ffn_size", 256),
        (
            "gpt_neo",
            {"attention_types": [[["global"], 1], [["local"], 1]], "attention_layers": None},
            "windows",
            (None, 9),
        ),
        ("mixtral", {"sliding_window": None}, "windows", (None, None)),
        ("qwen3_moe", {"mlp_only_layers": None}, "num_layers", 2),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, "windows", (5, 5)),
        ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 1}, "num_moe_layers", 1),
        ("cohere", {"model_max_length": 4096}, "max_position", 4096),
        ("cohere2", {"model_max_length": None}, "max_position", 512),
        ("cohere2", {"model_max_length": 100}, "max_position", 100),
        ("deepseek_v2", {"rope_interleave": False}, "attention.mla", MlaSizes(12, 10, 20, interleaved=True)),
        ("olmoe", {"norm_topk_prob": True}, "experts", Experts(7, 2, 96, normalized=True)),
    ],
)
def test_odd_values_read(family, change, field, value):
    arch = registry.from_hf_config({**hf_dict(family), **change})
    assert attrgetter(field)(arch.layers[0] if field.startswith("mlp") else arch) == value


ABSENT = [
    "attention_bias",
    "head_dim",
    "max_position_embeddings",
    "mlp_bias",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
]


LATENT_ABSENT = ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
LATENT_ABSENT += ["n_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "first_k_dense_replace"]
INDEX_ABSENT = ["index_topk", "index_head_dim", "index_n_heads"]
OWN_ABSENT = {
    "gpt2": ["activation_function", "n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"],
    "gpt_neo": ["activation_function", "intermediate_size", "window_size", "attention_types"],
    "granite_moe": ["num_local_experts", "num_experts_per_tok"],
    "granite_moe_shared": ["num_local_experts", "num_experts_per_tok", "shared_intermediate_size"],
    "granite_moe_hybrid": [
        *("num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "position_embedding_type"),
        *("mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size"),
        *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    ],
    "mixtral": ["num_local_experts", "num_experts_per_tok", "sliding_window"],
    "qwen2_moe": ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"],
    "qwen3_moe": ["num_local_experts", "moe_intermediate_size", "norm_topk_prob"],
    "olmoe": ["num_experts", "norm_topk_prob", "clip_qkv"],
    "deepseek_v2": [*LATENT_ABSENT, "topk_method"],
    "deepseek_v3": [*LATENT_ABSENT, "norm_topk_prob", "rope_interleave"],
    "glm4_moe_lite": [*LATENT_ABSENT, "norm_topk_prob", "rope_interleave", "mlp_layer_types"],
    "deepseek_v32": [*LATENT_ABSENT, "norm_topk_prob", "mlp_layer_types", *INDEX_ABSENT],
    "glm_moe_dsa": [*LATENT_ABSENT, "norm_topk_prob", "mlp_layer_types", "indexer_types", *INDEX_ABSENT],
    "phi3": ["sliding_window"],
    "smollm3": ["no_rope_layers", "no_rope_layer_interval", "layer_types", "use_sliding_window"],
    "seed_oss": ["attention_out_bias"],
    "arcee": ["hidden_act"],
    "ministral3": ["sliding_window"],
    "olmo3": ["layer_types", "sliding_window"],
    "cohere": ["use_qk_norm", "logit_scale"],
    "cohere2": ["layer_types", "sliding_window", "logit_scale"],
    "gpt_neox": ["hidden_act", "use_parallel_residual"],
    "phi": ["hidden_act", "qk_layernorm"],
    "starcoder2": ["hidden_act", "use_bias", "sliding_window"],
    "gemma4": ["hidden_activation", "sliding_window", "num_kv_shared_layers", "use_double_wide_mlp"],
    "gemma4_moe": [
        "layer_types",
        "enable_moe_block",
        "attention_k_eq_v",
        "final_logit_softcapping",
        "hidden_size_per_layer_input",
    ],
    "gpt_oss": [
        *("num_local_experts", "num_experts_per_tok", "layer_types", "sliding_window", "swiglu_limit", "swiglu_alpha"),
    ],
}


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, name) for f in FAMILIES for name in [*renamed(f, dict.fromkeys(ABSENT)), *OWN_ABSENT.get(f, [])]],
)
def test_absent_fields_have_the_defaults_of_transformers(family, name):
    sizes = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 32}
    if name == "attention_types":
        sizes |= {"num_hidden_layers": 24, name: [[["local"], 24]]}
    if name == "qk_rope_head_dim" and family in INDEXED:
        sizes["index_head_dim"] = 64  # the default or more
    config = without(hf_dict(family, **sizes, head_dim=16), name)
    read = CONFIGS[family](**config).to_dict()
    assert registry.from_hf_config(config) == registry.from_hf_config({**config, **read})


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (ROPES["default"], 512),
        (LLAMA3, 512),
        (ROPES["linear"], 3 * 512),
        (ROPES["linear"] | {"original_max_position_embeddings": 128}, 3 * 128),
        (YARN | {"original_max_position_embeddings": 128}, 4 * 128),
        (without(YARN, "original_max_position_embeddings"), 4 * 512),
        (YARN | {"factor": 2.5}, 40),
    ],
)
def test_max_position_counts_the_stretch(rope, expected):
    assert registry.from_hf_config({**hf_dict("llama"), "rope_parameters": rope}).max_position == expected


def test_original_length_beside_the_rope_parameters_wins():
    config = {**hf_dict("llama"), "rope_parameters": YARN, "original_max_position_embeddings": 64}
    assert registry.from_hf_config(config).max_position == 4 * 64


@pytest.mark.parametrize(
    ("window", "field"), [(None, "num_global_key_value_heads"), (4, "num_key_value_heads")], ids=["global", "sliding"]
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_kv_heads_that_do_not_divide_the_query_heads_are_named(window, field, is_reversed):
    arch = registry.from_hf_config(hf_dict("gemma4"))
    layers = [
        layer.attending(kv=dataclasses.replace(layer.attention.kv, num_kv_heads=3))
        if (layer.attention.window is None) == (window is None)
        else layer
        for layer in arch.layers
    ]
    with pytest.raises(ConfigError, match=f"multiple of {field}, got 4 and 3"):
        dataclasses.replace(arch, layers=tuple(reversed(layers) if is_reversed else layers))
