"""Periodic status lines for slow commands without a terminal's progress bar."""

import sys
import threading
from collections.abc import Callable

INTERVAL_S = 30.0


class Ticker:
    """Context that writes a line to stderr at intervals, from a separate thread.

    Args:
        text: returns the line.
        interval_s: seconds between lines, and before the first.
    """

    def __init__(self, text: Callable[[], str], interval_s: float = INTERVAL_S) -> None:
        self._text, self._interval_s = text, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Ticker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        """Write a line at each interval until the context ends."""
        while not self._ended.wait(self._interval_s):
            print(f"jaxserve: {self._text()}", file=sys.stderr, flush=True)
