"""Progress of a batch: estimates, and lines where stderr is no terminal."""

import io
import time
from functools import partial
from pathlib import Path

import pytest
from batches import completion, write_lines
from fake_engine import FakeEngine

from jaxserve.openai import batch_progress
from jaxserve.openai.batch_files import run_batch
from jaxserve.openai.batch_output import DoneLines
from jaxserve.openai.batch_progress import BatchProgress
from jaxserve.system.ticker import Ticker


def progress(num_lines: int, num_before: int) -> tuple[BatchProgress, list[float]]:
    done = DoneLines(num_lines=num_lines)
    for number in range(1, num_before + 1):
        done.add(number)
    now = [0.0]
    return BatchProgress(done, is_wanted=False, clock=lambda: now[0]), now


@pytest.mark.parametrize("start_s", [0.0, 500.0])
def test_an_estimate_counts_neither_earlier_records_nor_the_start(start_s: float) -> None:
    shown, now = progress(1000, 900)
    assert shown.left_s() is None
    now[0] = start_s
    shown.update()
    assert shown.left_s() is None, "one record says nothing about the next"
    for _ in range(9):
        now[0] += 2.0
        shown.update()
    assert shown.left_s() == pytest.approx(90 * 2.0)
    shown.note("5 tok/s")
    assert shown.line() == "batch: 910 of 1000 records (900 from before), about 3 min 00 s left, 5 tok/s"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (3900.0, "1 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert batch_progress._duration(seconds) == text


def test_a_line_comes_at_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    with Ticker(lambda: "loading", 0.02):
        time.sleep(0.3)
    assert capsys.readouterr().err.count("jaxserve: loading\n") >= 2


def test_a_run_shows_its_lines(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", [completion(str(n)) for n in range(20)])
    monkeypatch.setattr(batch_progress, "Ticker", partial(Ticker, interval_s=0.02))
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [time.sleep(0.02), step()][1])
    run_batch(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert "of 20 records, " in capsys.readouterr().err


def test_a_bar_shows_records_that_came_together_before_the_next_come(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with BatchProgress(DoneLines(num_lines=200), is_wanted=True) as shown:
        for _ in range(64):
            shown.update()
        time.sleep(0.2)  # longer than the time between two drawings
        shown.note("5 tok/s")
        assert "| 64/200 [" in terminal.getvalue()
        assert "5 tok/s" in terminal.getvalue()
