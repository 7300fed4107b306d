"""Every field of every family: read as transformers reads it, or refused; never ignored if it changes results."""

import inspect
import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import noting_fields
from jaxserve.models.layer_kinds import NOT_READ
from jaxserve.weights.errors import CheckpointError
from tests.checkpoints import CONFIGS, FAMILIES, MIXTURES, hf_dict, randomize, reference_logits
from tests.models.test_parity import TRANSFORMS, assert_close, load_logits
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.random_configs import random_configs

SLIDING, FULL = "sliding_attention", "full_attention"
TOKEN_IDS = np.random.default_rng(0).integers(0, 131, 40).astype(np.int32)
Sizes = dict[str, tuple[int, ...]]  # shapes of parameters by name
ABSENT = object()  # stands for a field that a change removes
# Fields of transformers' classes that change no logits of a model in evaluation, and why.
NO_EFFECT = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout"),
    *("embed_dropout", "resid_dropout", "embedding_dropout", "residual_dropout", "router_jitter_noise"),  # training
    *("initializer_range", "output_router_logits", "router_aux_loss_coef"),  # training
    *("use_cache", "bos_token_id", "pad_token_id"),  # speed, tokenizers
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    "pretraining_tp",  # an order of computation
    "num_mtp_layers",  # layers that draft
    "is_decoder",  # of encoders
}
ALSO_READ = {"eos_token_id", "num_local_experts", "num_experts"}  # read without `read_fields`
WINDOW = {"sliding_window": 5}
BY_KIND = {FULL: {"rope_type": "default", "rope_theta": 50.0}, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}
SCALED = {"rope_type": "linear", "factor": 3.0}
SWITCHED = {"use_sliding_window": True, **WINDOW}
CHANGES: list[dict[str, Any]] = [
    # Kinds of layers
    *({"layer_types": kinds, **WINDOW} for kinds in ([SLIDING, FULL], [FULL, SLIDING], [FULL, FULL])),
    {"layer_types": [SLIDING, FULL]},
    *({"sliding_window": window} for window in (5, None)),
    *({"sliding_window_pattern": period, "layer_types": ABSENT, **WINDOW} for period in (1, 2, 3)),
    *({"no_rope_layers": rotated} for rotated in ([0, 1], [1, 0], [])),
    {"no_rope_layer_interval": 2, "no_rope_layers": ABSENT},
    {"layer_types": [FULL, SLIDING], **SWITCHED},
    {"layer_types": ABSENT, **SWITCHED},
    {"layer_types": ABSENT, "use_sliding_window": False, **WINDOW},
    *({"max_window_layers": number, "layer_types": ABSENT, **SWITCHED} for number in (0, 1)),
    {"attn_types": [0, 1]},
    {"attention_types": [[["global", "local"], 1]]},
    {"attention_types": [[["global", "local"], 1]], "attention_layers": ABSENT},
    {"attention_layers": ["global", "local"]},
    {"layers_block_type": ["mamba", "attention"]},
    *({"full_attention_interval": period, "layer_types": ABSENT} for period in (1, 2)),
    *({"first_k_dense_replace": number, "mlp_layer_types": ABSENT} for number in (0, 2)),
    *({name: value} for name in ("decoder_sparse_step", "moe_layer_freq") for value in (1, 2)),
    {"mlp_layer_types": ["sparse", "dense"]},
    {"mlp_only_layers": [0]},
    {"layer_rope_theta": [0, 50.0]},
    # Attention
    *({name: value} for name in ("attention_bias", "qkv_bias", "use_bias", "mlp_bias") for value in (True, False)),
    *({name: value} for name in ("attention_out_bias", "use_qk_norm", "qk_layernorm") for value in (True, False)),
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"head_dim": 24},
    {"head_dim": None},
    {"num_key_value_heads": 1},
    {"clip_qkv": 0.1},
    {"query_pre_attn_scalar": 4},
    {"attention_multiplier": 0.5},
    *({name: value} for name in ("attn_logit_softcapping", "final_logit_softcapping") for value in (1.0, None)),
    # Rotations
    {"partial_rotary_factor": 0.5},
    *({name: 50.0, "rope_parameters": ABSENT} for name in ("rope_theta", "rotary_emb_base", "rope_local_base_freq")),
    {"rotary_pct": 0.5, "rope_parameters": ABSENT},
    {"rope_scaling": SCALED, "rope_parameters": ABSENT, "rope_theta": 50.0},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_parameters": ABSENT},
    {"rope_parameters": {**SCALED, "rope_theta": 50.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": BY_KIND},
    {"rope_parameters": {**BY_KIND, SLIDING: {**SCALED, "rope_theta": 500.0}}},
    {"original_max_position_embeddings": 8},
    {"rope_interleave": False},
    *({"position_embedding_type": kind} for kind in ("rope", "nope")),
    # What else changes logits
    *({"hidden_act": name} for name in ("gelu", "relu", "silu")),
    *({"hidden_activation": name} for name in ("gelu", "silu")),
    {"activation_function": "relu"},
    *({name: 0.1} for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")),
    *({name: 0.3} for name in ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier")),
    *(
        {name: value}
        for name in ("norm_topk_prob", "use_parallel_residual", "scale_attn_weights")
        for value in (True, False)
    ),
    *({"scoring_func": name} for name in ("softmax", "sigmoid")),
    *({"topk_method": name} for name in ("greedy", "noaux_tc")),
    {"routed_scaling_factor": 3.0},
    {"num_experts_per_tok": 1},
    {"scale_attn_by_inverse_layer_idx": True},
    {"attn_output_gate": False},
    *({name: 2} for name in ("pretraining_tp", "num_mtp_layers")),
]


def changed(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**base, **change}.items() if value is not ABSENT}


def oracle(family: str, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """Return the model that transformers makes of a config.json, with the weights of any other of the same sizes."""
    kind = CONFIGS[family]
    if family == "mistral" and "layer_types" in config:  # as transformers.AutoConfig reads it
        kind, config = transformers.MinistralConfig, {**config, "model_type": "ministral"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old names of fields are tried, too
        read = kind.from_dict(json.loads(json.dumps(config)))
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32).eval()
    if family in MIXTURES:
        model.set_experts_implementation("eager")
    randomize(model)
    return model


def sizes_of(model: transformers.PreTrainedModel) -> Sizes:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def has_alias(family: str, change: dict[str, Any]) -> bool:
    """Return whether a change is by a name that only transformers' class takes for another field's."""
    return not CONFIGS[family].attribute_map.keys().isdisjoint(change)


@cache
def unchanged(family: str) -> tuple[dict[str, Any], ArchConfig, Any, Sizes]:
    config = hf_dict(family)
    model = oracle(family, config)
    return config, registry.from_hf_config(config), reference_logits(model, TOKEN_IDS), sizes_of(model)


@pytest.mark.parametrize("family", some_by_default(list(FAMILIES), "gpt_neo", "gemma3"))
def test_fields_are_read_as_in_transformers_or_refused(tmp_path: Path, family: str) -> None:
    base, arch, logits, sizes = unchanged(family)
    num_read = 0
    for number, change in enumerate(CHANGES):
        config = changed(base, change)
        try:
            new = registry.from_hf_config(config)
        except ConfigError:
            continue
        try:
            model = oracle(family, config)
            expected = reference_logits(model, TOKEN_IDS)
        except (AttributeError, TypeError, ValueError, LookupError, RuntimeError, StrictDataclassError):
            continue  # transformers refuses it
        if new == arch and np.abs(expected - logits).max() < 1e-4:
            continue  # it changes nothing
        path = tmp_path / str(number)
        model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(config))
        try:
            found = load_logits(path, make_transform=TRANSFORMS[-1])[2]
        except CheckpointError as error:
            if new == arch and not (has_alias(family, change) and sizes_of(model) != sizes):
                error.add_note(f"{change} is ignored")
                raise
            continue  # the tensors have other sizes: a refusal
        try:
            assert_close(found, expected)
        except AssertionError as error:
            error.add_note(f"{change} is {'ignored' if new == arch else 'read otherwise'}")
            raise
        num_read += 1
    assert num_read > (1 if family == "gpt2" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_transformers_classes_are_known(family: str) -> None:
    """Each is read, refused by `check_unread` unless it says nothing, or has no effect."""
    kind, common = CONFIGS[family], {*vars(transformers.PreTrainedConfig()), *dir(transformers.PreTrainedConfig)}
    source = inspect.getsource(inspect.getmodule(kind) or kind)
    popped = {*re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source)}
    fields = ({*kind.__dataclass_fields__} | popped) - common
    read: set[str] = set()
    configs = [hf_dict(other) for other in FAMILIES if CONFIGS[other] is kind]
    configs += [hf_dict(family, **overrides) for overrides in random_configs(family, 4)]
    configs.append({**hf_dict(family), **SWITCHED})
    for config in configs:
        with noting_fields() as names:
            registry.FAMILIES[config["architectures"][0]].read_arch(config)
        read |= names
    assert not fields - read - NO_EFFECT - ALSO_READ - {*NOT_READ}
