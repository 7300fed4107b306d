"""`jaxserve bench` on a real engine: it counts exactly the tokens that were asked for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.api.metrics import PeakRates
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.tools.bench.command import BenchJob, run_job
from jaxserve.tools.bench.workloads import Workload, WorkloadRequest

Start = Callable[..., DrivenEngine]

REQUESTS = (
    WorkloadRequest(20, 9, prefix_id=0, prefix_len=16),
    WorkloadRequest(20, 4, prefix_id=0, prefix_len=16),
    WorkloadRequest(33, 1),
    WorkloadRequest(5, 12, arrival_s=0.3),
    WorkloadRequest(9, 12, arrival_s=0.3),
)


@pytest.mark.parametrize("kind", ["offline", "serve"])
def test_every_token_is_counted_once(
    start: Start, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start()
    monkeypatch.setattr(engine, "peak_rates", lambda: PeakRates(1e15, 1e15))
    job = BenchJob(kind, Workload("tiny", 1, REQUESTS), rates=(None, None), json_path=tmp_path / "report.json")
    report = run_job(engine, job)
    assert json.loads(job.json_path.read_text()) == json.loads(json.dumps(report))
    assert capsys.readouterr().out.startswith(f"{kind}, tiny: 5 requests, 87 prompt and 38 output tokens\n")
    for run in report["runs"]:  # equal, because each begins with an empty prefix cache
        assert [r["num_output_tokens"] for r in run["requests"]] == [r.output_len for r in REQUESTS]
        assert [r["num_cached_tokens"] for r in run["requests"]] == [0, 16, 0, 0, 0]
        assert run["cached_prompt_share"] == 16 / 87
        assert run["num_compiles"] == 0
        assert 0 < run["efficiency"] < 1
        assert sum(run["time_split_ms"].values()) <= run["elapsed_s"] * 1e3
        assert sum(run["timeline"]["num_rows"]) >= 38
        assert run["timeline"]["time_s"] == sorted(run["timeline"]["time_s"])
        if kind == "serve":
            assert run["elapsed_s"] > 0.3
