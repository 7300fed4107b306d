"""StepPlanner: makes a step's plan from one token budget: preemption by class, then decode, then prompts.

Budget. Decoding rows get one token each; prompts get the rest, see `prefill`. If that leaves prompts fewer than
`reserved_prefill_tokens`, some decoding rows are held back: they get left-over budget, and otherwise take turns to miss
a step. This happens only if max_num_batched_tokens is less than 8/7 of max_num_seqs; in all other cases no decoding row
ever waits.

Progress. A decoding row without a page preempts the last admitted request, which has no row in the plan yet because
decoding rows are planned in admission order; if it is the last itself, it is preempted. A row in prefill takes only
unneeded pages or pages of younger rows in prefill. The oldest running request still ends after finitely many steps, and
then every other request in turn:

- A decoding request gets its page in any step, because it fits the pool by itself. If it is held back, its turn comes
  again within as many steps as there are slots, and at least one decoding row is never held back.
- A request in prefill lacks pages only while decoding rows own them or have the last free ones reserved. Without
  decoding rows it takes all free pages, then the pages of other rows in prefill, and it fits the pool by itself. Nobody
  is admitted while it lacks pages, so the number of decoding rows falls: the oldest of them preempts only younger ones
  and ends after finitely many steps. Its pages go to the oldest prompt first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.encoder_cache import EncoderCache
from jaxserve.scheduling.shard import Shard
from jaxserve.scheduling.step_plan import StepChoice, StepPlan


class StepPlanner:
    """Makes the plans of a step: one per shard, and all agree on the number of steps.

    Args:
        shards: all shards.
        balancer: queue in front of the shards.
        deadlines: token deadlines, with slack shared by all shards.
        encoder: the encoder cache.
    """

    def __init__(
        self, shards: Sequence[Shard], balancer: Balancer, deadlines: Deadlines, encoder: EncoderCache
    ) -> None:
        self._shards, self._balancer, self._deadlines, self._encoder = shards, balancer, deadlines, encoder

    def make(self, step_id: int, choice: StepChoice) -> list[StepPlan]:
        """Return the next plan for each shard, possibly without rows.

        Args:
            step_id: number of the plan.
            choice: limits of the plan.
        """
        self._balancer.dispatch()
        plans = [StepPlan(step_id) for _ in self._shards]
        parts = list(zip(self._shards, plans, strict=True))
        for shard, plan in parts:
            shard.preempt_lower_classes(plan)
        limits = self._agree(choice)
        for shard, plan in parts:
            shard.decode(plan, limits)
        max_prefill_tokens = self._deadlines.max_prefill_tokens(plans, choice.timing)
        decode_waits = any(shard.decode_waits for shard in self._shards)
        num_tokens = max(plan.num_tokens for plan in plans)
        if num_tokens and choice.max_prefill_tokens is not None:
            max_prefill_tokens = min(max_prefill_tokens, max(choice.max_prefill_tokens, 1))
        plans[0].encoder_runs += self._encoder.advance(num_tokens, max_prefill_tokens, decode_waits=decode_waits)
        first = step_id % len(parts)  # shards take turns to be the first to encode images, as they share a step's limit
        for shard, plan in [*parts[first:], *parts[:first]]:
            shard.fill(plan, max_prefill_tokens)
        plans[0].encoder_runs += self._encoder.begin_next()
        self._deadlines.note_first_tokens(plans, choice.timing)
        return plans

    def _agree(self, choice: StepChoice) -> StepChoice:
        """Return `choice`, reduced to the steps, drafts and split that every shard with requests can plan."""
        max_steps, num_drafts, may_split = choice.max_steps, choice.num_drafts, choice.may_split
        if max_steps == 1 and not num_drafts and not may_split:
            return choice
        num_steps = self._feasible_steps(max_steps, num_drafts) if num_drafts else 0
        if not num_steps:
            if num_drafts:  # `max_steps` are rounds: no program may run several steps without drafts for so many rows
                num_drafts, max_steps = (), 1
            num_steps = self._feasible_steps(max_steps) if max_steps > 1 else 1
        may_split = may_split and bool(self._feasible_steps(1))
        return choice._replace(max_steps=max(num_steps, 1), num_drafts=num_drafts, may_split=may_split)

    def _feasible_steps(self, limit: int, num_drafts: Sequence[int] = ()) -> int:
        """Return the number of decode steps that one plan of every shard with requests may have; 0 if none.

        Args:
            limit: maximum number of steps.
            num_drafts: number of tokens to draft by slot; empty for a plan without drafts.
        """
        busy = [shard.decodes for shard in self._shards if not shard.view.is_idle]
        num_steps = min(limit, max((decodes.steps_left(num_drafts) for decodes in busy), default=0))
        has_queue = self._balancer.num_queued > 0
        for decodes in busy:
            num_steps = decodes.feasible_steps(num_steps, num_drafts, has_queue=has_queue) if num_steps else 0
        return num_steps


def join(plans: Sequence[StepPlan], num_shard_pages: int) -> StepPlan:
    """Return one plan with the rows of all shards, one shard after another.

    Args:
        plans: one plan per shard, possibly without rows.
        num_shard_pages: pages per shard.
    """
    joined = StepPlan(plans[0].step_id)
    for index, part in enumerate(plans):
        joined.preempted += part.preempted
        joined.num_pages_used += part.num_pages_used
        joined.encoder_runs += part.encoder_runs
        if not part.requests:
            continue
        for name in (
            "requests",
            "slots",
            "starts",
            "counts",
            "max_new",
            "admitted",
            "grown",
            "adapter_loads",
        ):
            getattr(joined, name).extend(getattr(part, name))
        first_page = index * num_shard_pages
        joined.copies += [(first_page + source, first_page + target) for source, target in part.copies]
        for name in ("num_decode_tokens", "num_prefill_tokens", "cached_tokens", "num_sought_tokens"):
            setattr(joined, name, getattr(joined, name) + getattr(part, name))
        joined.wants_logprobs |= part.wants_logprobs
        joined.wants_prompt_logprobs |= part.wants_prompt_logprobs
        joined.is_split |= part.is_split
        joined.num_steps = max(joined.num_steps, part.num_steps)
    joined.num_uneven_tokens = max(part.num_tokens for part in plans) * len(plans) - joined.num_tokens
    return joined
