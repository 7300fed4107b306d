"""Overrides of config.json and of generation_config.json: what counts is what transformers makes of such a file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import checkpoints
import pytest
import transformers

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.engine import Engine
from jaxserve.assembly.generation_defaults import build_arch, build_sampling_params, output_limits
from jaxserve.assembly.lock_step import require_same_options
from jaxserve.assembly.overrides import overridden, overridden_fields
from jaxserve.errors import ConfigError
from jaxserve.models.hf_config import read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(path, "llama", vocab_size=64, bos_token_id=0, eos_token_id=1)
    return path


def config_of(model: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model / "config.json").read_text())
    return content


FILES: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("override", "theta", "kind"),
    [
        ({"rope_theta": 7e5}, 7e5, None),
        ({"rope_scaling": YARN}, 5e5, "yarn"),
        ({"rope_parameters": YARN}, 5e5, "yarn"),
        ({"rope_parameters": {**YARN, "rope_theta": 9e5}}, 9e5, "yarn"),
        ({"rope_scaling": YARN, "rope_theta": 7e5}, 7e5, "yarn"),
        ({"rope_theta": 7e5, "rope_scaling": YARN}, 7e5, "yarn"),
        ({"rope_scaling": None}, 5e5, "default"),
    ],
)
def test_a_rotation_is_overridden_under_either_name(
    file: dict[str, Any], override: dict[str, Any], theta: float, kind: str | None
) -> None:
    before = read_rope({"max_position_embeddings": 64, **file})
    rope = read_rope(overridden({"max_position_embeddings": 64, **file}, override))
    assert (rope.theta, rope.kind) == (theta, kind or before.kind)


def test_a_rotation_by_type_of_layers_is_overridden_in_each() -> None:
    file = {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}}
    changed = overridden(file, {"rope_theta": 7e5})["rope_parameters"]
    assert changed == {kind: {"rope_theta": 7e5} for kind in ("full_attention", "sliding_attention")}


def test_nested_configurations_are_overridden_in_part() -> None:
    file = {"text_config": {"a": 1, "rope_scaling": {"x": 1}}, "quantization_config": {"bits": 4, "group": 8}}
    overrides = {"text_config": {"b": 2, "rope_scaling": YARN}, "quantization_config": {"bits": 8}}
    assert overridden(file, overrides) == {
        "text_config": {"a": 1, "b": 2, "rope_scaling": YARN},
        "quantization_config": {"bits": 8},
    }


def test_overridden_configs_equal_transformers_reading(model: Path, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"rope_scaling": YARN, "rms_norm_eps": 0.5, "max_position_embeddings": 256}
    arch = build_arch(EngineConfig(str(model), hf_overrides=overrides))
    (tmp_path / "config.json").write_text(json.dumps({**config_of(model), "rope_parameters": None, **overrides}))
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    assert arch.norm_eps == expected.rms_norm_eps == 0.5
    assert arch.max_position == 256
    assert arch.ropes[0] is not None
    assert dict(arch.ropes[0].options)["factor"] == expected.rope_parameters["factor"]
    assert arch == build_arch(EngineConfig(str(model), hf_overrides=json.dumps(overrides)))


@pytest.mark.parametrize("override", [{"num_hidden_layers": 1}, {"intermediate_size": 48}, {"vocab_size": 65}])
def test_overrides_that_contradict_the_tensors_are_rejected(model: Path, override: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors|unexpected|instead of"):
        Engine(EngineConfig(str(model), skip_tokenizer_init=True, hf_overrides=override))


def test_a_function_changes_transformers_configuration(model: Path) -> None:
    def change(config: Any) -> Any:
        config.rms_norm_eps = 0.25
        return config

    assert overridden_fields(change, model) == {"rms_norm_eps": 0.25}
    assert build_arch(EngineConfig(str(model), hf_overrides=change)).norm_eps == 0.25
    with pytest.raises(ConfigError, match="the function hf_overrides must return a configuration, got NoneType"):
        build_arch(EngineConfig(str(model), hf_overrides=lambda config: None))


@pytest.mark.usefixtures("no_type_checks")
def test_processes_compare_functions_by_their_names(model: Path) -> None:
    def config() -> EngineConfig:
        return EngineConfig(str(model), hf_overrides=lambda each: each)  # another function each time

    sent: list[dict[str, str]] = []
    peers = SimpleNamespace(exchange=lambda own: [*sent, own])
    require_same_options(config(), cast("Any", SimpleNamespace(exchange=lambda own: [sent.append(own) or own])))
    require_same_options(config(), cast("Any", peers))
    with pytest.raises(ConfigError, match="all processes must have the same hf_overrides, got function test"):
        require_same_options(EngineConfig(str(model)), cast("Any", peers))


def test_an_override_that_changes_nothing_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jaxserve"):
        build_arch(EngineConfig(str(model), hf_overrides={"rms_norm": 1.0, "rms_norm_eps": 0.5}))
    assert [record.getMessage() for record in caplog.records] == [
        "hf_overrides: rms_norm=1.0 changes nothing of what is served"
    ]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", ["hf_overrides", "override_generation_config"])
@pytest.mark.parametrize("value", [5, "{", "[1]", [1], {1: 2}])
def test_malformed_overrides(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a "):
        EngineConfig(**{name: value})


FILE = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 99, "eos_token_id": [1, 3]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.5, "top_k": 7, "max_tokens": 99}),
        ({"generation_config": "vllm"}, {}),
        ({"override_generation_config": {"top_k": 9}}, {"temperature": 0.5, "top_k": 9, "max_tokens": 99}),
        (
            {"override_generation_config": '{"do_sample": true, "top_p": 0.5}', "generation_config": "vllm"},
            {"top_p": 0.5},
        ),
        ({"generation_config": "OTHER"}, {"presence_penalty": 0.25}),
    ],
)
def test_sampling_parameters_that_requests_do_not_give(
    model: Path, tmp_path: Path, options: Mapping[str, Any], expected: dict[str, Any]
) -> None:
    for directory, content in ((tmp_path / "model", FILE), (tmp_path / "other", {"presence_penalty": 0.25})):
        directory.mkdir()
        (directory / "generation_config.json").write_text(json.dumps(content))
    (tmp_path / "model" / "config.json").write_text((model / "config.json").read_text())
    options = {name: str(tmp_path / "other") if value == "OTHER" else value for name, value in options.items()}
    config = EngineConfig(str(tmp_path / "model"), **options)
    assert build_sampling_params(config) == SamplingParams(**expected)
    is_other = "other" in config.generation_config
    assert build_arch(config).eos_ids == ({1} if is_other else {1, 3}), "ids that end an output are no parameters"


def test_invalid_generation_configurations_are_rejected(model: Path) -> None:
    for value, message in (
        ({"temprature": 1}, r"got \['temprature'\] \(did you mean temperature\?\)"),
        ({"eos_token_id": 3}, "hf_overrides replaces eos_token_id"),
        ({"do_sample": False}, "set temperature to 0"),
        ({"top_p": 7}, r"override_generation_config: top_p must be a number in \(0, 1\], got 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_sampling_params(EngineConfig(str(model), override_generation_config=value))
    with pytest.raises(ConfigError, match=r"'auto', 'vllm' or a directory with a generation_config\.json, got '/no'"):
        build_sampling_params(EngineConfig(str(model), generation_config="/no"))


def test_limits_of_outputs_on_a_server(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 50}))
    own = output_limits(EngineConfig(str(tmp_path)))
    assert [own.limit(n) for n in (None, 10, 99)] == [50, 10, 99], "a recommendation"
    capped = output_limits(EngineConfig(str(tmp_path), override_generation_config={"max_new_tokens": 20}))
    assert [capped.limit(n) for n in (None, 10, 99)] == [20, 10, 20]
    named = output_limits(EngineConfig("/no", generation_config=str(tmp_path)))
    assert [named.limit(n) for n in (None, 10, 99)] == [50, 10, 50]
    none = output_limits(EngineConfig(str(tmp_path), generation_config="vllm"))
    assert [none.limit(n) for n in (None, 10, 99)] == [None, 10, 99]
