"""Status lines of an engine while it serves or compiles."""

import dataclasses
import threading
import time
from typing import Any, Protocol, runtime_checkable

from jaxserve.api.metrics import EngineStats, Occupancy, PeakRates

_ERASE_TO_END = "\x1b[K"
_PATIENCE_S = 2.0  # cached executables usually load faster


@runtime_checkable
class WatchedEngine(Protocol):
    """Engine with counters.

    Attributes:
        stats: totals since start.
    """

    stats: EngineStats

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages now."""

    def peak_rates(self) -> PeakRates:
        """Return the device's peak rates."""

    def wait_until_warm(self) -> None:
        """Block until every program is compiled."""


def wait_until_warm(engine: WatchedEngine, stream: Any) -> None:
    """Block until every program is ready; if that takes long, write a line to `stream`."""
    line = "jaxserve: loading or compiling all programs first, which can take minutes where none are cached"
    timer = threading.Timer(_PATIENCE_S, print, (line,), {"file": stream, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        engine.wait_until_warm()
    finally:
        timer.cancel()


class StatusLine:
    """Context that writes a status line about once a second: in place on a terminal, else one per line.

    A separate thread reads the engine's counters, so that steps do not wait for it.

    Args:
        engine: engine to observe. Entering waits until it is warm: peak rates measured during compilation would be too
            low, and are cached.
        stream: text stream to write to.
        interval_s: seconds between lines.
    """

    def __init__(self, engine: WatchedEngine, stream: Any, interval_s: float = 1.0) -> None:
        self._engine, self._stream, self._interval_s = engine, stream, interval_s
        self._rewrites = stream.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._num_lines = 0

    def __enter__(self) -> "StatusLine":
        wait_until_warm(self._engine, self._stream)
        self._peak_rates = self._engine.peak_rates()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._rewrites and self._num_lines:
            self._stream.write("\n")

    def _run(self) -> None:
        """Write a line per interval until the context exits; the body of the thread."""
        before, before_s = dataclasses.replace(self._engine.stats), time.monotonic()
        while not self._stop.wait(self._interval_s):
            now, now_s = dataclasses.replace(self._engine.stats), time.monotonic()
            self._write(stats_line(now.since(before), now_s - before_s, self._peak_rates, self._engine.occupancy))
            before, before_s = now, now_s

    def _write(self, line: str) -> None:
        """Write a line, on a terminal over the previous one."""
        self._stream.write(f"\r{line}{_ERASE_TO_END}" if self._rewrites else f"{line}\n")
        self._stream.flush()
        self._num_lines += 1


def stats_line(stats: EngineStats, seconds: float, peak_rates: PeakRates, now: Occupancy) -> str:
    """Return the status line: rates over the last `seconds`, which `stats` covers, and the current occupancy."""
    parts = (
        f"{now.num_running} rows",
        f"in {stats.num_prefill_tokens / seconds:.0f} tok/s",
        f"out {stats.num_output_tokens / seconds:.0f} tok/s",
        f"{now.num_waiting} waiting",
        f"pages {now.num_pages_used / now.num_pages:.0%}",
        f"E {stats.split(peak_rates).efficiency:.0%}",
    )
    return ", ".join(parts)
