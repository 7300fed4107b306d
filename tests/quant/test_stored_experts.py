"""Experts of quantised checkpoints: held as they are stored, and multiplied as the layouts define it."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxserve.tools.planner
from jaxserve import LLM, weights
from jaxserve.layers.weight_formats import weight_format
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.models import registry
from jaxserve.models.params import device_bytes
from jaxserve.pallas_kernels import packed_linear
from jaxserve.tools.planner.program import abstract_params
from jaxserve.weights.load import stored_tensors
from jaxserve.weights.rows import leaf_at
from jaxserve.weights.safetensors_file import write_file
from tests.checkpoints import reference_logits
from tests.e2e.sizes import SIZES
from tests.models.test_parity import run
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.quant.loaded import all_rows, loaded
from tests.quant.quantized_checkpoints import CASES, write_gpt_oss, write_quantized
from tests.quant.test_stored import GREEDY, NATIVE, PROMPT

FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 1, "moe_intermediate_size": 224},
    "deepseek_v3": {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 224,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "v_head_dim": 8,
    },
}
# Bytes of a weight of an expert, at most: elements and scales.
FORMS = {
    "fp8-block": 1.13,
    "ct-fp8-channel": 1.05,
    "ct-int4": 0.65,
    "gptq": 0.7,
    "awq": 0.7,
    "ct-nvfp4": 0.6,
    "ct-w8a8": 1.05,
}
PAIRS = [f"{family} {name}" for family in FAMILY_SIZES for name in FORMS]
SOME = ("deepseek_v3 fp8-block",)
NUM_TOKENS = 30
CONFIGS = Path(jaxserve.tools.planner.__file__).parent / "configs"


def write(path: Path, pair: str, seed: int = 0) -> tuple[transformers.PreTrainedModel, str]:
    """Write a model with experts, or gpt-oss's; return it and the name of its format."""
    family, _, name = pair.partition(" ")
    if family == "gpt_oss":
        return write_gpt_oss(path, seed), name
    return write_quantized(path, CASES[name], seed, family, **FAMILY_SIZES[family]), name


def expert_rows(model: torch.nn.Module, spec: Any) -> np.ndarray:
    """Return the rows of all experts' matrices as devices hold them."""
    module, _, part = spec.hf_names[0].partition(".experts.")
    kind = "gate_up_proj" if part.endswith(("gate_proj.weight", "gate_up_proj")) else "down_proj"
    stack = model.get_parameter(f"{module}.experts.{kind}").detach()
    stack = stack.transpose(1, 2) if part == kind else stack
    return stack.reshape(spec.shape).numpy()


def assert_near(logits: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Compare logits; where activations are quantised, the last bit of an input may decide on a step of some tokens."""
    errors = np.abs(logits - expected).max(axis=1)
    if name in CASES and CASES[name].fake is not None:
        assert np.median(errors) < 1e-4
        assert errors.mean() < 0.02 * np.abs(expected).max()
    else:
        assert errors.max() < 1e-4


@pytest.mark.parametrize("pair", some_by_default([*PAIRS, "gpt_oss mxfp4"], *SOME))
def test_experts_are_those_that_are_stored(tmp_path: Path, pair: str) -> None:
    """Weights are bit for bit those that the writer encoded, and take the bytes of the file; logits are the model's."""
    model, name = write(tmp_path, pair)
    arch, specs, params = loaded(tmp_path)
    experts = [spec for spec in specs if spec.experts is not None and spec.is_matrix]
    dequantised = weights.load(tmp_path, specs, schemes=arch.schemes)
    assert experts
    for spec in experts:
        matrix, wanted = leaf_at(params, spec.path), expert_rows(model, spec)
        assert isinstance(matrix, StoredMatrix)
        assert matrix.shape == spec.shape
        np.testing.assert_array_equal(leaf_at(dequantised, spec.path), wanted)
        np.testing.assert_array_equal(all_rows(matrix), wanted)
        assert device_bytes(matrix) <= FORMS.get(name, 0.55) * wanted.size
    planned = abstract_params(arch, jnp.dtype("float32"))
    assert jax.tree.map(jnp.shape, planned) == jax.tree.map(jnp.shape, params)
    forms = [params]
    if name in NATIVE and packed_linear.unsupported("int4", "cpu") is None:
        forms.append(loaded(tmp_path, native=True)[2])
        assert isinstance(leaf_at(forms[1], experts[0].path), NativeMatrix)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, NUM_TOKENS).astype(np.int32)
    expected = reference_logits(model, ids)
    for tree in forms:
        logits = np.asarray(run(tree, arch, jnp.asarray(ids))[0])
        assert_near(logits, expected, name)


