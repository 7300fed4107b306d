"""Planning: makes the plan of a step from one token budget: rows give way, then decode, then prompts fill it.

The budget. Rows in decode come first, with a token each; then prompts, as the module `prefill` says. Where that would
leave prompts less than `reserved_prefill_tokens`, some rows in decode are held back: they get what the prompts did
not need, and otherwise take turns to miss a step. That can only be where max_num_batched_tokens is less than 8/7 of
max_num_seqs; everywhere else no row in decode ever waits.

Progress. A row in decode that lacks a page preempts the last admitted, which has no row in the plan yet, because rows
in decode enter it in the order of admission; if that is itself, it gives way. A row in prefill takes only pages that
nobody needs, or those of younger rows in prefill. Still the oldest running request ends after finitely many steps, and
with it, one after the other, every request:

- In decode it gets its page in any step, for alone it fits the pool. If others are held back before it, it is its turn
  again after as many steps as there are slots; and at least one row in decode is never held back.
- In prefill it lacks pages only while there are rows in decode that own them, or for which the last free ones are kept:
  without any, it takes all that are free, and then those of all others in prefill, and alone it fits the pool. While it
  lacks them nobody is admitted, so that those rows get fewer: by the same argument the oldest of them, who preempts
  only younger ones, ends after finitely many steps. What they leave goes to the oldest prompt first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.choice import StepChoice
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.shard import Shard
from jaxserve.scheduling.step_plan import StepPlan


class Planning:
    """Makes plans. The shards of a step have one each, and agree on how far it may go.

    Args:
        shards: all shards.
        balancer: queue before the shards.
        deadlines: deadlines of tokens, whose slack the shards share.
    """

    def __init__(self, shards: Sequence[Shard], balancer: Balancer, deadlines: Deadlines) -> None:
        self._shards, self._balancer, self._deadlines = shards, balancer, deadlines

    def make(self, step_id: int, choice: StepChoice) -> list[StepPlan]:
        """Return the plan of each shard, some or all of them without rows."""
        self._balancer.dispatch()
        plans = [StepPlan(step_id) for _ in self._shards]
        parts = list(zip(self._shards, plans, strict=True))
        for shard, plan in parts:
            shard.preempt_lower_classes(plan)
        limits = self._agree(choice)
        for shard, plan in parts:
            shard.decode(plan, limits)
        max_prefill_tokens = self._deadlines.max_prefill_tokens(plans, choice.timing)
        for shard, plan in parts:
            shard.fill(plan, max_prefill_tokens)
        self._deadlines.note_first_tokens(plans, choice.timing)
        return plans

    def _agree(self, choice: StepChoice) -> StepChoice:
        """Return the limits of the choice, as far as every shard with requests can come to them."""
        max_steps, num_drafts, timing, may_split = choice
        if max_steps == 1 and not num_drafts and not may_split:
            return choice
        num_steps = self._feasible_steps(max_steps, num_drafts) if num_drafts else 0
        if not num_steps:
            if num_drafts:  # `max_steps` are rounds: no program may go several steps without drafts for so many rows
                num_drafts, max_steps = (), 1
            num_steps = self._feasible_steps(max_steps) if max_steps > 1 else 1
        return StepChoice(max(num_steps, 1), num_drafts, timing, may_split and bool(self._feasible_steps(1)))

    def _feasible_steps(self, limit: int, num_drafts: Sequence[int] = ()) -> int:
        """Return the most steps that the plans of all shards with requests may have; see `Decodes.feasible_steps`."""
        busy = [shard.decodes for shard in self._shards if not shard.admission.is_idle]
        num_steps = min(limit, max((decodes.steps_left(num_drafts) for decodes in busy), default=0))
        has_queue = self._balancer.num_queued > 0
        for decodes in busy:
            num_steps = decodes.feasible_steps(num_steps, num_drafts, has_queue=has_queue) if num_steps else 0
        return num_steps


def join(plans: Sequence[StepPlan], num_shard_pages: int) -> StepPlan:
    """Return the plan of all rows: those of one shard after those of another.

    Args:
        plans: plans of all shards, some or all of them without rows.
        num_shard_pages: pages of each shard.
    """
    joined = StepPlan(plans[0].step_id)
    for index, part in enumerate(plans):
        joined.preempted += part.preempted
        joined.num_pages_used += part.num_pages_used
        if not part.requests:
            continue
        for name in ("requests", "slots", "starts", "counts", "max_new", "admitted", "grown"):
            getattr(joined, name).extend(getattr(part, name))
        first_page = index * num_shard_pages
        joined.copies += [(first_page + source, first_page + target) for source, target in part.copies]
        for name in ("num_decode_tokens", "num_prefill_tokens", "num_cached_tokens"):
            setattr(joined, name, getattr(joined, name) + getattr(part, name))
        joined.wants_logprobs |= part.wants_logprobs
        joined.wants_prompt_logprobs |= part.wants_prompt_logprobs
        joined.is_split |= part.is_split
        joined.num_steps = max(joined.num_steps, part.num_steps)
    most = max(part.num_tokens for part in plans)
    joined.num_uneven_tokens = most * len(plans) - joined.num_tokens
    return joined
