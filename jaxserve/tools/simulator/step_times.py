"""Step times: how long a step takes on a simulated device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
