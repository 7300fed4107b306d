"""Step times: how long a step takes on a simulated device."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxserve.errors import ConfigError
from jaxserve.scheduling.step_time import Rates


@runtime_checkable
class StepTimes(Protocol):
    """Predicted step times; one object serves all replicas."""

    def steps_s(self, starts: Sequence[int], counts: Sequence[int], num_steps: int = 1) -> list[float]:
        """Return the time in seconds of each of `num_steps` consecutive steps.

        Args:
            starts: tokens before the computed ones, by row; in each later step one more.
            counts: computed tokens, by row; all 1 if there are several steps.
            num_steps: number of steps.
        """


@dataclass(frozen=True)
class FittedTimes:
    """Step times from rates that were fitted to an engine's measured steps.

    Attributes:
        rates: the rates.
    """

    rates: Rates

    def steps_s(self, starts: Sequence[int], counts: Sequence[int], num_steps: int = 1) -> list[float]:
        """Return the step times; see `StepTimes`."""
        num_rows = sum([count == 1 for count in counts])
        return [self.rates.step_s(sum(counts) - num_rows, num_rows)] * num_steps


@dataclass(frozen=True)
class ProgramTimes:
    """Step times that were measured by program: a CPU's grow with the padded number of tokens.

    Attributes:
        program_s: seconds per step without attention, by the number of tokens on the program's axis, ascending.
        score_s: seconds per attention score, a pair of a computed token and one that it sees.
        context_s: seconds per token whose keys and values a row reads.
    """

    program_s: Mapping[int, float]
    score_s: float
    context_s: float

    def steps_s(self, starts: Sequence[int], counts: Sequence[int], num_steps: int = 1) -> list[float]:
        """Return the step times; see `StepTimes`."""
        sizes, num_tokens = list(self.program_s), sum(counts)
        fixed_s = self.program_s[sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)]]
        num_scores, num_read = attention_counts(starts, counts)
        first_s = fixed_s + self.score_s * num_scores + self.context_s * num_read
        later_s = self.score_s * num_tokens + self.context_s * len(counts)
        return [first_s + index * later_s for index in range(num_steps)]


def attention_counts(starts: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """Return a step's attention scores, of each computed token with itself and all tokens before it, and the number of
    tokens whose keys and values the rows read.
    """
    num_scores = sum([count * start + count * (count + 1) // 2 for start, count in zip(starts, counts, strict=True)])
    return num_scores, sum(starts) + sum(counts)


def read_step_rates(path: str) -> StepTimes:
    """Return the measured step times in a JSON file: fitted rates, or times by program.

    Raises:
        ConfigError: the file is unreadable or has other fields.
    """
    names = Rates._fields[:4]
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if "program_s" not in found:
            return FittedTimes(Rates(**{name: _seconds(value) for name, value in found.items()}))
        times = sorted((int(size), _seconds(value)) for size, value in found.pop("program_s").items())
        if not times:
            raise ValueError("program_s has no program")
        return ProgramTimes(dict(times), **{name: _seconds(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{path} must be a JSON object with {', '.join(names)} in seconds, or with program_s by number of tokens, "
            f"score_s and context_s: {error}"
        ) from error


def _seconds(value: object) -> float:
    """Return a time; ValueError for anything but a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"times must be numbers of at least 0, got {value!r}")
    return float(value)
