"""Quantised checkpoints as they are: weights, products and logits are those of the layouts' definitions."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams, weights
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.weight_formats import packed, weight_format
from jaxserve.layers.weight_formats.int8 import BlockMatrix
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.layers.weight_formats.stored import SchemeFormat
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.models import registry
from jaxserve.models.params import device_bytes, matrix_transform
from jaxserve.pallas_kernels import packed_linear
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import abstract_params
from jaxserve.tools.planner.targets import parse_target
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import reference_logits
from tests.e2e.sizes import SIZES
from tests.models.test_parity import run
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.quant.fake_activations import FAKE_INT8
from tests.quant.loaded import ONE_LAYER, UNOPTIMIZED, all_rows, loaded, safetensors_of, torch_rows
from tests.quant.quantized_checkpoints import CASES, Case, write_quantized
from tests.quant.writers import integers, write_gptq
from tests.soon_compiled import few_programs

SOME = ("fp8-block", "ct-nvfp4", "modelopt-int4-awq", "ct-int4-zeros", "gptq-order")
SOME += ("awq", "ct-w8a8")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(3, 20))}


@pytest.mark.parametrize("name", some_by_default(list(CASES), *SOME))
def test_weights_and_products(tmp_path: Path, name: str) -> None:
    """Weights are bit for bit those that the writer encoded; each product has the activations of the scheme."""
    model = write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    _, specs, params = loaded(tmp_path)
    dequantised = weights.load(tmp_path, specs, schemes=registry.from_hf_config(weights.read_config(tmp_path)).schemes)
    matrices = [spec for spec in specs if spec.path[-1].endswith("proj")]
    assert len(matrices) == 4
    for spec in matrices:
        matrix, expected = leaf_at(params, spec.path), torch_rows(model, spec)
        assert isinstance(matrix, StoredMatrix)
        assert matrix.shape == spec.shape
        np.testing.assert_array_equal(leaf_at(dequantised, spec.path), expected)
        if spec.path[-1] in ("qkv_proj", "down_proj"):  # fused, and of a width that no block divides
            np.testing.assert_array_equal(all_rows(matrix), expected)
            x = np.random.default_rng(1).standard_normal((5, spec.shape[1])).astype(np.float32)
            with torch.no_grad():
                modules = [model.get_submodule(name.removesuffix(".weight")) for name in spec.hf_names]
                wanted = torch.cat([module(torch.tensor(x)) for module in modules], dim=-1).numpy()
            np.testing.assert_allclose(multiply(x, matrix), wanted, rtol=0, atol=2e-5)


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def multiply(x: jax.Array, matrix: Any) -> jax.Array:
    return linear(x, matrix, dtype=jnp.float32)


NATIVE = {
    **dict.fromkeys(("ct-int4", "ct-int4-channel", "modelopt-int4-awq", "ct-w4a8"), "int4"),
    **dict.fromkeys(
        ("ct-int4-zeros", "gptq", "gptq-wide", "gptq-zeros", "gptq-v2", "auto-round-gptq", "auto-round-awq"), "uint4"
    ),
    **dict.fromkeys(("awq", "ct-int4-order", "gptq-order", "gptq-order-wide"), "uint4"),
    **{name: "int8" for name in CASES if "int8" in name or "w8a8" in name},
    **{name: "float8_e4m3fn" for name in CASES if "fp8" in name},
    **{name: "float4_e2m1fn" for name in CASES if "fp4" in name or name == "modelopt-mixed"},
}
assert NATIVE.keys() == CASES.keys()
needs_kernels = pytest.mark.skipif(packed_linear.unsupported("int4", "cpu") is not None, reason="needs the kernels")


@partial(jax.jit, static_argnums=2, compiler_options=UNOPTIMIZED)
def products(inputs: tuple[jax.Array, ...], matrices: tuple[Any, ...], gated: tuple[bool, ...]) -> list[jax.Array]:
    """Return the product of each input and matrix, all by one program."""
    activations = [swiglu if each else None for each in gated]
    return [linear(*each, activation=f) for *each, f in zip(inputs, matrices, activations, strict=True)]


@needs_kernels
@pytest.mark.parametrize("name", some_by_default(list(CASES), "ct-int4", "gptq-wide", "fp8-block", "ct-w8a8"))
def test_native_kernels_compute_what_xla_computes(tmp_path: Path, name: str) -> None:
    """Products are those of the encoded weights in float64, or XLA's if inputs are quantised."""
    model = write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    _, specs, stored = loaded(tmp_path)
    _, _, params = loaded(tmp_path, native=True)
    dtypes, operands, expected = set(), [], []
    for spec in specs:
        if not spec.path[-1].endswith("proj"):
            continue
        matrix, by_xla = (leaf_at(tree, spec.path) for tree in (params, stored))
        dtypes.add(by_xla.scheme and SchemeFormat(by_xla.scheme).native_dtype(jnp.float32))
        assert isinstance(matrix, NativeMatrix)
        wide = torch_rows(model, spec).astype(np.float64)
        for num_tokens in (1, 20):
            x = np.random.default_rng(1).standard_normal((num_tokens, spec.shape[1])).astype(np.float32)
            wanted = x.astype(np.float64) @ wide.T
            if spec.gated:
                gate, up = np.split(wanted, 2, axis=1)
                wanted = gate / (1 + np.exp(-gate)) * up
            for each in (matrix, by_xla):
                operands.append((x, each, spec.gated))
                expected.append(wanted if by_xla.scheme.activation is None else None)
    inputs, matrices, gated = zip(*operands, strict=True)
    found = products(inputs, matrices, gated)
    for y, by_xla, wanted in zip(found[::2], found[1::2], expected[::2], strict=True):
        np.testing.assert_allclose(y, by_xla, rtol=0, atol=2e-5)
        if wanted is not None:
            np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-5)
    assert {dtype and jnp.dtype(dtype).name for dtype in dtypes} == {NATIVE[name]}


