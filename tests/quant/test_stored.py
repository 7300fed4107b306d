"""Quantised checkpoints as they are: weights, products and logits are those of the layouts' definitions."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams, weights
from jaxserve.engine.parameters import build_params
from jaxserve.layers.linear import LinearContext, linear
from jaxserve.layers.mlp import swiglu
from jaxserve.models import registry
from jaxserve.models.params import device_bytes, matrix_transform
from jaxserve.pallas_kernels import packed_linear
from jaxserve.planner.plan import make_plan
from jaxserve.planner.program import abstract_params
from jaxserve.planner.targets import parse_target
from jaxserve.quant import packed, weight_format
from jaxserve.quant.int8 import QuantizedMatrix
from jaxserve.quant.packed import NativeMatrix
from jaxserve.quant.stored import SchemeFormat, StoredMatrix
from jaxserve.weights.quantized import read_schemes
from jaxserve.weights.rows import leaf_at
from jaxserve.weights.safetensors_file import map_file, write_file
from tests.checkpoints import reference_logits
from tests.e2e.sizes import SIZES
from tests.models.test_parity import run
from tests.parameters import some_by_default
from tests.quant.quantized_checkpoints import CASES, Case, fake_int8, integers, write_gptq, write_quantized

SOME = ("ct-fp8-tensor", "fp8-block", "ct-nvfp4", "modelopt-nvfp4", "ct-int4-zeros", "gptq-order", "awq", "ct-w8a8")
ONE_LAYER = {"num_hidden_layers": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(3, 20))}


def loaded(path: Path, dtype: Any = jnp.float32, *, native: bool = False) -> tuple[Any, list[Any], Any]:
    arch = registry.from_hf_config(weights.read_config(path))
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, weight_format(None, arch.schemes), native=native)
    return arch, specs, weights.load(path, specs, dtype, transform=transform, schemes=arch.schemes)


def torch_rows(model: torch.nn.Module, spec: Any) -> np.ndarray:
    parts = [model.get_parameter(name).detach().numpy() for name in dict.fromkeys(spec.hf_names)]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", some_by_default(list(CASES), *SOME))
def test_weights_and_products(tmp_path: Path, name: str) -> None:
    """Weights are bit for bit those that the writer encoded; each product has the activations of the scheme."""
    model = write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    _, specs, params = loaded(tmp_path)
    dequantised = weights.load(tmp_path, specs, schemes=registry.from_hf_config(weights.read_config(tmp_path)).schemes)
    multiply = jax.jit(linear, compiler_options={"xla_backend_optimization_level": 0})
    matrices = [spec for spec in specs if spec.path[-1].endswith("proj")]
    assert len(matrices) == 4
    for spec in matrices:
        matrix, expected = leaf_at(params, spec.path), torch_rows(model, spec)
        assert isinstance(matrix, StoredMatrix)
        assert matrix.shape == spec.shape
        np.testing.assert_array_equal(leaf_at(dequantised, spec.path), expected)
        if spec.path[-1] in ("qkv_proj", "down_proj"):  # fused, and of a width that no block divides
            np.testing.assert_array_equal(matrix.rows(jnp.arange(spec.shape[0])), expected)
            x = np.random.default_rng(1).standard_normal((5, spec.shape[1])).astype(np.float32)
            with torch.no_grad():
                modules = [model.get_submodule(name.removesuffix(".weight")) for name in spec.hf_names]
                wanted = torch.cat([module(torch.tensor(x)) for module in modules], dim=-1).numpy()
            np.testing.assert_allclose(multiply(x, matrix), wanted, rtol=0, atol=2e-5)


NATIVE = {
    **dict.fromkeys(("ct-int4", "ct-int4-channel"), "int4"),
    **dict.fromkeys(
        ("ct-int4-zeros", "gptq", "gptq-wide", "gptq-zeros", "gptq-v2", "auto-round-gptq", "auto-round-awq"), "uint4"
    ),
    "awq": "uint4",
    "ct-int8-packed": "int8",
    "ct-int8-weights": "int8",
}
needs_kernels = pytest.mark.skipif(packed_linear.unsupported("int4", "cpu") is not None, reason="needs the kernels")


@needs_kernels
@pytest.mark.parametrize("name", some_by_default(list(CASES), "ct-int4", "gptq-wide", "ct-int8-weights"))
def test_native_kernels_compute_what_xla_computes(tmp_path: Path, name: str) -> None:
    """Products of integers without activations are those of the encoded weights in float64; other matrices stay."""
    model = write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    _, specs, stored = loaded(tmp_path)
    _, _, params = loaded(tmp_path, native=True)
    multiply = jax.jit(linear, static_argnums=2, compiler_options={"xla_backend_optimization_level": 0})
    dtypes = set()
    for spec in specs:
        if not spec.path[-1].endswith("proj"):
            continue
        matrix, by_xla = (leaf_at(tree, spec.path) for tree in (params, stored))
        dtypes.add(by_xla.scheme and SchemeFormat(by_xla.scheme).native_dtype(jnp.float32))
        assert isinstance(matrix, NativeMatrix) == (name in NATIVE)
        if name not in NATIVE:
            assert isinstance(matrix, StoredMatrix)
            continue
        wide = torch_rows(model, spec).astype(np.float64)
        for num_tokens in (1, 20):
            x = np.random.default_rng(1).standard_normal((num_tokens, spec.shape[1])).astype(np.float32)
            wanted = x.astype(np.float64) @ wide.T
            if spec.gated:
                gate, up = np.split(wanted, 2, axis=1)
                wanted = gate / (1 + np.exp(-gate)) * up
            context = LinearContext(activation=swiglu if spec.gated else None)
            for each in (matrix, by_xla):
                np.testing.assert_allclose(multiply(x, each, context), wanted, rtol=0, atol=2e-5)
    assert {dtype and jnp.dtype(dtype).name for dtype in dtypes} == {NATIVE.get(name)}


@pytest.mark.parametrize("name", some_by_default(list(CASES), "ct-fp8-channel", "gptq-order"))
def test_logits(tmp_path: Path, name: str) -> None:
    """Logits are those of transformers with the same weights, unless a bit of an input decides on a whole int8 step."""
    model = write_quantized(tmp_path, CASES[name])
    arch, _, params = loaded(tmp_path)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, 40).astype(np.int32)
    found, expected = np.asarray(run(params, arch, jnp.asarray(ids))[0]), reference_logits(model, ids)
    if CASES[name].fake is fake_int8:
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
    np.testing.assert_array_equal(matrix.rows(jnp.arange(spec.shape[0])), torch_rows(model, spec))


# Which modules are quantised


def mixed(case: Case, **config: Any) -> Case:
    return case._replace(config={**case.config, **config})


FP8, INT4 = CASES["ct-fp8-weights"], CASES["ct-int4"]
QUIRKS = {
    "pattern": (mixed(FP8, ignore=["lm_head", "re:.*down_proj"]), ["down_proj"]),
    "name": (mixed(FP8, ignore=["lm_head", "model.layers.0.self_attn.o_proj"]), ["o_proj"]),
    "fused name": (mixed(FP8, ignore=["lm_head", "re:.*qkv_proj"]), ["q_proj", "k_proj", "v_proj"]),
    "part of a fused matrix": (mixed(FP8, ignore=["lm_head", "re:.*k_proj"]), ["k_proj"]),
    "glob": (
        mixed(CASES["modelopt-fp8"], ignore=["lm_head", "model.layers.*.mlp.*"]),
        ["down_proj", "gate_proj", "up_proj"],
    ),
    "parent": (
        mixed(CASES["fp8-block"], modules_to_not_convert=["self_attn"]),
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "awq": (mixed(CASES["awq"], modules_to_not_convert=["down_proj"]), ["down_proj"]),
    "dynamic": (
        mixed(CASES["gptq"], dynamic={r"-:.*\.mlp\.up_proj": {}, r"-:.*\.gate_proj": {}}),
        ["gate_proj", "up_proj"],
    ),
}


@pytest.mark.parametrize("quirk", QUIRKS)
def test_modules_that_are_left_out(tmp_path: Path, quirk: str) -> None:
    case, plain = QUIRKS[quirk]
    case = case._replace(is_quantised=lambda name: name.rpartition(".")[2] not in ("lm_head", *plain))
    model = write_quantized(tmp_path, case, **ONE_LAYER)
    _, specs, params = loaded(tmp_path)
    for spec in specs:
        if spec.path[-1].endswith("proj"):
            own = {name.split(".")[-2] in plain for name in spec.hf_names}
            matrix = leaf_at(params, spec.path)
            assert isinstance(matrix, StoredMatrix) == (own == {False})
            rows = matrix.rows(jnp.arange(spec.shape[0])) if isinstance(matrix, StoredMatrix) else matrix
            np.testing.assert_array_equal(rows, torch_rows(model, spec))


@pytest.mark.parametrize("stem", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    ("name", "pattern"), [("fp8-block", "{}layers.0.linear_attn.{}"), ("ct-fp8-weights", "re:^{}.*linear_attn.{}$")]
)
def test_multimodal_checkpoints_name_modules_of_their_text_part(
    tmp_path: Path, stem: str, name: str, pattern: str
) -> None:
    plain = ["in_proj_a", "in_proj_b"]
    key = "ignore" if pattern.startswith("re:") else "modules_to_not_convert"
    case = mixed(CASES[name], **{key: ["lm_head", *(pattern.format("model.", module) for module in plain)]})
    case = case._replace(is_quantised=lambda module: module.rpartition(".")[2] not in ("lm_head", *plain))
    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    write_quantized(tmp_path, case, family="qwen3_5", **sizes)
    _, _, expected = loaded(tmp_path)
    tensors = {
        name.replace("model.", stem, 1): array for name, array in map_file(tmp_path / "model.safetensors").items()
    }
    structs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    write_file(tmp_path / "moved.safetensors", structs, tensors.__getitem__)
    (tmp_path / "moved.safetensors").rename(tmp_path / "model.safetensors")
    text = weights.read_config(tmp_path)
    quantization = text.pop("quantization_config")
    quantization[key] = ["lm_head", "re:.*visual.*", *(pattern.format(stem, module) for module in plain)]
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    for config in (
        {**whole, "quantization_config": quantization},
        whole | {"text_config": text | {"quantization_config": quantization}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path)[2], expected)


def test_groups_of_modules_with_several_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8, int4 = (case.config["config_groups"]["group_0"] for case in (FP8, INT4))
    groups = {
        "attention": {**fp8, "format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "others": {**int4, "format": "pack-quantized", "targets": ["Linear"]},
    }
    config = {**INT4.config, "format": "mixed-precision", "config_groups": groups}
    for writer, names in ((FP8.write, "self_attn"), (INT4.write, "mlp")):
        case = Case(config, writer, is_quantised=lambda name, names=names: names in name)
        write_quantized(tmp_path / names, case, **ONE_LAYER)
    attention, mlp = (safetensors_of(tmp_path / names) for names in ("self_attn", "mlp"))
    mlp = {name: tensor for name, tensor in mlp.items() if "self_attn" not in name}
    merged = {name: tensor for name, tensor in attention.items() if ".mlp." not in name} | mlp
    (tmp_path / "mlp" / "model.safetensors").unlink()
    write_tensors(tmp_path / "mlp", merged)
    arch, _, params = loaded(tmp_path / "mlp")
    kinds = {name: leaf_at(params, ("layers", 0, name)).scheme.elements for name in ("qkv_proj", "o_proj", "down_proj")}
    assert kinds == {"qkv_proj": "e4m3", "o_proj": "e4m3", "down_proj": "int4"}
    if packed_linear.unsupported("int4", "cpu") is None:
        with caplog.at_level(logging.INFO):
            params = build_params(EngineConfig(str(tmp_path / "mlp")), arch)
        types = {name: type(leaf_at(params, ("layers", 0, name))) for name in kinds}
        assert types == {"qkv_proj": StoredMatrix, "o_proj": StoredMatrix, "down_proj": NativeMatrix}
        assert "; 2 are multiplied by the native kernels, the others dequantised in products by XLA" in caplog.text


def safetensors_of(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in map_file(path / "model.safetensors").items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    structs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    write_file(path / "model.safetensors", structs, tensors.__getitem__)


WEIGHTS = FP8.config["config_groups"]["group_0"]["weights"]


def one_group(targets: list[str], **weights: Any) -> dict[str, Any]:
    return {**FP8.config, "config_groups": {"a": {"targets": targets, "weights": {**WEIGHTS, **weights}}}}


@pytest.mark.parametrize("name", ["embed_tokens", "embed_tokens_per_layer", "layers.0.mlp.gate"])
def test_tables_and_routers_are_not_linear(name: str) -> None:
    schemes = read_schemes({"quantization_config": one_group(["Linear"])})
    assert schemes is not None
    assert schemes.of_tensor(f"model.{name}.weight") is None
    assert schemes.of_tensor("model.layers.0.mlp.up_proj.weight") is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, r"quant_method .* compressed-tensors, fp8, .* got 'bitsandbytes'"),
    ({**FP8.config, "quantization_status": "frozen"}, "quantization_status .* got 'frozen'"),
    ({**FP8.config, "transform_config": {"config_groups": {}}}, "transform_config"),
    ({**FP8.config, "format": "marlin-24"}, "marlin-24 of 8 bits .* for Linear"),
    (one_group(["re:.*mlp"], num_bits=6), "naive-quantized of 6 bits .* for re:.*mlp"),
    (one_group(["Linear"], strategy="attn_head"), "strategy 'attn_head'"),
    ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "FP8, NVFP4, .* got INT4_AWQ for all modules"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "4 or 8 bits, got 3 bits for all modules"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemm', got 'gemv'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'e4m3', got 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": 128}, r"quantization_config \(fp8\) has a fault: TypeError"),
]


def test_other_spellings() -> None:
    """Nulls, strings and absent fields of old versions mean what their new spellings mean."""
    block, group = CASES["ct-fp8-block"].config, CASES["ct-int4"].config

    def respelled(config: dict[str, Any], **weights: Any) -> Any:
        own = config["config_groups"]["group_0"]
        more = {"output_activations": None, "weights": {**own["weights"], "observer": "minmax", **weights}}
        nulls = {"kv_cache_scheme": None, "sparsity_config": {}, "config_groups": {"group_0": {**own, **more}}}
        return read_schemes({"quantization_config": {**config, **nulls}})

    for config, weights_ in (
        (block, {"block_structure": "128x128"}),
        (group, {"strategy": None, "actorder": "weight"}),
    ):
        assert respelled(config, **weights_) == read_schemes({"quantization_config": config})
    channel = read_schemes({"quantization_config": CASES["ct-int4-channel"].config})
    assert respelled(group, group_size=-1) == channel


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_quantized(tmp_path, FP8._replace(config=config), **ONE_LAYER)
    with pytest.raises(ConfigError, match=message):
        registry.from_hf_config(weights.read_config(tmp_path))


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["gptq-order"], **ONE_LAYER)
    tensors = safetensors_of(tmp_path)
    name = "model.layers.0.self_attn.k_proj"
    changes: list[tuple[dict[str, Any], str]] = [
        ({f"{name}.scales": None}, rf"1 modules without them: {name}.scales \(gptq\)"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"].astype(np.int8)}, rf"{name}.weight must be int32 .* got int8"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"][:-1]}, r"\(80, 152\) instead of \(80, 160\)"),
        ({f"{name}.g_idx": tensors[f"{name}.g_idx"][::-1].copy()}, "must have the same order of columns"),
        ({f"{name}.bias": np.ones(80, np.float16)}, "bias must be zero"),
    ]
    for change, message in changes:
        write_tensors(tmp_path, {n: t for n, t in (tensors | change).items() if t is not None})
        with pytest.raises(weights.CheckpointError, match=message):
            loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {"group_size": 16}),
        ("gptq", {"group_size": 64}),
        ("awq", {"group_size": 16}),
        ("awq", {"group_size": 64}),
        ("fp8-block", {"weight_block_size": [64, 64]}),
        ("fp8-block", {"weight_block_size": [256, 256]}),
    ],
)
def test_scales_must_be_those_of_the_configuration(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    config = weights.read_config(tmp_path)
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(weights.CheckpointError, match=r"q_proj\..*scale.* must have the shape"):
        loaded(tmp_path)


def test_modelopt_keeps_its_configuration_apart(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["modelopt-nvfp4"], **ONE_LAYER)
    config = weights.read_config(tmp_path)
    quantization = {k: v for k, v in config.pop("quantization_config").items() if k != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    apart = {"producer": {"name": "modelopt"}, "quantization": {**quantization, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(apart))
    arch, _, params = loaded(tmp_path)
    assert params["layers"][0]["o_proj"].scheme.elements == "e2m1"
    assert arch.schemes.kv_cache


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
        config = EngineConfig(str(tmp_path), dtype="float32")
        assert make_plan(config, parse_target("cpu")).memory.weights == held


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
    with caplog.at_level(logging.INFO), LLM(str(tmp_path / "a"), skip_tokenizer_init=True, **SIZES) as llm:

        def check(wanted: torch.nn.Module) -> None:
            (output,) = llm.generate([PROMPT], GREEDY)
            ids = np.array([*PROMPT["prompt_token_ids"], *output.outputs[0].token_ids], np.int32)
            logits = reference_logits(wanted, ids)[len(PROMPT["prompt_token_ids"]) - 1 : -1]
            found = np.take_along_axis(logits, ids[len(PROMPT["prompt_token_ids"]) :, None], axis=1)[:, 0]
            slack = 0.1 if CASES[name].fake is fake_int8 else 1e-3
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
    spec, matrix = specs[3], params["layers"][0]["o_proj"]
    assert isinstance(matrix, QuantizedMatrix)
    wanted = torch_rows(model, spec)
    np.testing.assert_allclose(matrix.rows(jnp.arange(160)), wanted, rtol=0, atol=np.abs(wanted).max() / 253)
    transform = matrix_transform(specs, form, matrix_dtype=jnp.bfloat16)
    again = weights.load(tmp_path, specs, transform=transform, schemes=arch.schemes)["layers"][0]["o_proj"]
    jax.tree.map(np.testing.assert_array_equal, again, matrix)


def test_bfloat16_activations(tmp_path: Path) -> None:
    """Integer and 8-bit values of activations are exact in bfloat16, so that only the result is rounded."""
    write_quantized(tmp_path, CASES["ct-w8a8"], **ONE_LAYER)
    _, _, params = loaded(tmp_path)
    matrix, x = params["layers"][0]["o_proj"], jnp.asarray(np.random.default_rng(0).normal(size=(4, 160)), jnp.bfloat16)
    y, wide = (linear(v, matrix, LinearContext(dtype=jnp.float32)) for v in (x, x.astype(jnp.float32)))
    np.testing.assert_allclose(y, wide, rtol=1e-5, atol=1e-5)
