"""Deltas: request changes sent from the core to the frontend as values that the core does not keep.

A sample is identified by its request's key, which the frontend has assigned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.step_plan import StepPlan, wants_prompt_logprobs


class Admitted(NamedTuple):
    """A sample got a slot."""

    key: int
    cached_tokens: CachedTokens  # prompt tokens found in the cache
    num_preemptions: int  # earlier preemptions


class Ended(NamedTuple):
    """A sample has ended."""

    key: int
    reason: FinishReason
    num_preemptions: int = 0


class PromptChunk(NamedTuple):
    """Prompt tokens in a row whose successors need log probabilities."""

    key: int
    start: int  # position of the first token
    num_tokens: int
    first: int  # index on the token axis


@dataclass(frozen=True, slots=True)
class StepDelta:
    """New tokens in a step.

    Attributes:
        keys: request key per row.
        token_ids: new tokens per row, up to one that ended it.
        ended: samples ended by these tokens, by row.
        prompt_chunks: rows with requested prompt log probabilities.
        result: device results.
        energy_j: energy of each row's request so far; empty without a meter.
    """

    keys: Sequence[int]
    token_ids: Sequence[list[int]]
    ended: Mapping[int, Ended]
    prompt_chunks: Sequence[PromptChunk]
    result: StepResult
    energy_j: Sequence[float] = ()

    @classmethod
    def from_plan(
        cls,
        plan: StepPlan,
        token_ids: Sequence[list[int]],
        ended: Collection[Request],
        result: StepResult,
        *,
        is_metered: bool = False,
    ) -> StepDelta:
        """Return the new tokens and ends after a plan's step.

        Args:
            plan: plan of the step.
            token_ids: new tokens per row, up to one that ended it.
            ended: requests ended by these tokens.
            result: device results.
            is_metered: True if requests have their energy.
        """
        by_row: dict[int, Ended] = {}
        if ended:
            reasons = {request: request.finish_reason for request in ended}
            for row, request in enumerate(plan.requests):
                if (reason := reasons.get(request)) is not None:
                    by_row[row] = Ended(request.key, reason, request.num_preemptions)
        chunks = [] if result.prompt_logprobs is None else _prompt_chunks(plan)
        energy_j = [request.energy_j for request in plan.requests] if is_metered else ()
        return cls([request.key for request in plan.requests], token_ids, by_row, chunks, result, energy_j)


def _prompt_chunks(plan: StepPlan) -> list[PromptChunk]:
    """Return the chunks of a plan's rows with requested prompt log probabilities."""
    chunks, first = [], 0
    for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
        if wants_prompt_logprobs(request, start):
            chunks.append(PromptChunk(request.key, start, count, first))
        first += count
    return chunks


@dataclass(frozen=True, slots=True)
class Delta:
    """Request changes.

    Attributes:
        at_s: time of all changes.
        admitted: samples that got a slot.
        step: new tokens in a step, and the samples that they ended.
        ended: samples that ended for other reasons.
        error: exception that ended those; None if they were cancelled.
    """

    at_s: float
    admitted: Sequence[Admitted] = ()
    step: StepDelta | None = None
    ended: Sequence[Ended] = ()
    error: BaseException | None = None