@pytest.mark.parametrize("name", some_by_default(list(CASES), "ct-fp8-channel", "gptq-order"))
def test_logits(tmp_path: Path, name: str) -> None:
    """Logits are those of transformers with the same weights, unless a bit of an input decides on a whole int8 step."""
    model = write_quantized(tmp_path, CASES[name])
    arch, _, params = loaded(tmp_path)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, 40).astype(np.int32)
    found, expected = np.asarray(run(params, arch, jnp.asarray(ids))[0]), reference_logits(model, ids)
    if CASES[name].fake in FAKE_INT8:
        # A token whose largest value is negative has it at -127.5 steps, where the last bit of the input rounds it.
        assert np.abs(found - expected).mean() < 0.01 * np.abs(expected).max()
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_zero_points_of_gptq_borrow(tmp_path: Path) -> None:
    """A zero point of 0 is stored as a word from which 1 is subtracted in each place, and borrows."""
    write = write_gptq(4, 32, symmetric=False)

    def with_zeros(w: np.ndarray, rng: np.random.Generator) -> Any:
        w = np.abs(w) if w.shape[0] == 224 else w  # all groups of the up and gate projections
        return write(w, rng)

    assert (integers(np.abs(np.ones((8, 32))), 4, 32, symmetric=False)[1] == 0).all()
    model = write_quantized(tmp_path, Case({**CASES["gptq"].config, "sym": False}, with_zeros), **ONE_LAYER)
    _, specs, params = loaded(tmp_path)
    (spec,) = [spec for spec in specs if spec.path[-1] == "gate_up_proj"]
    matrix = leaf_at(params, spec.path)
    assert (np.asarray(matrix.zero) == 0).any()
    np.testing.assert_array_equal(all_rows(matrix), torch_rows(model, spec))


# Engines


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", some_by_default(list(CASES), "fp8-block", "gptq-order", "ct-nvfp4"))
def test_plans_count_the_bytes_that_are_loaded(tmp_path: Path, name: str, num_devices: int) -> None:
    write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    arch, _, params = loaded(tmp_path)
    planned = abstract_params(arch, jnp.dtype("float32"), None, num_devices)
    assert jax.tree.structure(planned) == jax.tree.structure(params)
    held, size = device_bytes(params), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(planned))
    assert size == held if num_devices == 1 else held / 2 < size < held
    if num_devices == 1:
        _, _, served = loaded(tmp_path, native=packed_linear.unsupported("int4", "cpu") is None)
        config = EngineConfig(str(tmp_path), dtype="float32")
        assert make_plan(config, parse_target("cpu")).memory.weights == device_bytes(served)


@pytest.mark.parametrize("name", some_by_default(list(CASES), "modelopt-nvfp4", "gptq-order", "ct-fp8-channel"))
def test_orbax_keeps_every_bit(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path / "hf", CASES[name], **ONE_LAYER)
    arch, specs, params = loaded(tmp_path / "hf")
    weights.convert(tmp_path / "hf", tmp_path / "orbax", specs, schemes=arch.schemes)
    weights.convert(tmp_path / "orbax", tmp_path / "back", specs, schemes=arch.schemes)
    _, _, again = loaded(tmp_path / "orbax")
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    back, wanted_tensors = safetensors_of(tmp_path / "back"), safetensors_of(tmp_path / "hf")
    assert back.keys() == wanted_tensors.keys()
    assert all(back[n].tobytes() == t.tobytes() and back[n].dtype == t.dtype for n, t in wanted_tensors.items())


ENGINES = ["ct-int4-zeros", "fp8-block", "ct-nvfp4", "gptq-order", "awq", "ct-w8a8"]


