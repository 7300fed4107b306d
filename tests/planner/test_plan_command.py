"""The report of a plan, and the command that prints it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import EngineConfig, cli
from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels.deviceless import Chip
from jaxserve.tools import planner
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import StepCompiler
from jaxserve.tools.planner.report import build_report, render
from jaxserve.tools.planner.targets import Target, larger_targets, missing_compiler, parse_target
from tests.parameters import mainly
from tests.planner.plans import SUM_BYTES, plan_of, with_memory
from tests.quant.quantized_checkpoints import CASES

CONFIGS = Path(planner.__file__).parent / "configs"
pytestmark = pytest.mark.usefixtures("no_compiler")


def test_the_report_has_all_figures_and_survives_json() -> None:
    keys = {"fits", "weights_bytes_per_chip", "temp_bytes_per_chip", "kv_bytes_per_chip", "kv_tokens"}
    keys |= {"collectives_per_layer", "compile_s", "step_ms", "tokens_per_s", "ttft_ms", "missing_bytes_per_chip"}
    shown = [build_report(plan) for plan in (plan_of("llama-3.1-8b", "h200x2"), plan_of("llama-3.1-405b"))]
    shown.append(build_report(make_plan(EngineConfig(), parse_target("cpu"))))
    for report in shown:
        assert keys <= report.keys()
        assert json.loads(json.dumps(report)).keys() == report.keys() == shown[0].keys()
    fitting, too_large, cpu = shown
    assert cpu["model"] == "the embedded model"
    assert fitting["fits"]
    assert not fitting["missing_bytes_per_chip"]
    bucket = fitting["compiled_tokens"][1]
    assert fitting["collectives_per_layer"] == [{"kind": "all-reduce", "count": 2, "num_bytes": SUM_BYTES * bucket}]
    assert not too_large["fits"]
    assert too_large["missing_bytes_per_chip"] > 700e9
    assert too_large["ttft_ms"] is None
    assert cpu["compile_s"] is None
    assert too_large["compile_s"] is None


@pytest.mark.parametrize(
    ("model", "target", "page_bytes", "state_bytes"),
    [
        ("llama-3.1-8b", "h200x4", 2 * 32 * 8 * 128 * 2, 0),
        ("deepseek-v2-lite", "h200x2", 2 * 27 * 576 * 2, 0),  # each device has all latents
        ("qwen3-next-80b-a3b", "h200x2", 2 * 12 * 2 * 256 * 2, 36 * (32 * 128 * 128 + 3 * 8192) * 4),
    ],
)
def test_host_memory_is_counted_over_all_devices(model: str, target: str, page_bytes: int, state_bytes: int) -> None:
    """Per token, and per state of 36 layers with 32 heads and a window of 3 tokens."""
    plan = plan_of(model, target, kv_offloading_size=64)
    assert plan.host is not None
    assert plan.host.num_tokens(plan.schedule) * page_bytes == pytest.approx(64 * 2**30, rel=1e-3)
    assert plan.host.request_bytes(plan.schedule) == plan.schedule.max_model_len * page_bytes + state_bytes
    assert "host memory        68.72 GB for pages: " in render(plan)
    assert build_report(plan)["host_bytes"] == 64 * 2**30
    by_default = plan_of(model, target).host
    assert by_default is not None
    assert by_default.size == 8 * 2**30
    assert plan_of(model, target, kv_offloading_size=0).host is None


def test_compiler_estimates_are_shown_if_there_are_any() -> None:
    plan = plan_of("llama-3.1-8b", "v6e:1x1", max_model_len=8192)
    assert plan.largest is not None
    assert "estimate" not in render(plan)
    told = dataclasses.replace(plan, largest=dataclasses.replace(plan.largest, estimate_ms=1.5))
    assert "1.5 ms for 2048 tokens" in render(told)
    assert build_report(told)["compiler_estimate_ms"] == [1.5, None]


def test_all_programs_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--target", "v6e:1x1", "--model", "llama-3.1-8b", "--max-model-len", "8192", "--programs"]
    assert cli.main([*options, "--json"]) == 0
    programs = json.loads(capsys.readouterr().out)["programs"]
    steps = (16, 64, 256, 384, 512, 768, 1024, 1536, 2048)
    assert {*programs["seconds"]} == {"set_slot", *(f"step {size}" for size in steps), "multi-step 16 of 64"}
    assert (programs["count"], programs["total_s"]) == (11, 1.5 + 9 * 2 + 3)
    assert cli.main(options) == 0
    shown = capsys.readouterr().out
    assert "the engine has 11 programs there, which took 22 s to compile here" in shown
    assert build_report(plan_of("llama-3.1-8b"))["programs"] is None


def test_the_table_marks_predictions() -> None:
    assert "predicted, not measured" in render(plan_of("llama-3.1-8b"))
    text = render(plan_of("llama-3.1-405b"))
    assert "does not fit: each chip lacks" in text
    assert "predicted" not in text
    assert "predicted" not in render(make_plan(EngineConfig(), parse_target("cpu")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "h300"], "as v6e:2x4, got 'h300'"),
        (["--target", "h200x9"], "or two to eight of them, as h100x8"),
        (["--target", "rtx4080"], "'rtx4090', 'rtx5090'"),
        (["--target", "v6e:2x2x2"], "v6e must have chips in 2 directions, as v6e:2x2, got 'v6e:2x2x2'"),
        (["--sweep", "cpu", "h300"], "as v6e:2x4, got 'h300'"),
        (["--target", "cpu", "--prices", "x.toml"], "give --sweep, or drop --prices"),
        (["--target", "cpu", "--programs"], "give it by --target, or drop --programs"),
        (["--sweep", "cpu", "--programs"], "give it by --target, or drop --programs"),
        (["--target", "cpu", "--attention-backend", "mosaic_tpu"], "it runs on TPUs only"),
        (["--target", "cpu", "--multi-step", "0"], "multi_step must be"),
        (["--target", "cpu", "--batch", "65"], "batch must be in [1, max_num_seqs], got 65 and 64"),
        (["--target", "cpu", "--plot", "no/such/place.png"], "plot must be a file in an existing directory"),
        (["--target", "cpu", "--model", "llama-9"], "model must be a checkpoint directory, a config.json or one of"),
        (["--target", "cpu", "--model", "meta-llama/Llama-3.1-8B-Instruct"], "-Instruct' (did you mean llama-3.1-8b?)"),
        (["--target", "cpu", "--max-model-len", "99999"], "max_model_len must be at most"),
        (["--target", "cpu", "--prompt-len", "0"], "prompt_len must be in [1, max_model_len], got 0 and 1024"),
        (["--target", "cpu", "--context-len", "2000"], "context_len must be in [1, max_model_len], got 2000 and 1024"),
        (["--target", "h200", "--programs", "--no-compile"], "--programs compiles, and --no-compile does not"),
        (["--target", "h200x8"], "tensor_parallel_size must divide num_attention_heads, got 8 and 4"),
        (["--target", "h200x8", "--no-compile"], "tensor_parallel_size is here the number of devices of the target, 8"),
        (
            ["--target", "h200x4", "--no-compile", "--expert-parallel-size", "3"],
            "got 3 and 4; set it to a divisor (tensor_parallel_size is here the number of devices of the target, 4 for",
        ),
    ],
)
def test_planning_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_indivisible_quantised_matrices_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    config |= {"intermediate_size": 8 * 1793, "quantization_config": CASES["ct-int4-channel"].config}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert cli.main(["plan", "--target", "h200x8", "--no-compile", "--model", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "must have an even number of columns" in shown
    assert "the number of devices of the target, 8 for h200x8" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("model", ["granite-4.0-h-tiny", "qwen3-next-80b-a3b"])
def test_indivisible_states_are_reported_with_the_number_of_devices(model: str) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must divide .*; set it to a divisor of") as told:
        read_model(model)[1].state.local(5)
    assert told.value.about == {"tensor_parallel_size"}


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["--tensor_parallel_size=2"]])
def test_a_number_of_devices_is_that_of_a_target(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--model", "llama-3.1-8b", *flags])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "error: the target gives the number of devices, as in --target h200x2 or v6e:2x4; leave out" in shown
    assert "did you mean" not in shown


@pytest.mark.parametrize(("target", "package"), [("l4", f"jax-cuda13-plugin=={jax.__version__}"), ("v6e", "libtpu")])
def test_a_missing_compiler_is_named_after_the_answer(
    target: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing_compiler(parse_target(target), Path("/a b")) is None
    monkeypatch.setattr(Chip, "unavailable", lambda _: "this is missing")
    monkeypatch.delattr(StepCompiler, "step_programs")
    flags = ["plan", "--target", target, "--model", "llama-3.2-1b", "--max-model-len", "8192", "--compilers", "/a b"]
    assert cli.main(flags) == 0
    shown = capsys.readouterr()
    assert "nothing was compiled: temporaries of steps" in shown.out
    assert f"cannot be compiled for {target}, as this is missing; install it" in shown.err
    assert "pip install --target '/a b' --no-deps" in shown.err
    assert package in shown.err
    assert cli.main([*flags, "--no-compile"]) == 0
    assert "pip install" not in capsys.readouterr().err
    assert cli.main([*flags, "--programs"]) == 2
    assert "--programs compiles, but programs cannot be compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "target", "options"),
    [
        ("llama-3.1-8b", "rtx4090", {}),
        ("llama-3.1-70b", "B200", {}),
        ("gemma-3-27b", "a100", {"max_num_seqs": 16}),
        ("qwen3-32b", "rtx-pro-6000", {"max_num_seqs": 512}),
    ],
)
def test_the_largest_length_that_fits_is_named(model: str, target: str, options: dict[str, int]) -> None:
    plan = plan_of(model, target, **options)
    if plan.fits:
        plan = plan_of(model, with_memory(plan.target, int(plan.memory.weights * 1.2)), **options)
    assert not plan.fits
    assert plan.fitting_len
    assert f"--max-model-len {plan.fitting_len} is the largest that fits" in render(plan)
    assert build_report(plan)["fitting_max_model_len"] == plan.fitting_len
    assert plan_of(model, plan.target, max_model_len=plan.fitting_len, **options).fits
    assert not plan_of(model, plan.target, max_model_len=plan.fitting_len + 1, **options).fits


def test_weights_that_do_not_fit_have_no_length() -> None:
    plan = plan_of("llama-3.1-405b", "h200")
    assert plan.fitting_len == 0
    assert "no --max-model-len fits; " in render(plan)
    assert plan_of("llama-3.1-8b").fitting_len is None


@pytest.mark.parametrize(
    ("model", "target", "given"),
    [
        ("llama-3.1-70b", "h100", {}),
        ("llama-3.1-405b", "h200", {"quantization": "int4"}),
        ("llama-3.1-405b", "h200", {"quantization": "int8", "max_num_seqs": 8}),
        ("llama-3.1-70b", "l4", {}),
        ("gpt-oss-120b", "l4", {}),
        ("llama-3.1-70b", "v5e", {}),
        ("mixtral-8x7b", "tpu7x:1x1x1", {"quantization": "int4", "max_num_seqs": 100_000}),
        ("kimi-k2", "b200", {"max_model_len": 8192}),
        ("gemma-2-9b", with_memory(parse_target("h200x8"), 1_280_000_000), {"quantization": "int4"}),
        ("llama-3.1-70b", "h100x8", {"quantization": "int4", "max_num_batched_tokens": 10**6}),
        ("llama-3.1-70b", "v6e:2x2", {"max_num_batched_tokens": 32768}),
    ],
)
def test_remedies_are_new_options_and_help(model: str, target: str | Target, given: dict[str, Any]) -> None:
    """Planned by hand, each remedy fits as far as it says, or lacks what it says."""
    plan = plan_of(model, target, **given)
    if plan.fitting_len != 0:
        plan = plan_of(model, with_memory(plan.target, plan.memory.weights // 2), **given)
    assert plan.fitting_len == 0
    assert plan.remedies
    told, reported = render(plan), build_report(plan)["remedies"]
    for remedy, entry in zip(plan.remedies, reported, strict=True):
        assert remedy.options in told
        assert entry["options"] == remedy.options
        words = remedy.options.split()
        flags = dict(zip(words[::2], words[1::2], strict=True))
        chips = parse_target(flags.pop("--target", plan.target.name))
        options = {flag[2:].replace("-", "_"): value for flag, value in flags.items()}
        assert not {(name, str(value)) for name, value in given.items()} & options.items()
        values = {name: value if name == "quantization" else json.loads(value) for name, value in options.items()}
        chips = dataclasses.replace(chips, sheet=plan.target.sheet)
        better = plan_of(model, chips, **given | values)
        if remedy.fitting_len is None:
            assert better.fits
            continue
        assert better.memory.missing == remedy.missing == entry["missing_bytes_per_chip"]
        assert better.fitting_len == remedy.fitting_len
        if remedy.fitting_len:
            assert plan_of(model, chips, **given | values, max_model_len=remedy.fitting_len).fits
        else:
            assert remedy.missing < plan.memory.missing


def test_smaller_steps_and_more_of_the_memory_are_advised_where_they_suffice() -> None:
    plan = plan_of("gemma-2-9b", with_memory(parse_target("h200x8"), 1_280_000_000), quantization="int4")
    assert "--max-num-seqs 16 --max-num-batched-tokens 256 fits; --gpu-memory-utilization 0.95 fits with" in render(
        plan
    )
    assert "gpu_memory_utilization" not in str(plan_of("llama-3.1-405b", gpu_memory_utilization=0.97).remedies)


def test_there_is_no_remedy_if_none_helps() -> None:
    starved = plan_of("llama-3.1-405b", with_memory(parse_target("v5e"), 10**6), quantization="int4")
    assert re.search(r"no --max-model-len fits; with --target v5e:8x16 it lacks \d+\.\d\d GB\n", render(starved))
    on_cpu = make_plan(EngineConfig(model="llama-3.1-405b", quantization="int4"), parse_target("cpu"))
    assert on_cpu.remedies == ()
    assert "no --max-model-len fits\n" in render(on_cpu)


@pytest.mark.parametrize("name", ["h200", "h100x2", "l4", "v6e", "v5e:4x4", "tpu7x:2x2x1"])
def test_larger_targets_are_targets_with_more_chips(name: str) -> None:
    target, last = parse_target(name), parse_target(name).num_chips
    for larger in larger_targets(target):
        assert larger == parse_target(larger.name)
        assert larger.num_chips > last
        last = larger.num_chips
    assert last > target.num_chips
    assert not list(larger_targets(parse_target("cpu")))


def row_bytes(text: str) -> dict[str, float]:
    """Return the first size of each row of the table of memory, in GB."""
    found = re.findall(r"^(\w[\w ]*?)  +(-?\d+\.\d\d) GB", text, re.MULTILINE)
    return {name: float(size) for name, size in found}


@pytest.mark.parametrize(
    ("model", "target", "options"),
    [
        ("llama-3.1-8b", "h100", {}),
        ("llama-3.1-8b", "h200x2", {"gpu_memory_utilization": 0.6}),
        ("llama-3.1-8b", "v6e", {"max_model_len": 8192}),
        ("llama-3.1-8b", "tpu7x:1x1x1", {}),
        ("qwen3-next-80b-a3b", "h200x4", {}),
        ("llama-3.1-405b", "h200", {}),
        ("llama-3.1-70b", "l4x4", {"quantization": "int4"}),
        (None, "cpu", {}),
        ("llama-3.1-8b", "cpu", {"quantization": "int4"}),
    ],
)
def test_every_byte_of_the_limit_has_a_row(model: str | None, target: str, options: dict[str, Any]) -> None:
    """The rows add up to the limit if all fits; otherwise they and one request exceed it by what is missing."""
    chips = parse_target(target)
    plan = make_plan(EngineConfig(model=model, tensor_parallel_size=chips.num_devices, **options), chips)
    memory, rows = plan.memory, row_bytes(render(plan))
    rows.pop("host memory", None)  # the chip has none of it
    limit = rows.pop("this machine" if target == "cpu" else "memory XLA takes")
    assert limit == pytest.approx(memory.limit / 1e9, abs=0.006)
    page = memory.page * (1 + (target == "cpu"))
    if plan.fits:
        assert sum(rows.values()) == pytest.approx(limit, abs=0.006 * (len(rows) + 1))
        assert 0 <= memory.rest <= page
    elif "the pool" not in render(plan):
        taken = sum(size for name, size in rows.items() if name not in ("keys and values", "rest"))
        assert taken + (memory.request - memory.missing) / 1e9 == pytest.approx(limit, abs=0.006 * (len(rows) + 2))
        assert f"{memory.request / 1e9:.2f} GB would hold one request of full length" in render(plan)
    else:
        assert sum(rows.values()) == pytest.approx(limit, abs=0.006 * (len(rows) + 1))


def test_temporaries_beyond_the_reserve_have_a_row() -> None:
    plan = plan_of("llama-3.1-8b", "h100")
    assert plan.largest is not None
    assert f"of it {plan.largest.temp_bytes / 1e9:.2f} GB in a step of 2048 tokens" in render(plan)
    assert "beyond the reserve" not in render(plan)
    more = dataclasses.replace(plan.memory, temp=plan.memory.reserve + 5 * 10**9)
    text = render(dataclasses.replace(plan, memory=more, fitting_len=1))
    assert re.search(r"^beyond the reserve +5.00 GB$", text, re.MULTILINE)
    assert "each chip lacks 5.00 GB" in text or "each chip lacks 4.99 GB" in text


def test_names_of_targets() -> None:
    assert parse_target("v6e").shape == (1, 1)
    assert parse_target("v5p").shape == (1, 1, 1)
    for name, kind in (("RTX 4090", "rtx4090"), ("rtx_pro_6000x2", "rtxpro6000"), ("A100-40GBx8", "a100-40gb")):
        assert parse_target(name).kind == kind


FIND_COMPILERS = """
import sys
from jaxserve.cli import main
code = main(["plan", "--target", "h200", "--programs", *sys.argv[1:]])
import jax_plugins.xla_cuda13
print(code, "nvidia.cu13" in sys.modules)
"""


@pytest.mark.skipif(bool(list(metadata.distributions(name="jax-cuda13-plugin"))), reason="a CUDA plugin is installed")
@pytest.mark.parametrize("is_default", mainly([True], False))
def test_compilers_are_found_in_a_folder_of_their_own(is_default: bool, tmp_path: Path) -> None:
    """A plugin of a wrong version is reported before jax loads it; compilers beside it are importable by jax."""
    folder = tmp_path / "jaxserve" / "compilers" if is_default else tmp_path / "elsewhere"
    for package in ("jax_plugins/xla_cuda13", "nvidia/cu13"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "jax_cuda13_plugin-0.0.1.dist-info").mkdir()
    (folder / "jax_cuda13_plugin-0.0.1.dist-info" / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 0.0.1\n")
    run = subprocess.run(
        [sys.executable, "-c", FIND_COMPILERS, *([] if is_default else ["--compilers", str(folder)])],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "2 True\n"
    assert f"must have the version of jax, {jax.__version__}, and 0.0.1 was found" in run.stderr
    assert f"pip install --target {folder} --no-deps jax-cuda13-plugin=={jax.__version__}" in run.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_the_plan(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--json"] if as_json else []
    assert cli.main(["plan", "--target", "cpu", "--max-num-seqs", "4", *flags]) == 0
    plan = make_plan(EngineConfig(max_num_seqs=4), parse_target("cpu"))
    shown = capsys.readouterr().out
    report = json.loads(json.dumps(build_report(plan)))
    assert json.loads(shown) == report if as_json else shown == render(plan) + "\n"