@pytest.mark.parametrize("kinds", [("weight_scale_inv",), ("weight", "weight_scale_inv")])
def test_experts_of_one_tensor(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """As transformers writes fp8 by itself, all experts' scales are one tensor; so may the matrices be."""
    sizes = {**FAMILY_SIZES["qwen3_moe"], "moe_intermediate_size": 256}
    write_quantized(tmp_path, CASES["fp8-block"], 0, "qwen3_moe", **sizes)
    apart = loaded(tmp_path)[2]
    tensors = {name: np.array(tensor) for name, tensor in stored_tensors(tmp_path).items()}
    module, parts = (
        "model.layers.0.mlp.experts",
        {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    )
    num_experts = sum(name.endswith("down_proj.weight") for name in tensors)
    for stack, names in parts.items():
        for kind in kinds:
            rows = [[tensors.pop(f"{module}.{i}.{name}.{kind}") for name in names] for i in range(num_experts)]
            tensors[f"{module}.{stack}{kind.removeprefix('weight')}"] = np.stack([np.concatenate(own) for own in rows])
    structs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    write_file(tmp_path / "model.safetensors", structs, tensors.__getitem__)
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path)[2], apart)


KIMI_K2_THINKING = {
    **CASES["ct-int4"].config,
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}


def test_published_configurations_leave_routers_and_arrays_plain() -> None:
    """All linear modules of DeepSeek-V3 are quantised, and the experts alone of Kimi K2 Thinking."""
    forms = {}
    for quantization in (None, KIMI_K2_THINKING):
        config = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | {"num_hidden_layers": 4}
        arch = registry.from_hf_config(config | ({} if quantization is None else {"quantization_config": quantization}))
        form = weight_format(None, arch.schemes)
        found = {spec.path[-1]: form.at(spec) for spec in registry.param_specs(arch) if spec.is_matrix}
        forms[quantization is None] = {name for name, own in found.items() if own is not None}
    experts = {"experts_gate_up", "experts_down"}
    dense = {"q_a_proj", "q_proj", "kv_a_proj", "o_proj", "gate_up_proj", "down_proj", "shared_gate_up", "shared_down"}
    assert forms == {True: experts | dense, False: experts}


def test_mxfp4_is_what_transformers_loads(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    config = transformers.Mxfp4Config(dequantize=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=config, experts_implementation="eager"
    )
    arch, specs, params = loaded(tmp_path)
    for spec in specs:
        if spec.experts is not None and spec.is_matrix:
            np.testing.assert_array_equal(all_rows(leaf_at(params, spec.path)), expert_rows(oracle, spec))
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, NUM_TOKENS).astype(np.int32)
    logits = np.asarray(run(params, arch, jnp.asarray(ids))[0])
    np.testing.assert_allclose(logits, reference_logits(oracle, ids), rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("pair", [*PAIRS, "gpt_oss mxfp4"])
def test_an_engine_serves_them(tmp_path: Path, pair: str, caplog: pytest.LogCaptureFixture) -> None:
    model, name = write(tmp_path / "a", pair)
    other, _ = write(tmp_path / "b", pair, seed=1)
    start = partial(LLM, skip_tokenizer_init=True, **SIZES | {"num_pages": 2 * SIZES["num_pages"]})
    with caplog.at_level(logging.INFO), start(str(tmp_path / "a")) as llm:

        def check(wanted: torch.nn.Module) -> None:
            (output,) = llm.generate([PROMPT], GREEDY)
            ids = np.array([*PROMPT["prompt_token_ids"], *output.outputs[0].token_ids], np.int32)
            logits = reference_logits(wanted, ids)[len(PROMPT["prompt_token_ids"]) - 1 : -1]
            found = np.take_along_axis(logits, ids[len(PROMPT["prompt_token_ids"]) :, None], axis=1)[:, 0]
            assert (found > logits.max(axis=1) - (0.1 if name in CASES and CASES[name].fake else 1e-3)).all()

        check(model)
        llm.update_weights(str(tmp_path / "b"))
        check(other)
    (line,) = [line for line in caplog.messages if " checkpoint: " in line]
    assert ("1 matrices are dequantised as they are read" in line) == pair.startswith("deepseek")  # its kv_b_proj
