"""GPU report: content of its file, restarts after failures, and a whole run with tiny sizes on a CPU."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_report
from device_report import driver, tables
from device_report.document import Document
from device_report.grid import FULL, TINY, WIDE, Grid
from device_report.trace import Span, _covered
from device_report.transformers_engine import _stretch

SCRIPT = Path(gpu_report.__file__)
DECODE = {"us": 1.0, "rows": 1, "context": 1, "page_size": 16, "group": 1, "kv_dtype": WIDE, "backend": "xla"}
MACHINE = {"device": "test", "platform": "gpu", "driver": None, "versions": {"python": "3"}}


def run_script(*args: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *args], check=True, capture_output=True, text=True, timeout=500)
    return done.stdout


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.full
def test_a_dry_run_measures_all_there_is(tmp_path: Path) -> None:
    """Run the report once for all tests, since it takes long."""
    options = ("--dry-run", "--json", str(tmp_path / "gpu.json"))
    run_script("--part", "peak_rates", *options)
    peak_rates = content(tmp_path / "gpu.json")["parts"]["peak_rates"]
    printed = run_script("--part", "all", "--missing", "--plots", str(tmp_path / "plots"), *options)
    assert content(tmp_path / "gpu.json")["parts"]["peak_rates"] == peak_rates, "a part keeps what others have measured"
    check_that_every_stage_measures_something(tmp_path, printed)
    check_that_narrow_pools_are_measured_beside_wide_ones(tmp_path, printed)
    check_that_tables_and_plots_come_of_the_file_alone(tmp_path, printed)
    with pytest.raises(SystemExit, match="of a GPU"):  # never mixed with a measurement
        Document(tmp_path / "gpu.json", "gpu", dry_run=False)


def check_that_every_stage_measures_something(directory: Path, printed: str) -> None:
    report = content(directory / "gpu.json")
    assert report["dry_run"] is True
    assert {part: list(stages) for part, stages in report["parts"].items()} == {
        part: [stage.name for stage in stages] for part, stages in gpu_report.PARTS.items()
    }
    for stages in report["parts"].values():
        for stage, entries in stages.items():
            assert entries["left_out"] == [], stage
            assert entries["points"], stage
            for name, entry in entries["points"].items():
                assert "failed" not in entry, (stage, name, entry, printed)
                assert entry.get("passed", True), (stage, name, entry)


def check_that_tables_and_plots_come_of_the_file_alone(directory: Path, printed: str) -> None:
    plots = directory / "plots_of_the_file"
    again = run_script("--part", "report", "--json", str(directory / "gpu.json"), "--plots", str(plots))
    table = again[again.index("Dry run") :]
    assert printed.endswith(table)
    for heading in ("peak", "correctness", "decode us", "prefill us", "programs", "decode tok/s"):
        assert heading in table
    assert {path.name for path in plots.iterdir()} == {"gpu_roofline.png", "gpu_decode.png"}
    assert all(path.stat().st_size > 5000 for path in plots.iterdir())


def check_that_narrow_pools_are_measured_beside_wide_ones(directory: Path, printed: str) -> None:
    points = Document(directory / "gpu.json", "gpu", dry_run=True).points("decode")
    by_dtype = {dtype: [p for p in points if p["kv_dtype"] == dtype] for dtype in TINY.kv_dtypes}
    assert sum(map(len, by_dtype.values())) == len(points)
    token_bytes = {WIDE: TINY.token_bytes}
    token_bytes |= dict.fromkeys(TINY.kv_dtypes[1:], 2 * TINY.num_kv_heads * (TINY.head_dim + 2))  # a scale per vector
    for dtype, found in by_dtype.items():
        assert [(p["rows"], p["context"]) for p in found] == list(TINY.decodes())
        for p, wide in zip(found, by_dtype[WIDE], strict=True):
            read = p["kv_gb_per_s"] * p["us"] * 1e3
            assert read == pytest.approx(p["rows"] * p["context"] * token_bytes[dtype])
            assert p.get("speed_up") == (None if dtype == WIDE else wide["us"] / p["us"])
            assert f"| {dtype} " in printed


FAKE_WORKER = """
import json, os, sys, time
task = json.loads(sys.argv[1])
send = lambda **message: print(json.dumps(message), flush=True)
send(machine=MACHINE)
for name in ("good", "fails", "dies", "late", "last"):
    if name in task["skip"]:
        continue
    if time.time() > task["deadline"]:
        send(left_out=name)
        continue
    send(began=name, entry={"kind": "k"})
    if name == "dies":
        os._exit(3)
    if name == "late":
        time.sleep(60)
    send(point=name, entry={"kind": "k", **({"failed": "a reason"} if name == "fails" else {"value": 1})})
    if name == "fails":
        break