@pytest.mark.parametrize("name", some_by_default(ENGINES, "ct-int4-zeros"))
def test_an_engine_serves_and_takes_other_weights(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = write_quantized(tmp_path / "a", CASES[name], **ONE_LAYER)
    other = write_quantized(tmp_path / "b", CASES[name], seed=1, **ONE_LAYER)
    write_quantized(tmp_path / "c", CASES["awq" if name == "gptq-order" else "gptq"], **ONE_LAYER)
    with caplog.at_level(logging.INFO), few_programs():
        llm = LLM(str(tmp_path / "a"), skip_tokenizer_init=True, **SIZES)
    with llm:

        def check(wanted: torch.nn.Module) -> None:
            (output,) = llm.generate([PROMPT], GREEDY)
            ids = np.array([*PROMPT["prompt_token_ids"], *output.outputs[0].token_ids], np.int32)
            logits = reference_logits(wanted, ids)[len(PROMPT["prompt_token_ids"]) - 1 : -1]
            found = np.take_along_axis(logits, ids[len(PROMPT["prompt_token_ids"]) :, None], axis=1)[:, 0]
            slack = 0.1 if CASES[name].fake in FAKE_INT8 else 1e-3
            assert (found > logits.max(axis=1) - slack).all()

        check(model)
        llm.update_weights(str(tmp_path / "b"))
        check(other)
        llm.update_weights(safetensors_of(tmp_path / "a"))
        check(model)
        with pytest.raises(ConfigError, match="got another quantization_config"):
            llm.update_weights(str(tmp_path / "c"))
        config = weights.read_config(tmp_path / "b")
        config["quantization_config"] |= {"ignore": ["lm_head", "others"], "modules_to_not_convert": ["others"]}
        (tmp_path / "b" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="got another quantization_config"):
            llm.update_weights(str(tmp_path / "b"))
        floats = {k: v.detach().numpy() for k, v in model.named_parameters()}
        with pytest.raises(ConfigError, match="without them"):
            llm.update_weights(floats)
        check(model)
    lines = [line for line in caplog.messages if "checkpoint:" in line]
    method = CASES[name].config["quant_method"]
    assert len(lines) == 1
    assert lines[0].startswith(f"{method} checkpoint: 4 matrices {method}")
    is_native = name in NATIVE and packed_linear.unsupported("int4", "cpu") is None
    path = "multiplied by the native kernels" if is_native else "dequantised in products by XLA"
    assert lines[0].endswith(f"2 matrices are not quantised; {path}")


@needs_kernels
@pytest.mark.full
def test_served_tokens_are_those_of_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized(tmp_path, CASES["awq"], **ONE_LAYER)
    found = []
    for _ in range(2):
        with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES) as llm:
            found.append(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
            matrix = llm.params["layers"][0]["o_proj"]
            assert isinstance(matrix, StoredMatrix if found[1:] else NativeMatrix)
        monkeypatch.setattr(packed, "unsupported", lambda *_: "compared with products by XLA")
    assert found[0] == found[1]


def test_another_quantisation_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    """`quantization="int8"` dequantises and quantises again, with no dtype of 16 bits between."""
    model = write_quantized(tmp_path, CASES["ct-int4"], **ONE_LAYER)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs, form = registry.param_specs(arch), weight_format("int8", arch.schemes)
    params = weights.load(tmp_path, specs, transform=matrix_transform(specs, form), schemes=arch.schemes)
    [spec] = [spec for spec in specs if spec.path == ("layers", 0, "o_proj")]
    matrix = params["layers"][0]["o_proj"]
    assert isinstance(matrix, BlockMatrix)
    wanted = torch_rows(model, spec)
    np.testing.assert_allclose(all_rows(matrix), wanted, rtol=0, atol=np.abs(wanted).max() / 253)
    transform = matrix_transform(specs, form, matrix_dtype=jnp.bfloat16)
    again = weights.load(tmp_path, specs, transform=transform, schemes=arch.schemes)["layers"][0]["o_proj"]
    jax.tree.map(np.testing.assert_array_equal, again, matrix)


def test_bfloat16_activations(tmp_path: Path) -> None:
    """Integer and 8-bit values of activations are exact in bfloat16, so that only the result is rounded."""
    write_quantized(tmp_path, CASES["ct-w8a8"], **ONE_LAYER)
    _, _, params = loaded(tmp_path)
    matrix, x = params["layers"][0]["o_proj"], np.random.default_rng(0).normal(size=(4, 160)).astype(jnp.bfloat16)
    y, wide = (multiply(v, matrix) for v in (x, np.asarray(x, np.float32)))
    np.testing.assert_allclose(y, wide, rtol=1e-5, atol=1e-5)
