"""Histogram: counts by bucket, for Prometheus, and the buckets that vLLM's metrics have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

# fmt: off
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)
# fmt: on
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_buckets(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, as far as they are at most the length of the model's sequences."""
    values = (float(step * 10**power) for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(value for value in values if value <= most)


class Histogram:
    """Counts by bucket. It takes a number several times at once, in a fraction of a microsecond.

    Args:
        name: name of the metric.
        text: description of the metric.
        bounds: upper bounds of the buckets, which a last one without bound follows.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float | int]) -> None:
        self._name, self._text, self._bounds = name, text, list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float | int, times: int = 1) -> None:
        """Count a number so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Mapping[str, str]) -> Metric:
        """Return the metric for Prometheus."""
        return histogram_family(self._name, self._text, self._bounds, self._counts, self._sum, labels)


def histogram_family(
    name: str,
    text: str,
    bounds: Sequence[float | int],
    counts: Sequence[int],
    total: float | int,
    labels: Mapping[str, str],
) -> Metric:
    """Return a histogram for Prometheus.

    Args:
        name: name of the metric.
        text: description of the metric.
        bounds: upper bounds of the buckets.
        counts: numbers counted in each bucket, and in the one without bound; missing ones are 0.
        total: sum of all that was counted.
        labels: labels and their values.
    """
    family = HistogramMetricFamily(name, text, labels=list(labels))
    ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    padded = [*counts, *[0] * (len(ends) - len(counts))]
    family.add_metric(list(labels.values()), list(zip(ends, accumulate(padded), strict=True)), total)
    return family
