"""Deltas: news of requests, from the core to the frontend. They are values: the core keeps nothing that is in them.

A sample is known by the key of its request, which the frontend has given it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.scheduling.executor import StepResult
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.step_plan import StepPlan, wants_prompt_logprobs


class Admitted(NamedTuple):
    """A sample got a slot."""

    key: int
    num_cached_tokens: int  # prompt tokens that were found in the cache
    num_preemptions: int  # times that it has lost its slot before


class Ended(NamedTuple):
    """A sample has ended."""

    key: int
    reason: FinishReason
    num_preemptions: int = 0


class PromptShare(NamedTuple):
    """Tokens of a row whose successors in the prompt have log probabilities."""

    key: int
    start: int  # position of the first token
    num_tokens: int
    first: int  # first token on the token axis of the step


@dataclass(frozen=True, slots=True)
class StepDelta:
    """New tokens of a step's rows.

    Attributes:
        keys: sample of each row.
        token_ids: new tokens of each row, up to one that ended it.
        ended: samples that these tokens ended, by row.
        prompt_shares: rows whose prompt tokens' log probabilities are wanted.
        result: results of the device.
    """

    keys: Sequence[int]
    token_ids: Sequence[list[int]]
    ended: Mapping[int, Ended]
    prompt_shares: Sequence[PromptShare]
    result: StepResult

    @classmethod
    def from_plan(
        cls, plan: StepPlan, token_ids: Sequence[list[int]], ended: Collection[Request], result: StepResult
    ) -> StepDelta:
        """Return the news of a plan; see `StepTokens`."""
        by_row: dict[int, Ended] = {}
        if ended:
            reasons = {request: request.finish_reason for request in ended}
            rows = enumerate(plan.requests)
            by_row = {
                row: Ended(each.key, reason, each.num_preemptions)
                for row, each in rows
                if (reason := reasons.get(each)) is not None
            }
        shares = [] if result.prompt_logprobs is None else _prompt_shares(plan)
        return cls([request.key for request in plan.requests], token_ids, by_row, shares, result)


def _prompt_shares(plan: StepPlan) -> list[PromptShare]:
    shares, first = [], 0
    for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
        if wants_prompt_logprobs(request, start):
            shares.append(PromptShare(request.key, start, count, first))
        first += count
    return shares


@dataclass(frozen=True, slots=True)
class Delta:
    """News of requests.

    Attributes:
        at_s: the time of the news.
        admitted: samples that got a slot.
        step: new tokens of a step, and the samples that they ended.
        ended: samples that ended otherwise.
        error: exception that ended those; None where they were cancelled.
    """

    at_s: float
    admitted: Sequence[Admitted] = ()
    step: StepDelta | None = None
    ended: Sequence[Ended] = ()
    error: BaseException | None = None
