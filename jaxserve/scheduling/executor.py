"""Executor: what runs plans. The protocol between the engine's core, which is plain Python, and any device.

The `Runner` of compiled programs implements it, and whatever stands in for a device: one that takes no time, one whose
time is computed, one that checks what it is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepPlan, StepShape

if TYPE_CHECKING:
    from jaxserve.execution.sampling import TokenLogprobs


class RoundCounts(NamedTuple):
    """Tokens of each row in each round of a step with drafts; zeros where a row did not take part.

    Attributes:
        wanted: tokens that were to be drafted.
        drafted: tokens drafted: fewer where a proposer found none.
        accepted: drafted tokens that were accepted.
        sampled: tokens sampled, the accepted ones among them.
    """

    wanted: NDArray[np.int32]  # [R, rounds]
    drafted: NDArray[np.int32]
    accepted: NDArray[np.int32]
    sampled: NDArray[np.int32]

    @classmethod
    def unpack(cls, words: NDArray[np.int32]) -> RoundCounts:
        """Return the counts of a word per row and round, as `verification.round_words` packs them."""
        return cls(words >> 24, words >> 16 & 0xFF, words >> 8 & 0xFF, words & 0xFF)


@dataclass(frozen=True)
class StepResult:
    """Results of a step, as numpy arrays; log probabilities only where the step computed them."""

    token_ids: NDArray[np.int32]  # [R, most tokens of a row]
    num_tokens: NDArray[np.int32]  # [R]: of `token_ids`, those that a row sampled
    ended_s: float  # time of the result, by the executor's clock
    logprobs: TokenLogprobs | None = None  # [R * columns of token_ids]
    prompt_logprobs: TokenLogprobs | None = None  # [T]
    rounds: RoundCounts | None = None  # counts of a step with drafts
    pooled: NDArray[np.float32] | None = None  # [R, size]: vectors of rows whose prompts are computed
    expert_tokens: NDArray[np.int32] | None = None  # [mixtures, E]: tokens of each expert; None if not counted

    def sampled(self, num_rows: int) -> list[list[int]]:
        """Return the tokens that each of the first rows sampled."""
        rounds = self.token_ids.shape[1]
        rows = zip(self.token_ids[:num_rows].tolist(), self.num_tokens[:num_rows].tolist(), strict=True)
        return [token_ids if count == rounds else token_ids[:count] for token_ids, count in rows]


@runtime_checkable
class StepHandle(Protocol):
    """A launched step.

    Attributes:
        launched_s: time of the launch, by the executor's clock.
        num_compiles: programs that were compiled for it, which should be none.
    """

    launched_s: float
    num_compiles: int

    def is_ready(self) -> bool:
        """Return whether `result` would return at once."""

    def result(self) -> StepResult:
        """Wait for the step. Raises whatever the device reports; interrupted, it can be waited for again."""


@runtime_checkable
class Executor(Protocol):
    """Runs plans in the order of their launches.

    Attributes:
        schedule: sizes of steps and pool.
        costs: costs of steps.
    """

    schedule: ScheduleConfig
    costs: Costs

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the cheapest program that can run a step of this shape now; None if there is none.

        Every step without drafts, of one round, that is not split, has one.
        """

    def launch(self, plan: StepPlan, program: StepShape) -> StepHandle:
        """Start the step that `plan` describes, once its program is there; RuntimeError if it never will be.

        To be called once per plan, before the scheduler is asked for more. Of a split plan it starts the model alone;
        `sample` must follow before the next launch, unless the step is dropped.
        """

    def sample(self, step: Any) -> int:
        """Start the sampling of a split plan, by the constraints of its rows as they are now.

        Returns the number of programs that were compiled for it, which should be none.
        """

    def restore_state(self) -> bool:
        """Wait for the device; where its state was lost with a step that failed, make an empty one.

        Returns whether it was lost.
        """

    def close(self) -> None:
        """Wait for the steps in flight, whether they fail or not, and free the device's memory."""
