"""Tests of `jaxserve bench` over a fake engine: what it measures, prints, writes and refuses."""

import errno
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import tiny_tokenizers
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxserve import cli
from jaxserve.cli.config_flags import engine_options
from jaxserve.cli.parser import build_parser
from jaxserve.tools.bench import tables
from jaxserve.tools.figures import plotting

WORKLOAD = {
    "name": "few",
    "seed": 5,
    "requests": [
        {"prompt_len": 4, "output_len": 3, "arrival_s": 0.0},
        {"prompt_len": 6, "output_len": 1, "arrival_s": 0.02},
        {"prompt_len": 2, "output_len": 9, "arrival_s": 0.04},
    ],
}
RUN_KEYS = {
    *("rate_per_s", "elapsed_s", "num_requests", "num_failed", "num_prompt_tokens", "num_output_tokens"),
    *("requests_per_s", "output_tok_per_s", "total_tok_per_s", "cached_prompt_share", "num_steps"),
    "wall_ms_per_step",
    *("host_ms_per_step", "padding_share", "page_slack_share", "page_occupancy", "batch_rows", "queue_depth"),
    *(
        "num_preemptions",
        "num_wasted_tokens",
        "num_compiles",
        "time_split_ms",
        "efficiency",
        "roofline_share",
        "energy",
    ),
    *("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "goodput", "cost", "timeline", "requests"),
}


PARSER = build_parser()


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the parser once for all commands, as it takes longer than what most of them do."""
    monkeypatch.setattr(cli, "build_parser", lambda: PARSER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_tokenizers.write(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level()))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[fake_engine.FakeEngine]:
    """Return the fake engines that commands have started; each step takes 2 ms."""
    started: list[fake_engine.FakeEngine] = []

    def load(args: Namespace) -> fake_engine.FakeEngine:
        started.append(fake_engine.FakeLLM(**engine_options(args), skip_tokenizer_init=True).engine)
        return started[-1]

    monkeypatch.setenv(fake_engine.STEP_S, "0.002")
    monkeypatch.setattr("jaxserve.cli.bench.load_driven", load)
    return started


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be made and written, but not drawn, which takes longer than a run does; `test_plots` draws them."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "few.json"
    path.write_text(json.dumps(WORKLOAD))
    return str(path)


def bench(model: str, out: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of a run."""
    assert cli.main(["bench", *arguments, "--model", model, "--json", str(out / "report.json")]) == 0
    return json.loads((out / "report.json").read_text())


def test_offline_report(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rounds", "3", "--price-per-hour", "2", "--page-size", "32"]
    flags += ["--quantization", "int8", "--kv-cache-dtype", "fp8"]
    report = bench(model, tmp_path, "offline", "--workload", workload, *flags)
    assert report["format"] == "jaxserve-bench-2"
    assert set(report["versions"]) == {"jaxserve", "jax", "jaxlib", "numpy", "python"}
    assert set(report["device"]) == {"platform", "kind", "count", "num_cores"}
    assert report["config"]["page_size"] == 32
    assert (report["model"]["dtype"], report["model"]["stored"]) == ("float32", "int8")
    assert report["model"]["kv_dtype"] == "float8_e4m3fn"
    assert report["config"]["skip_tokenizer_init"]
    assert report["schedule"]["max_num_seqs"] == 4
    assert report["workload"]["num_output_tokens"] == 13
    assert [run.keys() for run in report["runs"]] == 3 * [RUN_KEYS]
    for run in report["runs"]:
        assert run["rate_per_s"] is None
        assert run["num_steps"] == 9  # all requests run at once: as many steps as the longest output
        assert [r["num_output_tokens"] for r in run["requests"]] == [3, 1, 9]
        assert {r["arrival_s"] for r in run["requests"]} == {0}
        assert run["ttft_ms"]["p50"] >= 2
        assert run["cost"]["per_million_tokens"] > 0
    (engine,) = engines
    assert engine.num_cache_resets == 3
    assert engine.num_added == 1 + 3 * 3  # one request for the warm-up
    shown = capsys.readouterr()
    median = sorted(run["output_tok_per_s"] for run in report["runs"])[1]
    assert f"{median:.1f} tok/s" in shown.out
    assert "3 rounds of" in shown.out
    assert "computed in float32, weights in int8, keys and values in float8_e4m3fn\n" in shown.out
    assert "few: run 3 of 3" in shown.err


def test_serve_keeps_the_workloads_arrivals(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    slo = ["--slo-ttft-ms", "1000", "--slo-tpot-ms", "500"]
    report = bench(model, tmp_path, "serve", "--workload", workload, "--time-scale", "2", *slo)
    (run,) = report["runs"]
    assert [r["arrival_s"] for r in run["requests"]] == [0, 0.04, 0.08]
    assert run["elapsed_s"] >= 0.08 + 9 * 0.002
    assert run["goodput"]["share"] == 1
    shown = capsys.readouterr().out
    assert "100.0% within TTFT 1000 ms and TPOT 500 ms" in shown
    assert re.search(r"^TTFT \(ms\) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", shown, re.MULTILINE)


def test_a_sweep_has_a_run_and_a_row_per_rate(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(model, tmp_path, "serve", "--workload", workload, "--rates", "50,200.5", "--slo-ttft-ms", "1000")
    slow, fast = report["runs"]
    assert (slow["rate_per_s"], fast["rate_per_s"]) == (50, 200.5)
    gaps = [[r["arrival_s"] for r in run["requests"]] for run in (slow, fast)]
    assert gaps[0] == pytest.approx([4.01 * arrival for arrival in gaps[1]])
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert rows[0].split()[:2] == ["rate", "/s"]
    assert rows[0].endswith("goodput /s")
    assert [row.split()[0] for row in rows[1:]] == ["50", "200"]


def test_live_lines_go_to_stderr(
    model: str,
    workload: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(fake_engine.STEP_S, "0.15")
    bench(model, tmp_path, "offline", "--workload", workload, "--stats")
    shown = capsys.readouterr()
    assert re.search(r"^\d rows, in \d+ tok/s, out \d+ tok/s, 0 waiting, pages \d%, E \d+%$", shown.err, re.MULTILINE)
    assert "waiting," not in shown.out


@pytest.mark.long
def test_plots(
    model: str,
    workload: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {"offline": tmp_path / "new" / "offline", "serve": tmp_path / "serve"}
    bench(model, tmp_path, "offline", "--workload", workload, "--plots", str(places["offline"]))
    assert {path.name for path in places["offline"].iterdir()} == {"latency.png", "timeline.png"}
    draw, drawn = Figure.savefig, [*places["offline"].iterdir()]

    def draw_some(figure: Figure, path: Path, **options: Any) -> None:
        """Draw the plots of one rate, as those of the other differ in their numbers alone."""
        if path.name.endswith("-rate-300.png"):
            path.touch()
        else:
            draw(figure, path, **options)
            drawn.append(path)

    rates = ["--rates", "100,300", "--slo-tpot-ms", "5"]
    monkeypatch.setattr(Figure, "savefig", draw_some)
    bench(model, tmp_path, "serve", "--workload", workload, *rates, "--plots", str(places["serve"]))
    names = {path.name for path in places["serve"].iterdir()}
    each = {f"{name}-rate-{rate}.png" for name in ("latency", "timeline") for rate in (100, 300)}
    assert names == each | {"throughput_latency.png"}
    assert len(drawn) == 5
    for path in drawn:
        pixels = imread(path)
        assert pixels.shape[1] == 1200
        assert pixels[..., :3].std() > 0.02  # the figure is not blank


@pytest.mark.usefixtures("undrawn")
def test_single_tokens_have_no_time_between_them(
    model: str, tmp_path: Path, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"name": "one", "seed": 1, "requests": [{"prompt_len": 1, "output_len": 1}]}))
    report = bench(model, tmp_path, "offline", "--workload", str(path), "--plots", str(tmp_path / "plots"))
    shown = capsys.readouterr().out
    for key, title in (("tpot_ms", "TPOT"), ("itl_ms", "ITL")):
        assert report["runs"][0][key] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
        assert re.search(rf"^{title} \(ms\)( +-){{5}}$", shown, re.MULTILINE)
    bench(model, tmp_path, "serve", "--workload", str(path), "--rates", "9,10", "--plots", str(tmp_path / "sweep"))
    assert " -/-/- " in capsys.readouterr().out
    assert (tmp_path / "sweep" / "throughput_latency.png").exists()


def test_without_matplotlib_only_plots_are_missing(
    model: str,
    workload: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = bench(model, tmp_path, "offline", "--workload", workload, "--plots", str(tmp_path / "plots"))
    assert len(report["runs"]) == 1
    shown = capsys.readouterr()
    assert "install the extra bench: pip install 'jaxserve[bench]', or in a clone pip" in shown.err
    assert "tok/s" in shown.out
    assert list((tmp_path / "plots").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline", "--workload", "mixed-65"], "workload must be one of ['mixed-64', "),
        (["offline", "--workload", "BAD"], "the workload {path} must be JSON, but: Expecting value"),
        (["offline", "--rounds", "0"], "rounds must be a positive integer, got 0"),
        (["offline", "--price-per-hour", "-1"], "price_per_hour must be a positive number, got -1.0"),
        (["offline", "--num-requests", "0"], "num_requests must be a positive integer, got 0"),
        (["serve", "--rate", "-1"], "each rate must be a positive number or inf, got -1"),
        (["serve", "--rates", "1,nan"], "each rate must be a positive number or inf, got 1,nan"),
        (["serve", "--rate", "1", "--arrival-seed", "-1"], "arrival_seed must be an integer of 0 or more, got -1"),
        (["serve", "--arrival-seed", "1"], "arrival_seed draws Poisson arrivals; give --rate"),
        (["serve", "--max-concurrency", "0"], "max_concurrency must be a positive integer, got 0"),
        (["serve", "--rates", "1,,2"], "rates must be numbers separated by commas, got '1,,2'"),
        (["serve", "--rate", "1", "--time-scale", "2"], "time_scale stretches the workload's arrivals"),
        (["serve", "--time-scale", "0"], "time_scale must be a positive number, got 0.0"),
        (["serve", "--slo-ttft-ms", "0"], "slo_ttft_ms must be a positive number, got 0.0"),
        (["serve", "--slo-tpot-ms", "nan"], "slo_tpot_ms must be a positive number, got nan"),
        (["serve", "--workload", "single"], "in the workload single all requests arrive simultaneously; give --rate"),
        (["offline", "--json", "/no/such/file"], "json must be a file in an existing directory, got /no/such/file"),
        (["offline", "--json", "/dev/null"], "json must be a file in an existing directory, got /dev/null"),
        (["offline", "--plots", "BAD"], "cannot make the plot directory {path}: File exists"),
    ],
)
def test_wrong_commands_fail_before_anything_is_loaded(
    model: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = tmp_path / "bad.json"
    path.write_text("")
    command = [str(path) if argument == "BAD" else argument for argument in arguments]
    assert cli.main(["bench", *command, "--model", model]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"jaxserve: error: {message.format(path=path)}")
    assert shown.count("\n") == 1
    assert engines == []


def test_a_workload_that_does_not_fit_is_refused_before_it_runs(
    model: str, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "offline", "--workload", "long-prompts-32", "--model", model]) == 2
    message = (
        "request 0 of the workload long-prompts-32 has 1500 prompt and 32 output tokens, but max_model_len is 1000"
    )
    assert message in capsys.readouterr().err
    assert engines[0].num_added == 0


@pytest.mark.parametrize("num_pages", [9, 10])
def test_a_request_that_needs_more_than_the_whole_pool_is_refused_before_it_runs(
    model: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    capsys: pytest.CaptureFixture[str],
    num_pages: int,
) -> None:
    path = tmp_path / "long.json"
    requests = [{"prompt_len": 1, "output_len": 1}, {"prompt_len": 129, "output_len": 32}]  # no step for the last
    path.write_text(json.dumps({"name": "long", "seed": 1, "requests": requests}))
    fits = num_pages == 10
    command = ["bench", "offline", "--workload", str(path), "--model", model, "--num-pages", str(num_pages)]
    assert cli.main(command) == (0 if fits else 2)
    message = (
        "jaxserve: error: request 1 of the workload long has 129 prompt and 32 output tokens, which need 10 pages of "
        "16 tokens, but num_pages is 9; raise it, or choose another workload\n"
    )
    shown = capsys.readouterr().err
    assert ("error" not in shown) if fits else (shown == message)
    assert (engines[0].num_added > 0) == fits


def test_unwritable_outputs_fail_before_anything_is_loaded(
    model: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    for flag, name in (("--json", "report.json"), ("--plots", "plot.png")):
        given = tmp_path / "report.json" if flag == "--json" else tmp_path
        assert cli.main(["bench", "offline", flag, str(given), "--model", model]) == 2
        message = f"jaxserve: error: cannot write {tmp_path / name}: Read-only file system\n"
        assert capsys.readouterr().err == message
    assert engines == []


@pytest.mark.parametrize("broken_by", [KeyboardInterrupt, OSError("out of something")])
@pytest.mark.usefixtures("undrawn")
def test_completed_runs_are_kept_if_a_later_one_fails(
    model: str,
    workload: str,
    tmp_path: Path,
    engines: list[fake_engine.FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken_by: BaseException,
) -> None:
    reset, path = fake_engine.FakeEngine.reset_prefix_cache, tmp_path / "report.json"
    written = []

    def break_third_run(engine: fake_engine.FakeEngine) -> None:
        reset(engine)
        written.append(len(json.loads(path.read_text())["runs"]) if path.exists() else 0)
        if engine.num_cache_resets == 3:
            raise broken_by

    monkeypatch.setattr(fake_engine.FakeEngine, "reset_prefix_cache", break_third_run)
    flags = ["--rates", "300,400,500", "--json", str(path), "--plots", str(tmp_path)]
    code = cli.main(["bench", "serve", "--workload", workload, "--model", model, *flags])
    assert code == (130 if broken_by is KeyboardInterrupt else 2)
    assert written == [0, 1, 2]
    assert [run["rate_per_s"] for run in json.loads(path.read_text())["runs"]] == [300, 400]
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["300", "400"]
    assert (tmp_path / "throughput_latency.png").exists()


def test_a_symbolic_link_to_the_json_file_is_followed(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine]
) -> None:
    (tmp_path / "report.json").symlink_to(tmp_path / "real.json")
    bench(model, tmp_path, "offline", "--workload", workload)
    assert (tmp_path / "report.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["kind"] == "offline"


@pytest.mark.usefixtures("undrawn")
def test_infinite_rate_with_limited_concurrency(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rates", "100,inf", "--num-requests", "8", "--max-concurrency", "2", "--plots", str(tmp_path)]
    report = bench(model, tmp_path, "serve", "--workload", workload, *flags)
    load = {name: report["workload"][name] for name in ("num_requests", "arrival_seed", "max_concurrency")}
    assert load == {"num_requests": 8, "arrival_seed": 0, "max_concurrency": 2}
    run = report["runs"][1]
    assert run["rate_per_s"] == "inf"
    assert [r["num_output_tokens"] for r in run["requests"]] == [3, 1, 9, 3, 1, 9, 3, 1]
    assert [r["arrival_s"] for r in run["requests"][:2]] == [0, 0]
    assert min(r["arrival_s"] for r in run["requests"][2:]) > 0
    assert run["batch_rows"]["max"] == 2
    assert run["queue_depth"]["max"] == 0
    assert capsys.readouterr().out.split("\n\n")[1].splitlines()[2].startswith("inf ")
    assert (tmp_path / "timeline-rate-inf.png").exists()


def test_arrival_seeds_change_the_arrivals(
    model: str, workload: str, tmp_path: Path, engines: list[fake_engine.FakeEngine]
) -> None:
    arrivals = []
    for flags in ([], ["--arrival-seed", "0"], ["--arrival-seed", "1"]):
        (run,) = bench(model, tmp_path, "serve", "--workload", workload, "--rate", "500", *flags)["runs"]
        arrivals.append([r["arrival_s"] for r in run["requests"]])
    assert arrivals[0] == arrivals[1]
    assert not set(arrivals[1]) & set(arrivals[2])


def test_numbers_have_three_significant_digits() -> None:
    given = [None, 0.0, 0.012345, 1.2345, 99.99, 123.4, 12345.6]
    assert [tables.number(value) for value in given] == ["-", "0", "0.0123", "1.23", "100", "123", "12346"]


def test_plots_need_only_matplotlib() -> None:
    assert plotting.reason_missing() is None
