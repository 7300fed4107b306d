"""`activation_quantization`: inputs of matmuls with integers are rounded to int8, and tokens depend on no others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams, weights
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.load_proposer import load_draft
from jaxserve.assembly.parameters import build_params
from jaxserve.layers.linear import linear
from jaxserve.layers.weight_formats import weight_format
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform
from jaxserve.weights import Activation
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import SIZES
from tests.quant.loaded import ONE_LAYER, all_rows
from tests.quant.quantized_checkpoints import CASES, write_quantized
from tests.quant.test_stored import needs_kernels
from tests.soon_compiled import few_programs

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(3, 131, 5 + 9 * i).tolist()} for i in range(4)]


def rounded(x: np.ndarray, num_groups: int) -> np.ndarray:
    groups = x.reshape(len(x), num_groups, -1)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127.5)
    return (np.clip(np.round(groups / scale), -128, 127).astype(np.float64) * scale).reshape(x.shape)


def loaded_with(path: Path, quantization: str | None) -> tuple[Any, Any]:
    arch = registry.from_hf_config(weights.read_config(path))
    specs, form = registry.param_specs(arch), weight_format(quantization, arch.schemes, "int8")
    transform = matrix_transform(specs, form, native=True)
    return specs, weights.load(path, specs, jnp.float32, transform=transform, schemes=arch.schemes)


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int4", "ct-int8-weights", "gptq-zeros", "ct-nvfp4-weights", "gptq-order"])
def test_inputs_are_rounded_by_weight_group(tmp_path: Path, name: str) -> None:
    if name in CASES:
        write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    else:
        write_checkpoint(tmp_path, "llama", **ONE_LAYER)
    specs, params = loaded_with(tmp_path, None if name in CASES else name)
    for spec in specs:
        if spec.path[-1] in ("o_proj", "qkv_proj"):
            matrix, x = leaf_at(params, spec.path), np.random.default_rng(0).normal(size=(7, spec.shape[1]))
            x = x.astype(np.float32)
            assert isinstance(matrix, NativeMatrix)
            order = slice(None) if matrix.inputs.order is None else np.asarray(matrix.inputs.order)
            inputs = rounded(x[:, order], matrix.packed.scales.shape[1])
            wanted = inputs @ np.asarray(all_rows(matrix)).astype(np.float64)[:, order].T
            found = jax.jit(linear)(x, matrix)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_schemes_keep_the_activations_that_they_specify(tmp_path: Path) -> None:
    found = {}
    for name in ("ct-w8a8-static-zeros", "fp8-block", "ct-fp8-weights", "ct-int4", "ct-int8-weights"):
        write_quantized(tmp_path, CASES[name], **ONE_LAYER)
        schemes = weights.read_schemes(weights.read_config(tmp_path))
        before, after = (each.for_module("model.layers.0.mlp.up_proj") for each in (schemes, schemes.rounding_inputs()))
        found[name] = None if after == before else after.activation
    assert found == {
        **dict.fromkeys(("ct-w8a8-static-zeros", "fp8-block", "ct-fp8-weights")),
        "ct-int4": Activation("int8", 32, dynamic=True),
        "ct-int8-weights": Activation("int8", None, dynamic=True),
    }


@needs_kernels
def test_an_engine_returns_the_same_tokens_alone_and_batched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts of one request are computed by tiles or vectors; logprobs are those of other inputs than without."""
    write_checkpoint(tmp_path, "llama")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    logprobs = {}
    for option in ("int8", None):
        with caplog.at_level(logging.INFO), few_programs():
            llm = LLM(
                str(tmp_path), skip_tokenizer_init=True, quantization="int8", activation_quantization=option, **SIZES
            )
        with llm:
            together = llm.generate(PROMPTS, params)
            alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
        for one, other in zip(together, alone, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.prompt_logprobs[1:] == other.prompt_logprobs[1:]
        logprobs[option] = [x.logprob for each in together[-1].prompt_logprobs[1:] for x in each.values()]
    assert sum("inputs of" in line and "rounded to int8" in line for line in caplog.messages) == 1
    assert 0 < np.abs(np.subtract(logprobs["int8"], logprobs[None])).max() < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs integer weights, got float32"),
        ({"quantization": "fp8"}, "needs integer weights, got fp8"),
        ({"quantization": "int8", "linear_backend": "xla"}, "needs the native CPU kernels, but linear_backend='xla'"),
    ],
)
def test_it_is_refused_without_integers_or_kernels(tmp_path: Path, options: dict[str, str], message: str) -> None:
    write_checkpoint(tmp_path, "llama", **ONE_LAYER)
    config = EngineConfig(str(tmp_path), activation_quantization="int8", **options)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    with pytest.raises(ConfigError, match=message if "xla" in message else f"({message}|needs the native CPU)"):
        build_params(config, arch)


@needs_kernels
def test_a_draft_model_needs_no_integers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", **ONE_LAYER)
    draft: dict[str, Any] = {"model": str(tmp_path), "num_speculative_tokens": 2}
    options: dict[str, Any] = {"quantization": "int8", "activation_quantization": "int8"}
    config = EngineConfig(str(tmp_path), skip_tokenizer_init=True, speculative_config=draft, **options)
    assert load_draft(config, build_arch(config)).params


def test_other_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="activation_quantization must be one of"):
        EngineConfig(activation_quantization="fp8")
