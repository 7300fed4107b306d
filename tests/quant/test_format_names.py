"""Formats of checkpoints by name: `quantization` may repeat them, reports have them, and slow ones are warned of."""

import logging
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import ConfigError, EngineConfig, cli, weights
from jaxserve.api.config import CHECKPOINT_FORMATS
from jaxserve.assembly.build import build_runners
from jaxserve.assembly.generation_defaults import build_arch, resolve_quantization
from jaxserve.assembly.parameters import storage_name
from jaxserve.execution.programs import Programs
from jaxserve.models import registry
from jaxserve.models.params import Params
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.targets import parse_target
from jaxserve.weights.quantized.config import METHODS
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import SIZES
from tests.quant.loaded import ONE_LAYER
from tests.quant.quantized_checkpoints import CASES, write_quantized


def resolved(directory: Path, name: str | None) -> str | None:
    config = EngineConfig(str(directory), quantization=name)
    return resolve_quantization(config, build_arch(config)).quantization


def params_of(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Params:
    """Return the weights of an engine, whose programs are not compiled."""
    monkeypatch.setattr(Programs, "warm_up", lambda *_, **__: None)
    config = EngineConfig(str(directory), skip_tokenizer_init=True, **options, **SIZES)
    arch = build_arch(config)
    (runner,) = build_runners(resolve_quantization(config, arch), arch)
    return runner.params


def test_all_methods_of_checkpoints_have_a_name() -> None:
    assert sorted(METHODS) == list(CHECKPOINT_FORMATS)


@pytest.mark.parametrize(
    ("case", "name"),
    [("awq", "awq"), ("fp8-block", "fp8"), ("ct-int4", "compressed-tensors"), ("auto-round-gptq", "auto-round")],
)
def test_a_checkpoints_own_format_may_be_named(tmp_path: Path, case: str, name: str) -> None:
    write_quantized(tmp_path, CASES[case], **ONE_LAYER)
    assert resolved(tmp_path, name) is None
    assert resolved(tmp_path, "int8") == "int8"
    with pytest.raises(ConfigError, match=f"own quant_method, '{name}', got 'modelopt'; drop it"):
        resolved(tmp_path, "modelopt")


def test_a_checkpoint_that_is_not_quantised_has_no_such_format(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    assert resolved(tmp_path, "fp8") == "fp8"
    with pytest.raises(ConfigError, match=r"'awq' needs .* not quantised; .* \['int8', 'int4', 'fp8'\]"):
        resolved(tmp_path, "awq")


def test_engines_and_plans_take_the_checkpoint_as_it_is(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_quantized(tmp_path, CASES["fp8-block"], **ONE_LAYER)
    with caplog.at_level(logging.INFO, "jaxserve"):
        params = params_of(tmp_path, monkeypatch, quantization="fp8")
    elements = {x.dtype.name for x in jax.tree.leaves(params["layers"])}
    assert elements == {"float8_e4m3fn", "float32"}  # and scales and norms
    assert not any("again to" in line for line in caplog.messages)
    plans = [
        make_plan(EngineConfig(str(tmp_path), quantization=name, max_num_seqs=4), parse_target("cpu"))
        for name in (None, "fp8")
    ]
    assert plans[0] == plans[1]
    assert cli.main(["plan", "--target", "cpu", "--model", str(tmp_path), "--quantization", "gptq"]) == 2
    assert "must be the checkpoint's own quant_method, 'fp8', got 'gptq'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "quantization", "expected"),
    [
        ("ct-int4", None, "compressed-tensors (int4)"),
        ("fp8-block", None, "fp8 (e4m3)"),
        ("awq", "int8", "int8"),
        (None, "fp8", "fp8"),
        (None, None, "float32"),
    ],
)
def test_reports_name_the_form_of_weights(
    tmp_path: Path, case: str | None, quantization: str | None, expected: str
) -> None:
    if case is None:
        write_checkpoint(tmp_path, "llama", dtype="float32")
    else:
        write_quantized(tmp_path, CASES[case], **ONE_LAYER)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    assert storage_name(EngineConfig(str(tmp_path), quantization=quantization), arch) == expected
