"""Diary: the server's log of its start, refusals, requests and end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.server.call import Call

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("jaxserve.server.access")

REFUSALS_INTERVAL_S = 60.0


class Diary:
    """Log of one server.

    Args:
        logs_access: True to log every request.
    """

    def __init__(self, *, logs_access: bool) -> None:
        self._logs_access = logs_access
        self._refused: Counter[str] = Counter()
        self._refused_since_s = time.monotonic()
        self._num_requests = 0

    def note_start(self, engine: Engine, url: str, names: tuple[str, ...]) -> None:
        """Log that the server has started: its model's names, URL and sizes."""
        config, schedule = engine.config, engine.schedule
        logger.info(
            "serving %s (%s) as %s at %s: max_model_len %d, max_num_seqs %d, %d pages of %d tokens",
            config.model or config.model_path.name,
            engine.arch.architecture,
            ", ".join(names),
            url,
            schedule.max_model_len,
            schedule.max_num_seqs,
            schedule.num_pages,
            schedule.page_size,
        )

    def note_refusal(self, status: int, code: str) -> None:
        """Count a refused request by its HTTP status and error code, for the next log line."""
        self._refused[f"{status} {code}"] += 1

    def log_refusals(self, *, immediately: bool = False) -> None:
        """Log the numbers of refused requests since the last time, if any were, at most once a minute.

        Args:
            immediately: True to log even if less time has passed.
        """
        now_s = time.monotonic()
        seconds = now_s - self._refused_since_s
        if not immediately and seconds < REFUSALS_INTERVAL_S:
            return
        if self._refused:
            counts = ", ".join(f"{count} with {reason}" for reason, count in self._refused.most_common())
            logger.info("requests refused in %.0f s: %d (%s)", seconds, self._refused.total(), counts)
        self._refused.clear()
        self._refused_since_s = now_s

    def note_end_of(self, call: Call) -> None:
        """Count a request that has ended, and log it if requests are logged."""
        self._num_requests += 1
        if self._logs_access:
            status = "no reply" if call.status is None else str(call.status)
            seconds = time.monotonic() - call.came_s
            access_logger.info('%s "%s %s" %s %.3f s', call.client, call.method, call.raw_path, status, seconds)

    def note_stop(self, num_open: int, timeout_s: float) -> None:
        """Log that a signal has come, and how long the `num_open` open requests may take to end."""
        logger.info("stopping after a signal; open requests: %d, with %g s to end", num_open, timeout_s)

    def note_end(self, num_cut: int) -> None:
        """Log that the server has ended, and the number of replies that were cut off."""
        self.log_refusals(immediately=True)
        logger.info("stopped; requests: %d, cut off at the end: %d", self._num_requests, num_cut)
