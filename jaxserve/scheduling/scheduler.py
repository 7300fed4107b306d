"""Decides which request computes which tokens in the next step, from one token budget.

There are no phases: every request has `num_computed_tokens` of `num_tokens`, and a step gives it some more until they
meet, which samples one further token. Chunked prefill, prefix-cache hits and recompute after preemption are that one
case. The scheduler is a pure function of its state and the order of calls: no clock, no randomness.

One request. `add` queues it in the `Ledger`. Each `schedule` has `Planning` make a plan: rows in decode (`Decodes`),
then prompts and requests that start (`Prefills`). `update` has `Updates` append what a plan has sampled, and end the
requests of which that was the last; `finish` ends others. All change requests through the `Ledger`, which alone moves
them between queue, slots and pages.

Step-ahead. Plan n + 1 may be made before the tokens of plan n are read, so `schedule()` already counts the tokens that
a plan computes, and `num_pending_tokens` counts those sampled but not read. The caller promises one thing: every plan
is packed before the next call into the scheduler, the device runs all plans in order, and `update()` gets them in that
order. Then what a request frees can be handed out at once, although a step in flight may still write to it:

- Pages. The next owner computes the page's positions in a later step, thus after that write.
- Slots. The next owner is marked `admitted` in a later plan and from then on sets every position that it reads.

Shared pages. A page is registered in the prefix cache when all its ids are known and all its positions are in plans
made, or in rows already in the plan being made: those of a prompt at once, those of an output some at a time, and what
is left when its request stops. A request that finds a page attends to it in that same plan at the earliest, and
`ragged_paged_attention` writes all new keys and values of a step before any row of the step attends: the page is
complete before its content is read. Steps in flight write nothing but this content to it. A row of a plan keeps its
pages while the plan is made, so that no page registered by it can be handed to another row of the same step.

Waiting. A request whose `waits_for_tokens` is set samples when the host has read its last token: it is BLOCKED from a
plan that samples for it to the update of that plan, keeps slot and pages, and others go on meanwhile. It may take part
in a split plan, whose sampling starts behind that update, though its last token is computed before, unless tokens may
be appended behind that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError
from jaxserve.kv_cache.groups import KVGroups
from jaxserve.kv_cache.transfers import Tier
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.admission import Admission
from jaxserve.scheduling.choice import ONE_STEP, StepChoice
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.planning import Planning
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import Prefills
from jaxserve.scheduling.updates import Updates

if TYPE_CHECKING:
    from jaxserve.schedule_config import ScheduleConfig


class Scheduler:
    """Continuous batching over a page pool.

    Args:
        max_num_seqs: rows in a step and requests running at once.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`.
        groups: groups of layers with pages of their own.
        num_pages: pages in the pool.
        max_model_len: limit on a request's prompt and output tokens together.
        policy: order of requests, and a prompt's share of a step; None is the default for the budget.
        num_spare_tokens: tokens that a row with drafts may compute, and not keep, beyond those it may sample.
        first_slot: number of the first slot.
        tiers: tiers of pages below device memory.

    Attributes:
        groups: groups of layers with pages of their own.
        policy: order of requests, and a prompt's share of a step.
        num_spare_tokens: tokens that a row with drafts may compute, and not keep, beyond those it may sample.
        deadlines: deadlines of tokens.
        admission: answers to a load balancer; another object after `restart`.
        planning: parts of a plan, for a scheduler of several shards; another object after `restart`.
        watcher: function called after every change of what `admission` answers, but for `add`.
        num_schedules: calls of `schedule`.
        num_cache_resets: calls of `reset_prefix_cache` and `restart`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        groups: KVGroups,
        num_pages: int,
        max_model_len: int,
        policy: Policy | None = None,
        num_spare_tokens: int = 0,
        first_slot: int = 0,
        tiers: Sequence[Tier] = (),
    ):
        assert max_num_batched_tokens >= max_num_seqs, "all rows in decode must fit one step; the config checks it"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.page_size = groups.page_size
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.num_schedules = 0
        self.num_cache_resets = 0
        self.watcher: Callable[[], None] | None = None
        self.groups = groups
        self.num_spare_tokens = num_spare_tokens
        self._first_slot = first_slot
        self._tiers, self._keys = tiers, count()
        self.policy = policy or Policy.of(max_num_batched_tokens)
        self.deadlines = Deadlines(self.policy.targets, self.policy.prefill_share)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._next_step_id = 0
        self._last_updated_step_id = -1
        self._clear()

    def _clear(self) -> None:
        self._requests.clear()
        self._ledger = Ledger(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            groups=self.groups,
            num_pages=self.num_pages,
            weights=dict(self.policy.weights),
            first_slot=self._first_slot,
            tiers=self._tiers,
            keys=self._keys,
        )
        self._prefills = Prefills(self._ledger, self.policy)
        self.planning = Planning(self._ledger, self.policy, self._prefills, self.num_spare_tokens)
        self._updates = Updates(self._ledger, self._prefills)
        self.admission = Admission(self._ledger, self._prefills)

    @classmethod
    def of(cls, schedule: ScheduleConfig, first_slot: int = 0) -> Scheduler:
        """Return a scheduler of these sizes, whose slots are numbered from `first_slot` on."""
        return cls(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            groups=schedule.kv_groups,
            num_pages=schedule.num_pages,
            max_model_len=schedule.max_total_tokens,
            policy=schedule.policy,
            num_spare_tokens=schedule.num_spare_drafts,
            first_slot=first_slot,
        )

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of one prompt in a step."""
        return self.max_num_batched_tokens

    @property
    def num_waiting(self) -> int:
        """Requests without pages and slot, new or preempted."""
        return len(self._ledger.waiting)

    @property
    def first_waiting_priority(self) -> int:
        """Highest class of a waiting request; below all if none waits."""
        waiting = self._ledger.waiting
        return waiting.first_priority if waiting else sys.maxsize

    @property
    def num_deferred(self) -> int:
        """Waiting requests that wait for a prompt with which they share a prefix, not for slots or pages."""
        return self._prefills.num_held

    @property
    def num_running(self) -> int:
        """Requests with pages and a slot."""
        return len(self._ledger.running)

    @property
    def num_even_rows(self) -> int:
        """Running requests, if each shard had as many as the fullest; here there is one."""
        return self.num_running

    @property
    def running_slots(self) -> list[int]:
        """Slots of the running requests, in the order of admission."""
        return [request.slot for request in self._ledger.running.values()]

    @property
    def waiting_slots(self) -> list[int]:
        """Slots of the running requests whose every token must be read before the next is sampled."""
        return [request.slot for request in self._ledger.running.values() if request.waits_for_tokens]

    @property
    def has_split_rows(self) -> bool:
        """True if a running request can compute a token before it is read, but not sample the next."""
        rows = self._ledger.running.values()
        return any(request.waits_for_tokens and not request.may_be_extended for request in rows)

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests own; the others are free or can be evicted."""
        return self._ledger.num_pages_used

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens that were sampled for requests that had ended, since the last restart."""
        return self._updates.num_wasted_tokens

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self._requests)

    # Events

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: the id is in use, or the request could not run to its end even alone.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id must be unique among unfinished requests, got {request.request_id!r} again; "
                "use another id, or abort the request that has it"
            )
        self.check_fits(request)
        self._requests[request.request_id] = request
        self._ledger.enqueue(request)

    def check_fits(self, request: Request) -> None:
        """Raise RequestError where a request could not run to its end even alone."""
        num_prompt, max_total = request.num_prompt_tokens, request.max_total_tokens
        if not 0 < num_prompt < max_total <= self.max_model_len:
            raise RequestError(
                "a prompt must have at least 1 token and fewer than max_total_tokens <= max_model_len, "
                f"got {num_prompt} prompt tokens, max_total_tokens {max_total} and max_model_len {self.max_model_len}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        num_needed = self.groups.num_pages(max_total - 1)  # the last token is never computed
        if num_needed > self.num_pages:
            raise RequestError(
                f"a request must fit the page pool: {num_prompt} prompt tokens and up to {max_total - num_prompt} new "
                f"ones need {num_needed} pages of {self.page_size} tokens, but there are {self.num_pages}; "
                "lower max_tokens, shorten the prompt or raise num_pages"
            )

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request in whatever state it is; None when no unfinished request has this id.

        Frees its pages and slot. Tokens of it that are still on the device will be dropped by `update()`.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._updates.end(request, reason)
            self._notify()
        return request

    def withdraw(self, requests: Iterable[Request] | None = None) -> list[Request]:
        """Forget requests that wait and return them in their order, for another scheduler to take.

        Those with tokens on the device stay: what there is to compute of them is not known yet.

        Args:
            requests: waiting requests; None for all.
        """
        waiting = self._ledger.waiting.in_order() if requests is None else requests
        withdrawn = [request for request in waiting if not request.num_pending_tokens]
        for request in withdrawn:
            self._ledger.dequeue(request)
            self._prefills.forget(request)
            del self._requests[request.request_id]
        self._notify()
        return withdrawn

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, as after a change of weights.

        Running requests keep their pages, but no one else will find what they compute on top of them.
        """
        self.num_cache_resets += 1
        self._ledger.store.reset(self._ledger.running.values())
        self._notify()

    def transferred(self, keys: Sequence[int], *, ok: bool) -> None:
        """Take the end of moves of pages between tiers; those from before a restart are ignored.

        Args:
            keys: their numbers.
            ok: False if their content is lost.
        """
        self._ledger.store.transferred(keys, ok=ok)
        self._notify()

    def restart(self) -> None:
        """Go on as a new scheduler would: nothing is cached, and whatever broke off has left nothing behind.

        All requests have been ended.
        """
        self.num_cache_resets += 1
        for tier in self._tiers:
            tier.clear()
        self._clear()
        self._notify()

    def _notify(self) -> None:
        if self.watcher is not None:
            self.watcher()

    # One step

    @property
    def wants_logprobs(self) -> bool:
        """True if a running request wants log probabilities of its samples."""
        return any(request.params.logprobs is not None for request in self._ledger.running.values())

    def schedule(self, choice: StepChoice = ONE_STEP) -> StepPlan | None:
        """Plan the next step, or up to `choice.max_steps` at once; None when nothing can run.

        None while requests are unfinished means that their next tokens depend on plans not yet updated.
        """
        max_steps, num_drafts, timing, may_split = choice
        self.num_schedules += 1
        planning = self.planning
        plan = planning.begin(self._next_step_id)
        num_steps = 0
        if num_drafts:
            num_steps = planning.most_steps(min(max_steps, planning.steps_left(num_drafts)), num_drafts)
        if not num_steps:
            if num_drafts:  # `max_steps` are rounds: no program may go several steps without drafts for so many rows
                num_drafts, max_steps = (), 1
            num_steps = planning.most_steps(min(max_steps, planning.steps_left())) if max_steps > 1 else 1
        decoded = planning.decode(plan, max(num_steps, 1), num_drafts, may_split=may_split)
        filled = planning.fill(decoded, self.deadlines.most_prefill_tokens([plan], timing))
        self.deadlines.note_first_tokens([plan], timing)
        self._next_step_id += filled is not None
        self._notify()
        return filled

    def update(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Take the token ids that each row of `plan` has sampled, as many as the device came to.

        Returns the requests that they ended. Ids behind the one that ended a request are deleted from its list, as are
        all of a request that had ended before.
        """
        assert plan.step_id > self._last_updated_step_id, "plans must be updated once each, in order"
        self._last_updated_step_id = plan.step_id
        ended = self._updates.take(plan, sampled)
        for request in ended:
            del self._requests[request.request_id]
        self._notify()
        return ended

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request all of whose samples were read.

        They are computed like those of a prompt. Returns them up to the one that ended the request.
        """
        request = self._requests[request_id]
        taken = self._updates.extend(request, token_ids)
        if request.status is RequestStatus.FINISHED:
            del self._requests[request_id]
        return taken

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is where its status says."""
        self._ledger.check_integrity()
        self._prefills.check_integrity()
        waiting = {request.request_id for request in self._ledger.waiting}
        assert self._requests.keys() == self._ledger.running.keys() | waiting
