"""Token deadlines, and the number of prompt tokens that they leave in a step (FairBatching, arXiv 2510.14392).

A request's first token is due one time-to-first-token target after its arrival, each further one an inter-token target
after the previous one. A row ahead of its deadlines has slack, and the least slack among decoding rows limits the step
time. Measured step times convert the rest of that time into prompt tokens, but never fewer than the reserved number.
Requests of a class without targets have no deadlines; their prompts take the tokens that higher classes leave.

A late first token moves the deadlines after it; otherwise rows that can never catch up would slow down prompts for as
long as they run. Everything here depends only on the request and on times recorded with the plan's event.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_plan import StepPlan, Timing

Target = tuple[int | None, float, float]  # class (None for all others), time to first token, time between tokens


class Deadlines:
    """Token deadlines of requests, from the targets of their classes.

    Args:
        targets: target times per class.
        reserved_prefill_tokens: tokens of a step that are reserved for prompts.
    """

    def __init__(self, targets: tuple[Target, ...], reserved_prefill_tokens: int) -> None:
        self._targets = {priority: (ttft_s, itl_s) for priority, ttft_s, itl_s in targets}
        self._reserved_prefill_tokens = reserved_prefill_tokens

    def _target(self, request: Request) -> tuple[float, float] | None:
        """Return the target times, in seconds, to a request's first token and between tokens; None without targets."""
        return self._targets.get(request.priority) or self._targets.get(None)

    def max_prefill_tokens(self, plans: Sequence[StepPlan], timing: Timing | None) -> int:
        """Return the maximum number of prompt tokens in each plan, alongside the decoding rows already in it.

        The plans of one step share its slack: a further token in any of them lengthens the step by the measured time.

        Args:
            plans: plans with their decoding rows: one per shard.
            timing: predicted times; None if unknown.
        """
        if timing is None or not self._targets:
            return sys.maxsize
        rows = [request for plan in plans for request in plan.requests]
        due = [due_s for request in rows if (due_s := self.next_due_s(request)) is not None]
        if not due:
            return sys.maxsize
        fixed_s = timing.prefill_step_s + len(rows) * timing.decode_token_s
        left_s = min(due) - timing.starts_s - fixed_s
        return max(int(left_s / max(timing.prefill_token_s, 1e-9)) // len(plans), self._reserved_prefill_tokens)

    def next_due_s(self, request: Request) -> float | None:
        """Return when the token that a planned row samples is due; None if its class has no targets.

        The token already counts as computed.
        """
        if (target := self._target(request)) is None:
            return None
        first_s = request.first_due_s or request.arrival_s + target[0]
        # Replays of logs need exactly this rounding.
        return first_s + (request.num_tokens - request.num_prompt_tokens) * target[1] - target[1]

    def note_first_tokens(self, plans: Sequence[StepPlan], timing: Timing | None) -> None:
        """Set the due time of each request whose first token this step samples; later deadlines follow from it."""
        if timing is None or not self._targets:
            return
        ends_s = timing.starts_s + timing.prefill_step_s
        ends_s += sum(plan.num_decode_tokens for plan in plans) * timing.decode_token_s
        ends_s += sum(plan.num_prefill_tokens for plan in plans) * timing.prefill_token_s
        for plan in plans:
            for request, max_new in zip(plan.requests, plan.max_new, strict=True):
                if max_new and not request.first_due_s and (target := self._target(request)) is not None:
                    request.first_due_s = max(request.arrival_s + target[0], ends_s)