else:
    send(done=True)
"""


@pytest.mark.long
def test_continues_after_failures_until_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FAKE_WORKER.replace("MACHINE", repr(MACHINE))
    monkeypatch.setattr(driver, "WORKER", (sys.executable, "-c", worker))
    monkeypatch.setattr(driver, "GRACE_S", 0.5)
    monkeypatch.setattr(driver, "LAST_S", 3)
    document = Document(tmp_path / "report.json", "gpu", dry_run=False)
    options = driver.Options(dry_run=False, missing=False, only="")
    with (tmp_path / "log").open("w") as log:
        driver.StageRun(document, "peak_rates", "peak_rates", time.time() + 3, options, log).run()
    found = content(tmp_path / "report.json")["parts"]["peak_rates"]["peak_rates"]
    assert found["points"]["good"]["value"] == 1
    assert found["points"]["fails"]["failed"] == "a reason"
    assert found["points"]["dies"]["failed"] == "the process ended with status 3"
    assert "after the time was up" in found["points"]["late"]["failed"]
    assert found["left_out"] == ["last"]
    assert document.measured("peak_rates", "peak_rates") == ["good"]


def test_measurements_of_another_machine_are_dropped(tmp_path: Path) -> None:
    document = Document(tmp_path / "report.json", "gpu", dry_run=False)
    for machine, left in ((MACHINE, {"a", "b"}), (MACHINE, {"a", "b"}), (MACHINE | {"driver": "2"}, {"b"})):
        document.begin("peak_rates", "peak_rates", machine)
        if not document.measured("peak_rates", "peak_rates"):
            document.put("peak_rates", "peak_rates", "b" if machine["driver"] else "a", {"kind": "x"})
        if machine is MACHINE:
            document.put("peak_rates", "peak_rates", "b", {"kind": "x"})
        assert set(document.measured("peak_rates", "peak_rates")) == left


def test_fractions_follow_from_the_peak_rates(tmp_path: Path) -> None:
    document = Document(tmp_path / "report.json", "gpu", dry_run=False)
    document.begin("attention", "attention", MACHINE)
    document.put("attention", "attention", "d", {"kind": "decode", "kv_gb_per_s": 3.0, **DECODE})
    assert "fraction_of_copy" not in document.points("decode")[0]
    document.begin("peak_rates", "peak_rates", MACHINE)
    for kind, rate in (("copy", 4.0), ("add", 3.9), ("read", 5.0)):
        document.put("peak_rates", "peak_rates", kind, {"kind": kind, "gb_per_s": rate})
    assert document.points("decode")[0]["fraction_of_copy"] == 0.75


@pytest.mark.parametrize(("chunk", "context"), [(1, 9), (5, 5), (4, 11)])
def test_flops_and_bytes_of_attention(chunk: int, context: int) -> None:
    grid, rows, group = Grid(num_kv_heads=2, head_dim=4), 3, 5
    lens = (chunk,) * rows
    figures = grid.figures(1.0, q_lens=lens, context=context, group=group, token_bytes=grid.token_bytes)
    visible = np.tril(np.ones((context, context)))[context - chunk :].sum()
    products = 2 * (2 * 4) * visible * (2 * group) * rows  # scores and values, a multiplication and an addition each
    assert figures["tflop_per_s"] * 1e12 == pytest.approx(products)
    if chunk == 1:
        assert figures["kv_gb_per_s"] * 1e9 == pytest.approx(np.zeros((rows, 2, context, 2, 4), np.float16).nbytes)


def test_prefills_have_contexts_no_shorter_than_their_chunks() -> None:
    prefills = list(FULL.prefills())
    assert len(prefills) == len(set(prefills)) == 8
    assert all(context >= chunk for chunk, context in prefills)


def test_fraction_of_time_that_spans_cover() -> None:
    assert _covered([Span(0, 4), Span(1, 2), Span(3, 5), Span(7, 10)]) == pytest.approx(0.8)
    assert _covered([Span(0, 4)]) == 1


def test_stretch_in_which_all_rows_decode() -> None:
    assert _stretch([[0.0, 1.0, 2.0, 3.0], [1.5, 2.5, 3.5, 4.5]])["decode_tok_per_s"] == pytest.approx(3 / 1.5)
    assert _stretch([[0.0, 1.0], None]) == {}


def test_numbers_read_at_a_glance() -> None:
    values = (None, True, 3, 1234.5, 0.012345, 12.345, "x")
    assert [tables.number(v) for v in values] == ["-", "True", "3", "1234", "0.0123", "12.3", "x"]
    out = io.StringIO(tables.table(("a", "b"), [(1, None)]))
    assert out.read().splitlines() == ["| a | b |", "|---|---|", "| 1 | - |"]
