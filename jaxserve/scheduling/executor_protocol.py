"""Executor: the protocol between the engine core, which is plain Python, and any device that runs plans.

The `Runner` of compiled programs implements it, and so do stand-ins for a device: one that takes no time, one with
simulated time, one that checks its input.
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
    """Token counts per row and round of a step with drafts; zeros if a row did not take part.

    Attributes:
        wanted: tokens that were requested from the proposer.
        drafted: tokens that it drafted.
        accepted: drafted tokens that were accepted.
        sampled: sampled tokens, including the accepted ones.
    """

    wanted: NDArray[np.int32]  # [R, rounds]
    drafted: NDArray[np.int32]
    accepted: NDArray[np.int32]
    sampled: NDArray[np.int32]

    @classmethod
    def unpack(cls, words: NDArray[np.int32]) -> RoundCounts:
        """Return the counts in `words`: one word per row and round, packed by `verification.round_words`."""
        return cls(words >> 24, words >> 16 & 0xFF, words >> 8 & 0xFF, words & 0xFF)


@dataclass(frozen=True)
class StepResult:
    """Step results as numpy arrays; log probabilities only if the step computed them."""

    token_ids: NDArray[np.int32]  # [R, maximum tokens per row]
    num_tokens: NDArray[np.int32]  # [R]: number of valid entries in each row of `token_ids`
    ended_s: float  # time of the result on the executor's clock
    logprobs: TokenLogprobs | None = None  # [R * width of token_ids]
    prompt_logprobs: TokenLogprobs | None = None  # [T]
    rounds: RoundCounts | None = None  # counts for a step with drafts
    pooled: NDArray[np.float32] | None = None  # [R, size]: vectors for rows whose prompts are complete
    expert_tokens: NDArray[np.int32] | None = None  # [MoE layers, E]: tokens per expert; None if not counted

    def sampled(self, num_rows: int) -> list[list[int]]:
        """Return the tokens sampled by each of the first `num_rows` rows."""
        rounds = self.token_ids.shape[1]
        rows = zip(self.token_ids[:num_rows].tolist(), self.num_tokens[:num_rows].tolist(), strict=True)
        return [token_ids if count == rounds else token_ids[:count] for token_ids, count in rows]


@runtime_checkable
class StepHandle(Protocol):
    """A launched step.

    Attributes:
        launched_s: launch time on the executor's clock.
        num_compiles: number of programs compiled for it, which should be 0.
    """

    launched_s: float
    num_compiles: int

    def is_ready(self) -> bool:
        """Return whether `result` would return immediately."""

    def result(self) -> StepResult:
        """Wait for the step; return its result or raise its device error. May be called again after an interrupt."""


@runtime_checkable
class Executor(Protocol):
    """Runs plans in launch order.

    Attributes:
        schedule: sizes of steps and page pool.
    """

    schedule: ScheduleConfig
    costs: Costs

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the cheapest available program that can run a step of shape `step`; None if there is none.

        Every unsplit, single-round step without drafts has one.
        """

    def launch(self, plan: StepPlan, program: StepShape) -> StepHandle:
        """Start a plan's step, once its program is compiled; RuntimeError if that failed for good.

        Call it once per plan, before the next call into the scheduler. For a split plan it starts only the model;
        `sample` must follow before the next launch, unless the step is dropped.

        Args:
            plan: the plan.
            program: program returned by `fit` for the plan's shape.
        """

    def sample(self, step: Any) -> int:
        """Start the sampling of a split plan's step with the current constraints of its rows.

        Args:
            step: handle returned by `launch`.

        Returns:
            Number of programs compiled for it, which should be 0.
        """

    def restore_state(self) -> bool:
        """Wait for the device, create an empty state if a failed step lost it, and return whether it was lost."""

    def close(self) -> None:
        """Wait for the steps in flight, failed or not, and free the device memory."""
