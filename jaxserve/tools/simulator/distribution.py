"""Distribution: percentiles of any number of values in constant memory."""

import math
from collections import Counter

_GROWTH = math.log(1.005)  # a bin's width: percentiles are within 0.25%


class Distribution:
    """Values counted in bins of equal ratio.

    Attributes:
        count: number of values.
        total: their sum.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: Counter[int] = Counter()
        self._latest, self._latest_bin = math.nan, 0

    def add(self, value: int | float, count: int = 1) -> None:
        """Count a value `count` times."""
        if value != self._latest:  # rows of a step have the same value
            self._latest = value
            self._latest_bin = round(math.log(max(value, 1e-9)) / _GROWTH)
        self._bins[self._latest_bin] += count
        self.count += count
        self.total += value * count

    def merge(self, other: "Distribution") -> None:
        """Count another distribution's values, too."""
        self._bins.update(other._bins)
        self.count += other.count
        self.total += other.total

    @property
    def mean(self) -> float:
        """Mean value; NaN without values."""
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: int | float) -> float:
        """Return the value below or at which `percent` of all values are; NaN without values."""
        left = math.ceil(self.count * percent / 100)
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return math.exp(index * _GROWTH)
        return math.nan
