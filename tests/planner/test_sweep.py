"""Tests of sweeps over targets that are planned from the same data sheets; costs are computed by hand."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import EngineConfig, cli
from jaxserve.errors import ConfigError
from jaxserve.tools.planner import command
from jaxserve.tools.planner.plan import Plan, Speed, make_plan
from jaxserve.tools.planner.report import build_report, build_sweep_report, render_sweep
from jaxserve.tools.planner.sizes import Memory
from jaxserve.tools.planner.sweep import Candidate, cheapest, read_prices, sweep
from jaxserve.tools.planner.targets import KINDS, SWEPT, Target, parse_target

EXAMPLE = Path(command.__file__).parent / "example_prices.toml"
PRICES = {"h200": 4.0, "v6e": 2.5}
SPEED = Speed(1024, {1: 2.0, 8: 4.0, 64: 16.0}, {1: 500.0, 8: 2000.0, 64: 4000.0}, 1024, 30.0)
ROOMY = Memory(10**11, 10**10, 10**6, 10**6, 5 * 10**10, 2**21, 10**9)


def made(num_chips_needed: int, *, broken: str = "") -> Callable[[Target], Plan]:
    """Return a function that makes plans which fit on a given number of chips, and fails for one target."""
    plan = make_plan(EngineConfig(), parse_target("cpu"))

    def make(target: Target) -> Plan:
        if target.name == broken:
            raise ConfigError("steps cannot be compiled for it")
        fits = target.num_chips >= num_chips_needed
        memory = ROOMY if fits else dataclasses.replace(ROOMY, pool_limit=0)
        return dataclasses.replace(plan, target=target, memory=memory, speed=SPEED if fits else None)

    return make


def swept(names: list[str], make: Callable[[Target], Plan], batch: int | None = None) -> list[Candidate]:
    return list(sweep(names, make, prices=PRICES, batch=batch))


def test_all_kinds_are_swept_and_have_an_example_of_a_price() -> None:
    assert {parse_target(name).kind for name in SWEPT} == set(KINDS)
    assert read_prices(str(EXAMPLE)).keys() == set(KINDS)


def test_one_that_fails_does_not_end_a_sweep() -> None:
    candidates = swept(["h200", "h200x2", "v6e:2x2"], made(2, broken="h200x2"))
    assert [x.target.name for x in candidates] == ["h200", "h200x2", "v6e:2x2"]
    assert [x.plan is None for x in candidates] == [False, True, False]
    assert candidates[1].reason == "steps cannot be compiled for it"
    text, report = render_sweep(candidates), build_sweep_report(candidates)
    assert "h200x2: steps cannot be compiled for it" in text
    assert report["targets"][1]["reason"] == "steps cannot be compiled for it"
    assert json.loads(json.dumps(report))["cheapest"] == "v6e:2x2"


def test_a_wrong_target_fails_before_anything_is_planned() -> None:
    with pytest.raises(ConfigError, match="h300"):
        swept(["h200", "h300"], lambda _: pytest.fail("planned"))


@pytest.mark.parametrize(
    ("needed", "best", "usd_per_hour"), [(1, "h200", 4.0), (2, "h200x2", 8.0), (3, "v6e:2x2", 10.0), (5, None, None)]
)
def test_the_cheapest_is_of_those_that_fit(needed: int, best: str | None, usd_per_hour: float | None) -> None:
    candidates = swept(["v6e:2x2", "h200x4", "h200x2", "h200", "v4:2x2x2"], made(needed))
    found = cheapest(candidates)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert (found.target.name, found.usd_per_hour) == (best, usd_per_hour)
    if needed > 1:
        assert candidates[3].usd_per_million_tokens is None
    assert candidates[-1].usd_per_hour is None


@pytest.mark.parametrize(("batch", "num_rows"), [(None, 64), (8, 8), (7, 1), (1000, 64)])
def test_tokens_cost_what_chips_cost_while_they_are_made(batch: int | None, num_rows: int) -> None:
    (candidate,) = swept(["h200x2"], made(1), batch)
    assert candidate.num_rows == num_rows
    seconds = 1e6 / SPEED.tokens_per_s[num_rows]
    assert candidate.usd_per_million_tokens == pytest.approx(8.0 / 3600 * seconds)


def test_a_trace_is_served_on_targets_that_fit() -> None:
    asked: list[tuple[str, float | None]] = []

    def serve(target: Target, usd_per_hour: float | None) -> dict[str, Any]:
        asked.append((target.name, usd_per_hour))
        times = {"p50": 12.0, "p99": 345.0}
        figures = {"usd_per_million_output_tokens": 6.5, "output_tokens_per_s": 789.0, "requests": 9}
        figures["too_long"] = 4 * (target.name == "h200x2")
        return {"ttft_ms": times, "itl_ms": {"p50": 3.21, "p99": 4.0}, **figures}

    candidates = list(sweep(["h200", "h200x2", "v4:2x2x2"], made(2), prices=PRICES, batch=None, serve=serve))
    assert asked == [("h200x2", 8.0), ("v4:2x2x2", None)]
    assert [x.usd_per_million_tokens for x in candidates] == [None, 6.5, 6.5]
    header, _, row, *_ = (line.split() for line in render_sweep(candidates).splitlines())
    assert row[-6:] == ["12", "345", "3.21", "789", "8.00", "6.50"]
    assert "TTFT p99" in " ".join(header)
    assert render_sweep(candidates).count("too long") == 1
    assert "h200x2: 4 of 9 requests are too long" in render_sweep(candidates)
    targets = build_sweep_report(candidates)["targets"]
    assert ["served" in target for target in targets] == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cpu", "--trace", "x"], "a trace is served on swept targets"),
        (["--sweep", "cpu", "--trace", "no/such"], "trace must be a file with requests, got no/such"),
        (["--sweep", "cpu", "--max-requests", "3"], "must be a positive number of requests of --trace"),
    ],
)
def test_a_trace_needs_a_sweep(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("h200 =", "must be TOML"), ("h300 = 1", "got h300 = 1"), ("h200 = '3'", "got h200 = '3'"), ("v4 = 0", "v4 = 0")],
)
def test_a_file_that_has_no_prices(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prices(str(path))


def test_the_command_sweeps_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "capacity.png"
    arguments = ["plan", "--sweep", "cpu", "--prices", str(EXAMPLE), "--plot", str(plot), "--json"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    plan = json.loads(json.dumps(build_report(make_plan(EngineConfig(), parse_target("cpu")))))
    assert report == {
        "targets": [{**plan, "usd_per_hour": None, "usd_per_million_tokens": None}],
        "cheapest": None,
    }
    assert "planning for cpu" in shown.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_reports_missing_compilers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jaxserve.system.machine_memory.machine_bytes", lambda: 16 * 10**9)
    arguments = ["plan", "--sweep", "cpu", "--model", "llama-3.1-405b"]
    assert cli.main([*arguments, "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert not target["fits"]
    assert cli.main(arguments) == 0
    assert f"lacks {target['missing_bytes_per_chip'] / 1e9:.2f} GB" in capsys.readouterr().out


def test_a_sweep_that_computes_nothing_says_so_and_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def fail(*_: object, **__: object) -> Plan:
        raise ConfigError("there is no compiler for it")

    monkeypatch.setattr(command, "_plan", fail)
    plot = tmp_path / "capacity.png"
    assert cli.main(["plan", "--sweep", "h200", "v6e:2x2", "--plot", str(plot)]) == 1
    shown = capsys.readouterr()
    assert "h200: there is no compiler for it" in shown.out
    assert f"no target could be computed, for the reasons above, and {plot} is not drawn" in shown.err
    assert not plot.exists()


def test_without_matplotlib_nothing_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("jaxserve.tools.figures.plotting.find_spec", lambda _: None)
    monkeypatch.setattr(command, "make_plan", lambda *_, **__: pytest.fail("planned"))
    assert cli.main(["plan", "--target", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
