"""Figures by window and by group: Little's law, sums, and the page."""

import json
from pathlib import Path
from random import Random

import pytest

from jaxserve import cli
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_time import Rates
from jaxserve.tools.simulator.simulation import Limits, Simulation
from jaxserve.tools.simulator.step_times import FittedTimes
from jaxserve.tools.simulator.timeline import MAX_WINDOWS, Timeline
from jaxserve.tools.simulator.traces import TracedRequest

SIZES = ScheduleConfig(8, 64, 512, 16, 200)
RATES = Rates(0.02, 0.01, 0.001, 0.0005)


@pytest.mark.usefixtures("no_type_checks")
def test_windows_and_groups_have_what_the_run_has() -> None:
    draw, now_s, trace = Random(7), 5.0, []
    for _ in range(80):
        now_s += draw.expovariate(40.0)
        tenant, priority = draw.choice("ab"), draw.randrange(2)
        trace.append(TracedRequest(now_s, draw.randrange(1, 200), draw.randrange(1, 60), (), 32, tenant, priority))
    trace.append(TracedRequest(now_s + 500.0, 10, 10))
    totals = Simulation(SIZES, FittedTimes(RATES), 2, limits=Limits(max_queued_requests=3)).run(trace)
    assert totals.num_refused > 0
    assert totals.num_ended + totals.num_refused == totals.num_requests == 81
    # The mean number of requests is their rate times their time (Little's law).
    assert totals.waiting_s == pytest.approx(totals.ttft_s.total)
    assert totals.decoding_s == pytest.approx(totals.latency_s.total - totals.ttft_s.total)
    report = totals.report(2)
    windows, width_s = report["timeline"], report["window_s"]
    assert MAX_WINDOWS / 2 <= len(windows) <= MAX_WINDOWS
    assert (len(windows) - 1) * width_s <= report["duration_s"] < len(windows) * width_s
    for name, expected in (
        ("output_tokens_per_s", report["output_tokens"]),
        ("requests_per_s", 81),
        ("refused_per_s", report["refused"]),
        ("waiting", totals.ttft_s.total),
        ("busy", report["busy"] * report["duration_s"]),
        ("kv_use", report["kv_use_mean"] * report["duration_s"]),
    ):
        assert sum(window[name] for window in windows) * width_s == pytest.approx(expected), name
    groups = {(group["tenant"], group["priority"]): group for group in report["groups"]}
    assert groups.keys() == {("", 0), *((tenant, priority) for tenant in "ab" for priority in range(2))}
    for name in ("requests", "refused", "ended", "prompt_tokens", "output_tokens"):
        assert sum(group[name] for group in groups.values()) == report[name], name


def test_time_is_divided_among_the_windows_of_any_width() -> None:
    draw, timeline, now_s, expected = Random(3), Timeline(2.0), 2.0, 0.0
    for _ in range(300):
        count, next_s = draw.randrange(5), now_s + draw.expovariate(1.0) ** 4
        timeline.passed(now_s, next_s, count, 0, 0)
        expected += count * (next_s - now_s)
        now_s = next_s
        assert timeline.now is timeline.windows[-1]
        assert timeline.start_s + (len(timeline.windows) - 1) * timeline.width_s <= now_s
        assert sum(window.waiting_s for window in timeline.windows) == pytest.approx(expected)
    assert len(timeline.windows) <= MAX_WINDOWS


@pytest.mark.long  # draws plots
def test_two_runs_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "$a_{$.jsonl"  # no mathematics in titles
    lines = [
        {"arrival_s": index / 9, "prompt_len": 30, "output_len": 9, "tenant": "<b>", "priority": index % 2}
        for index in range(20)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(dict(zip(Rates._fields[:4], RATES, strict=False))))
    command = ["simulate", "--trace", str(trace), "--target", "cpu", "--step-rates", str(rates)]
    assert cli.main([*command, "--json"]) == 0
    before, page = tmp_path / "before.json", tmp_path / "page.html"
    before.write_text(capsys.readouterr().out)
    assert cli.main([*command, "--replicas", "2", "--page", str(page), "--beside", str(before)]) == 0
    text = page.read_text()
    assert text.count("<img") == text.count("data:image/svg+xml;base64,") == 7
    assert "1 x cpu" in text
    assert "2 x cpu" in text
    assert "&lt;b&gt;, 1" in text
    assert "<b>" not in text
    capsys.readouterr()
    for arguments, message in (
        (["--beside", str(before)], "give the page's file by --page"),
        (["--page", str(page), "--beside", str(rates)], "must be the output of `jaxserve simulate --json`"),
        (["--page", str(tmp_path / "no" / "page.html")], "cannot write"),
    ):
        assert cli.main([*command, *arguments]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert ("TTFT" in printed.out) == (message == "cannot write")
