"""Adapter files: PEFT's settings, and the message for each file that would silently do something else."""

import json
import re

import jax
import numpy as np
import pytest

from jaxserve.weights import CheckpointError
from jaxserve.weights.adapter_files import CONFIG, TENSORS, make_adapter, read_adapter
from jaxserve.weights.safetensors_file import write_file

PREFIX = "base_model.model.model.layers.0."
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
CONFIG_OF = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def factors(module: str = "self_attn.q_proj", rank: int = 4, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"{PREFIX}{module}.lora_A.weight": rng.normal(size=(rank, 6)).astype(dtype),
        f"{PREFIX}{module}.lora_B.weight": rng.normal(size=(8, rank)).astype(dtype),
    }


def write(path, config, tensors):
    (path / CONFIG).write_text(json.dumps(config))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    write_file(path / TENSORS, shapes, tensors.__getitem__)


def test_a_file_becomes_scaled_factors_by_module(tmp_path):
    write(tmp_path, CONFIG_OF, factors())
    adapter = read_adapter(tmp_path)
    [(name, module)] = adapter.modules.items()
    assert name == "model.layers.0.self_attn.q_proj"
    assert (module.scale, module.rank) == (2.0, 4)
    assert not adapter.is_zero


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"k_proj": 2, r".*attn\.q_.*": 16}}, 4.0),
        ({"r": 2, "rank_pattern": {"layers.0.self_attn.q_proj": 4}}, 2.0),
    ],
)
def test_scales_follow_the_patterns(fields, scale):
    [module] = make_adapter(CONFIG_OF | fields, factors(), "it").modules.values()
    assert module.scale == scale


@pytest.mark.parametrize(("rank", "config", "scale"), [(8, {"lora_alpha": 4}, 0.5), (4, {"r": 4}, 2.0), (4, {}, 1.0)])
def test_absent_ranks_and_alphas_are_those_of_peft(rank, config, scale):
    [module] = make_adapter(config, factors(rank=rank), "it").modules.values()
    assert module.scale == scale


def test_the_digest_depends_on_all_that_changes_outputs():
    digests = {
        make_adapter(config, tensors, "it").digest
        for config, tensors in (
            (CONFIG_OF, factors()),
            (CONFIG_OF | {"lora_alpha": 9}, factors()),
            (CONFIG_OF, factors("self_attn.k_proj")),
            (CONFIG_OF, factors(dtype="float16")),
            (CONFIG_OF, {name: -array for name, array in factors().items()}),
            (CONFIG_OF | {"alora_invocation_tokens": [7]}, factors()),
            (CONFIG_OF | {"trainable_token_indices": [7]}, factors() | {DELTA: np.ones((1, 6))}),
            (CONFIG_OF | {"trainable_token_indices": [8]}, factors() | {DELTA: np.ones((1, 6))}),
        )
    }
    assert len(digests) == 8
    assert make_adapter(CONFIG_OF, factors(), "elsewhere").digest in digests


A, B = factors()
BIAS, TABLE = B.replace(".weight", ".bias"), "base_model.model.model.embed_tokens.lora_embedding_A"
BAD: dict[str, tuple[dict, dict, str]] = {
    "unknown tensor": ({}, {A.replace("lora_A", "lora_C"): np.zeros((2, 2))}, "lora_C.weight; other"),
    "one factor": ({}, {B: None}, "must have both lora_A and lora_B, got no lora_B"),
    "one table": ({}, {TABLE: np.ones((4, 9), np.float32)}, "both lora_embedding_A and lora_embedding_B"),
    "unwanted bias": ({}, {BIAS: np.ones(8, np.float32)}, "lora_bias False and model.layers.0.*q_proj with it"),
    "no bias": ({"lora_bias": True}, {}, "lora_bias True and model.layers.0.*q_proj without it"),
    "size of a bias": ({"lora_bias": True}, {BIAS: np.ones(7, np.float32)}, "must have 8 elements, got 7"),
    "shape of a bias": ({"lora_bias": True}, {BIAS: np.ones((8, 1), np.float32)}, r"float vector, got shape \[8, 1\]"),
    "no magnitude": ({"use_dora": True}, {}, "must have lora_magnitude_vector exactly if"),
    "unsaved": ({"modules_to_save": ["lm_head"]}, {}, "must have their weights in .*, got none of lm_head"),
    "tokens": ({}, {DELTA: np.ones((2, 6))}, "must have 2 ids for model.embed_tokens, got 0"),
    "ids": ({"trainable_token_indices": [3, 4, 5]}, {DELTA: np.ones((2, 6))}, "must have 2 ids for .*, got 3"),
    "twice an id": ({"trainable_token_indices": [3, 3]}, {DELTA: np.ones((2, 6))}, "lists of different token ids"),
    "other ids": (
        {"trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [3]}},
        {DELTA: np.ones((2, 6))},
        "must have their rows in .*, got none for lm_head",
    ),
    "no rows": ({"trainable_token_indices": [3]}, {}, r"must have their rows in .*, got none for \[3\]"),
    "rank": ({"r": 3}, {}, "rank of adapter_config.json, 3, got 4"),
    "shapes": ({}, {B: np.zeros((8, 5))}, r"\[4, 6\] and \[8, 5\]"),
    "NaN": ({}, {A: np.full((4, 6), np.nan)}, "must be finite"),
    "integers": ({}, {A: np.zeros((4, 6), np.int32)}, "float matrix"),
    "other method": ({"peft_type": "IA3"}, {}, "peft_type must be 'LORA', got 'IA3'"),
    "no alpha": ({"lora_alpha": None}, {}, "lora_alpha must be a positive number, got None"),
    "huge alpha": ({"lora_alpha": 10**400}, {}, "lora_alpha must be a positive number, got 1000"),
    "alpha": ({"lora_alpha": -1}, {}, "lora_alpha must be a positive number, got -1"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, {}, "must not change the base model, got 'pissa_niter_4'"),
    "twice": ({}, {A.replace(".weight", ".default.weight"): np.ones((4, 6), np.float32)}, "must be given once"),
    "tokens before an invocation": (
        {"trainable_token_indices": [3, 4], "alora_invocation_tokens": [7]},
        {DELTA: np.ones((2, 6))},
        "alora_invocation_tokens must not have model.embed_tokens whole or in part",
    ),
    "unknown feature": ({"use_qalora": True}, {}, "use_qalora must be unset, got True"),
    "unknown method": ({"arrow_config": {"top_k": 3}}, {}, "arrow_config must be unset, got {'top_k': 3}"),
    "pattern": ({"rank_pattern": {"(": 4}}, {}, "must be a pattern"),
}


def test_each_layers_experts_have_the_parameters_that_the_configuration_names():
    targets = ["0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"]
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.lora_{name}.weight": np.ones(shape, np.float32)
        for layer in range(2)
        for name, shape in {"A": (8, 6), "B": (5, 8)}.items()
    }
    found = make_adapter(CONFIG_OF | {"target_parameters": targets}, tensors, "it").modules
    assert {*found} == {f"model.layers.{target.removeprefix('layers.')}" for target in targets}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name):
    fields, tensors, message = BAD[name]
    given = {key: array for key, array in (factors() | tensors).items() if array is not None}
    with pytest.raises(CheckpointError, match=message):
        make_adapter(CONFIG_OF | fields, given, "it")


def test_missing_files_and_pickles_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be a directory"):
        read_adapter(tmp_path / "none")
    with pytest.raises(CheckpointError, match=re.escape(CONFIG)):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(CheckpointError, match="a directory without it"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="a pickle, which may run code"):
        read_adapter(tmp_path)
