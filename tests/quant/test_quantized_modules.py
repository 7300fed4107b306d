"""Schemes of the modules of a quantised checkpoint; refusals, and their words."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import ConfigError, EngineConfig, weights
from jaxserve.assembly.parameters import build_params
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.models import registry
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights.quantized import read_schemes
from jaxserve.weights.rows import leaf_at
from jaxserve.weights.safetensors_file import map_file, write_file
from tests.quant.loaded import ONE_LAYER, all_rows, loaded, safetensors_of, torch_rows, write_tensors
from tests.quant.quantized_checkpoints import CASES, Case, write_quantized


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
    "awq": (
        mixed(CASES["awq"], modules_to_not_convert=["down_proj", "model.layers.0.self_attn."]),
        ["down_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "dynamic": (
        mixed(CASES["gptq"], dynamic={r"-:.*\.mlp\.up_proj": {}, r"-:.*\.gate_proj": {}}),
        ["gate_proj", "up_proj"],
    ),
    "modules of a block": (
        mixed(CASES["gptq"], modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]),
        ["v_proj", "o_proj", "gate_proj", "down_proj"],
    ),
    "extra": (
        mixed(
            CASES["auto-round-awq"],
            extra_config={
                r"(q|k|v|o)_proj": {"group_size": 32},
                "model.layers.0.self_attn.o_proj": {"bits": 16},
                r"mlp\.(gate|up)": {"bits": 16},
            },
        ),
        ["o_proj", "gate_proj", "up_proj"],
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
            rows = all_rows(matrix) if isinstance(matrix, StoredMatrix) else matrix
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
        assert set(types.values()) == {NativeMatrix}
        assert "; multiplied by the native kernels" in caplog.text


WEIGHTS = FP8.config["config_groups"]["group_0"]["weights"]


def one_group(targets: list[str], **weights: Any) -> dict[str, Any]:
    return {**FP8.config, "config_groups": {"a": {"targets": targets, "weights": {**WEIGHTS, **weights}}}}


@pytest.mark.parametrize("name", ["embed_tokens", "embed_tokens_per_layer", "layers.0.mlp.gate"])
def test_tables_and_routers_are_not_linear(name: str) -> None:
    schemes = read_schemes({"quantization_config": one_group(["Linear"])})
    assert schemes is not None
    assert schemes.for_tensor(f"model.{name}.weight") is None
    assert schemes.for_tensor("model.layers.0.mlp.up_proj.weight") is not None


def test_the_projection_of_deepseek_s_mtp_layer_is_plain() -> None:
    """Its published configuration does not say so."""
    schemes = read_schemes({"quantization_config": CASES["fp8-block"].config})
    assert schemes is not None
    assert schemes.for_tensor("model.layers.61.eh_proj.weight") is None
    assert schemes.for_tensor("model.layers.61.self_attn.o_proj.weight") is not None


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}
ATTENTION = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": KV_SCHEME}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, r"quant_method .* compressed-tensors, fp8, .* got 'bitsandbytes'"),
    ({**FP8.config, "transform_config": {"config_groups": {}}}, "transform_config"),
    ({**FP8.config, "format": "marlin-24"}, "marlin-24 of 8 bits .* for Linear"),
    (one_group(["re:.*mlp"], num_bits=6), "naive-quantized of 6 bits .* for re:.*mlp"),
    (one_group(["Linear"], strategy="attn_head"), "strategy 'attn_head'"),
    ({**FP8.config, "config_groups": {"a": {**ATTENTION, "targets": ["Linear"]}}}, "got only activations for Linear"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "FP8, .* NVFP4, .* got W4A8_AWQ for all modules"),
    ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ", "has_zero_point": True}, "without zero points"),
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
    assert read_schemes({"compression_config": {**group, "quantization_status": "frozen"}}) == read_schemes(
        {"quantization_config": group}
    )
    ordered = read_schemes({"quantization_config": CASES["ct-int4-order"].config})
    for order in ("dynamic", True):
        assert respelled(CASES["ct-int4-order"].config, actorder=order) == ordered
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
    name, o_order = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj.g_idx"
    changes: list[tuple[dict[str, Any], str]] = [
        ({f"{name}.scales": None}, rf"1 modules without them: {name}.scales \(gptq\)"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"].astype(np.int8)}, rf"{name}.weight must be int32 .* got int8"),
        ({f"{name}.qweight": tensors[f"{name}.qweight"][:-1]}, r"\(80, 152\) instead of \(80, 160\)"),
        ({f"{name}.g_idx": tensors[f"{name}.g_idx"][::-1].copy()}, "must have the same order of columns"),
        ({f"{name}.g_idx": tensors[f"{name}.g_idx"] + 1}, r"g_idx of .*k_proj.* among 5 groups, got 1 to 5"),
        ({o_order: np.minimum(tensors[o_order], 3)}, r"o_proj.* 32 of 160 columns, .* got 0 to 3 for 32 to 64"),
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


@pytest.mark.parametrize(
    "tool",
    [
        *("compressed-tensors", "compressed-tensors alone", "compressed-tensors group alone"),
        *("modelopt", "modelopt alone"),
    ],
)
def test_scales_of_keys_and_values_are_left_out(tmp_path: Path, tool: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever modules have them, beside quantised matrices or plain ones; the log says so."""
    if tool.startswith("modelopt"):
        case, fields = CASES["modelopt-fp8"], {"kv_cache_quant_algo": "FP8"}
        fields |= {"quant_algo": None} if tool.endswith("alone") else {}
    else:
        is_group = "group" in tool
        case, fields = CASES["ct-int4"], {"kv_cache_scheme": None if is_group else KV_SCHEME}
        fields |= {"config_groups": {"attention": ATTENTION} if is_group else {}} if tool.endswith("alone") else {}
    case = case._replace(config={**case.config, **fields})
    if tool.endswith("alone"):
        case = case._replace(is_quantised=lambda name: False, fake=None)
    model = write_quantized(tmp_path, case, **ONE_LAYER)
    modules = (
        ("k_proj.k_scale", "v_proj.v_scale") if tool.startswith("modelopt") else ("k_scale", "v_scale", "q_zero_point")
    )
    scales = {f"model.layers.0.self_attn.{name}": np.float32([0.5]) for name in modules}
    write_tensors(tmp_path, safetensors_of(tmp_path) | scales)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs = registry.param_specs(arch)
    dequantised = weights.load(tmp_path, specs, schemes=arch.schemes)
    for spec in specs:
        if spec.path[-1].endswith("proj"):
            np.testing.assert_array_equal(leaf_at(dequantised, spec.path), torch_rows(model, spec))
    with caplog.at_level(logging.INFO):
        build_params(EngineConfig(str(tmp_path), dtype="float32"), arch)
    assert "its scales of keys and values are not used" in caplog.text
    assert ("no quantised matrices" in caplog.text) == tool.endswith("alone")


@pytest.mark.parametrize("inputs", [None, {"num_bits": 4, "group_size": 32}])
def test_modelopt_says_whether_activations_are_quantised(inputs: dict[str, int] | None) -> None:
    groups = {"group_0": {"input_activations": inputs, "weights": {"num_bits": 4}, "targets": ["Linear"]}}
    config = {"quant_method": "modelopt", "quant_algo": "MXFP4", "config_groups": groups}
    schemes = read_schemes({"quantization_config": config})
    assert schemes is not None
    scheme = schemes.for_tensor("model.layers.0.mlp.down_proj.weight")
    assert scheme is not None
    assert (scheme.activation is None) == (inputs is None)
