"""Live line: its content, and its form on terminals and elsewhere."""

import io
import itertools
import re
import threading
import time

import fake_engine
import pytest

from jaxserve.api.metrics import EngineStats, Occupancy, PeakRates
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.status_line import StatusLine, stats_line, wait_until_warm
from tests.waiting import until

PEAK_RATES = PeakRates(flops_per_s=1e9, bytes_per_s=1e9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(stream: io.StringIO, num_lines: int) -> str:
    """Return the output written while an engine works until there are that many lines."""
    engine = fake_engine.FakeEngine(None, step_s=0.001)
    deadline = time.monotonic() + 30
    with StatusLine(engine, stream, interval_s=0.01):
        for index in itertools.count():
            engine.add_request(str(index), [1], SamplingParams(max_tokens=5))
            while engine.has_unfinished():
                engine.step()
            if stream.getvalue().count("tok/s") >= 2 * num_lines:
                break
            assert time.monotonic() < deadline
    return stream.getvalue()


def test_the_line_is_of_the_interval() -> None:
    stats = EngineStats(
        num_steps=1, num_prefill_tokens=50, num_output_tokens=20, wall_ms=10.0, flops=2_000_000, kv_bytes=1_000_000
    )
    line = stats_line(stats, 0.5, PEAK_RATES, Occupancy(num_running=2, num_waiting=1, num_pages_used=1, num_pages=4))
    assert line == "2 rows, in 100 tok/s, out 40 tok/s, 1 waiting, pages 25%, E 20%"


def test_an_idle_engine_has_no_rows() -> None:
    stream = io.StringIO()
    with StatusLine(fake_engine.FakeEngine(None), stream, interval_s=0.01):
        until(lambda: stream.getvalue().endswith("\n"))
    assert stream.getvalue().splitlines()[0] == "0 rows, in 0 tok/s, out 0 tok/s, 0 waiting, pages 0%, E 0%"


def test_lines_follow_each_other_in_a_file() -> None:
    lines = watch(io.StringIO(), 3).splitlines()
    assert len(lines) >= 3
    assert all(line.startswith(("1 rows, in ", "0 rows, in ")) for line in lines)
    assert any("out 0 tok/s" not in line for line in lines)


def test_a_terminal_shows_one_line_that_is_rewritten() -> None:
    shown = watch(Terminal(), 3)
    assert shown.startswith("\r")
    assert shown.count("\n") == 1
    assert shown.endswith("\x1b[K\n")


def test_nothing_is_written_before_the_first_interval() -> None:
    for stream in (io.StringIO(), Terminal()):
        with StatusLine(fake_engine.FakeEngine(None), stream, interval_s=60.0):
            pass
        assert stream.getvalue() == ""


class CompilingEngine(fake_engine.FakeEngine):
    """Engine that is warm once the live line has said that it compiles."""

    def __init__(self, stream: io.StringIO) -> None:
        super().__init__(None)
        self._stream = stream

    def wait_until_warm(self) -> None:
        until(lambda: self._stream.getvalue().endswith("\n"))
        super().wait_until_warm()


def test_that_compiling_takes_long_is_said_once_while_it_does() -> None:
    stream = io.StringIO()
    engine = CompilingEngine(stream)
    for _ in range(2):
        wait_until_warm(engine, stream)
        assert engine.is_warm
    assert re.fullmatch(
        r"jaxserve: loading or compiling all programs first, .* where none are cached\n", stream.getvalue()
    )


class BrokenEngine(fake_engine.FakeEngine):
    """An engine that cannot compile."""

    def wait_until_warm(self) -> None:
        raise ZeroDivisionError


def test_a_warm_engine_says_nothing_nor_one_that_cannot_compile() -> None:
    stream, before = io.StringIO(), threading.active_count()
    wait_until_warm(fake_engine.FakeEngine(None), stream)
    with pytest.raises(ZeroDivisionError):
        wait_until_warm(BrokenEngine(None), stream)
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert stream.getvalue() == ""


def test_an_error_inside_passes_and_ends_the_lines() -> None:
    engine = fake_engine.FakeEngine(None)
    with pytest.raises(KeyboardInterrupt), StatusLine(engine, io.StringIO()) as live:
        raise KeyboardInterrupt
    assert not live._thread.is_alive()
