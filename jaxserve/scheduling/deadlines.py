"""Deadlines of tokens, and what they leave of a step for prompts (FairBatching, arXiv 2510.14392).

The first token of a request is due its class's time to first token after its arrival, each further one its class's time
between tokens after the one before: a row that is ahead of its deadlines has slack. The least slack of the rows in
decode is the time that a step may take. Measured times of steps turn what its rows leave of that into tokens of
prompts, at least the share that is reserved for them. Requests of a class without targets have no deadlines; their
prompts take what those of higher classes leave.

A first token that comes late moves the deadlines behind it: rows that can never be in time again would otherwise slow
down prompts as long as they run. All is a function of the request and of times that come with the event of the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxserve.scheduling.choice import Timing
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_plan import StepPlan

Target = tuple[int | None, float, float]  # class (None for any other), time to first token, time between tokens


class Deadlines:
    """Deadlines of requests by their classes.

    Args:
        targets: targets of classes.
        reserved_prefill_tokens: tokens of a step that are reserved for prompts.
    """

    def __init__(self, targets: tuple[Target, ...], reserved_prefill_tokens: int) -> None:
        self._targets = {priority: (ttft_s, itl_s) for priority, ttft_s, itl_s in targets}
        self._prefill_share = reserved_prefill_tokens

    def _target(self, request: Request) -> tuple[float, float] | None:
        return self._targets.get(request.priority) or self._targets.get(None)

    def next_token_s(self, request: Request) -> float | None:
        """Return when the next token of a request is due; None if its class has no targets."""
        target = self._target(request)
        if target is None:
            return None
        first_s = request.first_due_s or request.arrival_s + target[0]
        return first_s + (request.num_tokens - request.num_prompt_tokens) * target[1]

    def max_prefill_tokens(self, plans: Sequence[StepPlan], timing: Timing | None) -> int:
        """Return the most tokens of prompts in each of some plans beside rows in decode, which these have already.

        The plans of one step share its slack: the measured time of a token is that of one more in any of them.

        Args:
            plans: plans of the rows in decode: one, or those of all shards.
            timing: times of the step; None where they are not known.
        """
        if timing is None or not self._targets:
            return sys.maxsize
        rows = [request for plan in plans for request in plan.requests]
        due = [due_s for request in rows if (due_s := self.next_due_s(request)) is not None]
        if not due:
            return sys.maxsize
        fixed_s = timing.prefill_step_s + len(rows) * timing.decode_token_s
        left_s = min(due) - timing.starts_s - fixed_s
        return max(int(left_s / max(timing.prefill_token_s, 1e-9)) // len(plans), self._prefill_share)

    def next_due_s(self, request: Request) -> float | None:
        """Return when the token that a row of a plan samples is due: it counts as computed already."""
        target, due_s = self._target(request), self.next_token_s(request)
        return None if target is None or due_s is None else due_s - target[1]

    def note_first_tokens(self, plans: Sequence[StepPlan], timing: Timing | None) -> None:
        """Note when further tokens are due of requests whose first one the plans of a step sample."""
        if timing is None or not self._targets:
            return
        ends_s = timing.starts_s + timing.prefill_step_s
        ends_s += sum(plan.num_decode_tokens for plan in plans) * timing.decode_token_s
        ends_s += sum(plan.num_prefill_tokens for plan in plans) * timing.prefill_token_s
        for request, most in (
            (row, most) for plan in plans for row, most in zip(plan.requests, plan.max_new, strict=True)
        ):
            if most and not request.first_due_s and (target := self._target(request)) is not None:
                request.first_due_s = max(request.arrival_s + target[0], ends_s)
