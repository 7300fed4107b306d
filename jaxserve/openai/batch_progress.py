"""Progress of a batch: a bar on a terminal, elsewhere a line every half minute."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxserve.openai.batch_output import DoneLines
from jaxserve.system.ticker import Ticker


class BatchProgress:
    """Context that shows a batch's progress and its estimated remaining time on stderr.

    The estimate counts the records after this run's first one, which may have waited for programs to load.

    Args:
        done: lines that had a record when the run began.
        is_wanted: False to show nothing.
        clock: function that returns the time in seconds.
    """

    def __init__(self, done: DoneLines, *, is_wanted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._num_resumed = done.num_lines, done.num_records
        self._num_done, self._clock = done.num_records, clock
        self._first_s: float | None = None
        self._note = ""
        self._bar = _bar(done) if is_wanted and sys.stderr.isatty() else None
        self._display: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._bar is not None:
            self._display = contextlib.closing(self._bar)
        elif is_wanted:
            self._display = Ticker(self.line)

    def __enter__(self) -> "BatchProgress":
        self._display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.__exit__(None, None, None)

    def update(self) -> None:
        """Count a record that was written, and draw the bar."""
        if self._first_s is None:
            self._first_s = self._clock()
        self._num_done += 1
        self._draw(1)

    def note(self, text: str) -> None:
        """Set a text that is shown after the number of records; called between records, it keeps a bar up to date."""
        self._note = text
        self._draw(0)

    def _draw(self, num_new: int) -> None:
        """Advance the bar by `num_new` records; it appears on the screen if the last time was long ago."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._details(), refresh=False)
            self._bar.update(num_new)

    def left_s(self) -> float | None:
        """Return the estimated time to the last record in seconds; None before two records of this run."""
        num_timed = self._num_done - self._num_resumed - 1
        if self._first_s is None or num_timed < 1:
            return None
        return (self._total - self._num_done) * (self._clock() - self._first_s) / num_timed

    def line(self) -> str:
        """Return the numbers of records and the remaining time as a line of text."""
        resumed = f" ({self._num_resumed} from before)" if self._num_resumed else ""
        return f"batch: {self._num_done} of {self._total} records{resumed}, {self._details()}"

    def _details(self) -> str:
        """Return the estimated remaining time, and the text of the last `note`."""
        left_s = self.left_s()
        estimate = "no estimate yet" if left_s is None else f"about {_duration(left_s)} left"
        return f"{estimate}, {self._note}" if self._note else estimate


def _bar(done: DoneLines) -> Any:
    """Return a tqdm bar for all lines of a batch, after those that are done."""
    from tqdm import tqdm  # noqa: PLC0415 - not needed to parse a command line

    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    sizes = {"total": done.num_lines, "initial": done.num_records}
    return tqdm(**sizes, unit="req", desc="batch", bar_format=bar_format, miniters=0)  # drawn by time only


def _duration(seconds: float) -> str:
    """Return a time in the two largest units: 1 h 05 min, 2 min 30 s, 45 s."""
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole_s:02} s" if minutes else f"{whole_s} s"
