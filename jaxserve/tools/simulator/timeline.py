"""A simulation's figures over time, in constant memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.tools.simulator.distribution import Distribution

if TYPE_CHECKING:
    from jaxserve.scheduling.request import Request

MAX_WINDOWS = 240
_FIRST_WIDTH_S = 2.0**-10
_PERCENTS = (50, 90, 99)


class Figures:
    """Counts and distributions for a window, a tenant's class or a whole run.

    Attributes:
        ttft_s: times from arrival to first token.
        itl_s: times between a request's consecutive tokens.
        latency_s: times from arrival to last token.
        num_requests: requests that arrived.
        num_refused: requests refused because the queue was full.
        num_ended: requests that ended.
        num_prompt_tokens: prompt tokens in requests that ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_output_tokens: sampled tokens.
        waiting_s: requests without a token, times seconds.
        decoding_s: requests with a token that have not ended, times seconds.
        page_s: pages in use, times seconds.
        busy_s: device time in which a step ran, summed over replicas.
    """

    __slots__ = (
        "busy_s",
        "decoding_s",
        "itl_s",
        "latency_s",
        "num_cached_tokens",
        "num_ended",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_refused",
        "num_requests",
        "page_s",
        "ttft_s",
        "waiting_s",
    )

    def __init__(self) -> None:
        self.ttft_s, self.itl_s, self.latency_s = Distribution(), Distribution(), Distribution()
        self.num_requests = self.num_refused = self.num_ended = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.waiting_s = self.decoding_s = self.page_s = self.busy_s = 0.0

    def merge(self, other: Figures) -> None:
        """Add another one's figures."""
        for name in ("ttft_s", "itl_s", "latency_s"):
            getattr(self, name).merge(getattr(other, name))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def ended(self, request: Request, latency_s: float) -> None:
        """Count a request that has ended, and its latency in seconds."""
        self.num_ended += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.latency_s.add(latency_s)


_SUMS = tuple(name for name in Figures.__slots__ if name not in {"ttft_s", "itl_s", "latency_s"})


class Timeline:
    """Figures by window; all windows have one width, which doubles when there are too many.

    Args:
        start_s: first window's start.

    Attributes:
        start_s: as given.
        width_s: a window's width.
        windows: figures by window.
        now: the present window's figures.
    """

    def __init__(self, start_s: int | float = 0.0) -> None:
        self.start_s, self.width_s = start_s, _FIRST_WIDTH_S
        self.windows = [Figures()]
        self.now = self.windows[0]
        self._now_ends_s = start_s + self.width_s

    def passed(self, from_s: float, to_s: float, num_waiting: int, num_decoding: int, num_pages: int) -> None:
        """Advance the present; the counts hold until then."""
        if to_s < self._now_ends_s:
            self._add(self.now, to_s - from_s, num_waiting, num_decoding, num_pages)
            return
        for window, seconds in self._spread(from_s, to_s):
            self._add(window, seconds, num_waiting, num_decoding, num_pages)
        self.now = self.windows[-1]
        self._now_ends_s = self.start_s + len(self.windows) * self.width_s

    def busy(self, from_s: float, to_s: float) -> None:
        """Count a replica's dispatch, which ends at present."""
        for window, seconds in self._spread(from_s, to_s):
            window.busy_s += seconds

    @staticmethod
    def _add(window: Figures, seconds: float, num_waiting: int, num_decoding: int, num_pages: int) -> None:
        window.waiting_s += num_waiting * seconds
        window.decoding_s += num_decoding * seconds
        window.page_s += num_pages * seconds

    def _spread(self, from_s: float, to_s: float) -> list[tuple[Figures, float]]:
        """Return the windows between two times, and the seconds in each."""
        last = self._index(to_s)
        pieces = []
        for index in range(self._index(from_s), last + 1):
            starts_s = self.start_s + index * self.width_s
            seconds = min(to_s, starts_s + self.width_s) - max(from_s, starts_s)
            pieces.append((self.windows[index], max(seconds, 0.0)))
        return pieces

    def _index(self, at_s: float) -> int:
        """Return a time's window index; the window exists then."""
        while (index := int((at_s - self.start_s) / self.width_s)) >= MAX_WINDOWS:
            self.width_s *= 2
            pairs = self.windows
            self.windows = pairs[::2]
            for window, other in zip(self.windows, pairs[1::2], strict=False):
                window.merge(other)
        self.windows += [Figures() for _ in range(len(self.windows), index + 1)]
        return index

    def report(self, num_pages: int, num_replicas: int) -> list[dict[str, Any]]:
        """Return the figures by window as JSON values; unknown ones are None.

        Args:
            num_pages: pages in all pools.
            num_replicas: replica count.
        """
        width_s = self.width_s
        return [
            {
                "start_s": index * width_s,
                "waiting": each.waiting_s / width_s,
                "decoding": each.decoding_s / width_s,
                "kv_use": each.page_s / width_s / num_pages,
                "busy": each.busy_s / width_s / num_replicas,
                "requests_per_s": each.num_requests / width_s,
                "refused_per_s": each.num_refused / width_s,
                "output_tokens_per_s": each.num_output_tokens / width_s,
                "hit_rate": ratio(each.num_cached_tokens, each.num_prompt_tokens),
                "ttft_ms": milliseconds(each.ttft_s),
                "itl_ms": milliseconds(each.itl_s),
            }
            for index, each in enumerate(self.windows)
        ]


def milliseconds(values: Distribution) -> dict[str, float | None]:
    """Return the mean and percentiles in milliseconds; None without values."""
    if not values.count:
        return {"mean": None, **{f"p{percent}": None for percent in _PERCENTS}}
    percentiles = {f"p{percent}": values.percentile(percent) * 1e3 for percent in _PERCENTS}
    return {"mean": values.mean * 1e3, **percentiles}


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    """Return a ratio; None if nothing was counted."""
    return numerator / denominator if denominator else None
