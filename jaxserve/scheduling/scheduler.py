"""Decides which request computes which tokens in the next step, from one token budget.

There are no phases: every request has `num_computed_tokens` of `num_tokens`, and a step gives it some more until they
meet, which samples one further token. Chunked prefill, prefix-cache hits and recompute after preemption are that one
case. The scheduler is a pure function of its state and the order of calls: no clock, no randomness.

One request. `add` queues it in the `Ledger`. Each `schedule` has `Planning` make a plan: rows in decode (`Decodes`),
then prompts and requests that start (`Prefills`, `Starts`). `update` has `Updates` append what a plan has sampled, and
end the requests of which that was the last; `finish` ends others. All change requests through the `Ledger`, which alone
moves them between queue, slots and pages.

Shards. Where attention is data parallel, the devices of a shard have the keys and values of its rows alone, and a step
gives each shard an equal share of the token axis. So each `Shard` has a ledger of its own, and their plans are joined:
the rows of one shard follow those of another. A `Balancer` gives each request to the shard that can start it.

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

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError
from jaxserve.scheduling.admission import Admission
from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.choice import ONE_STEP, StepChoice
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.kv_cache.transfers import Tier, Transfers
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.planning import Planning, join
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.shard import Shard
from jaxserve.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from jaxserve.scheduling.schedule_config import ScheduleConfig


class Rows:
    """Running rows of all shards, as they decide what the next plan may be.

    Args:
        shards: all shards.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    @property
    def _all(self) -> Iterator[Request]:
        return (request for shard in self._shards for request in shard.ledger.running.values())

    @property
    def num_even(self) -> int:
        """Number of rows if each shard had as many as the fullest."""
        return len(self._shards) * max([len(shard.ledger.running) for shard in self._shards])

    @property
    def slots(self) -> list[int]:
        """Slots of all rows, in the order of admission."""
        return [request.slot for request in self._all]

    @property
    def waiting_slots(self) -> list[int]:
        """Slots of the rows whose every token must be read before the next is sampled."""
        return [request.slot for request in self._all if request.waits_for_tokens]

    @property
    def has_split(self) -> bool:
        """True if a row can compute a token before it is read, but not sample the next."""
        return any(request.waits_for_tokens and not request.may_be_extended for request in self._all)

    @property
    def wants_logprobs(self) -> bool:
        """True if a row wants log probabilities of its samples."""
        return any(request.params.logprobs is not None for request in self._all)


class Scheduler:
    """Continuous batching over the page pools of one shard or several.

    Args:
        sizes: sizes of steps and pool.
        policy: order of requests, and a prompt's share of a shard's step; None for the policy of the sizes.
        tiers: tiers of pages below device memory, of a single shard.

    Attributes:
        sizes: sizes of steps and pool.
        policy: order of requests, and a prompt's share of a shard's step.
        max_prompt_tokens: most tokens of one prompt in a step.
        shards: all shards.
        rows: running rows.
    """

    def __init__(self, sizes: ScheduleConfig, policy: Policy | None = None, tiers: Sequence[Tier] = ()) -> None:
        self.sizes, self._shard_sizes = sizes, sizes.shard_config
        self.max_prompt_tokens = self._shard_sizes.max_num_batched_tokens
        self.policy = policy or self._shard_sizes.policy
        self._tiers, self._move_keys = tiers, count()
        self.shards = [
            Shard(partial(self._new_ledger, first_slot), self.policy, sizes.num_spare_drafts)
            for first_slot in range(0, sizes.max_num_seqs, self._shard_sizes.max_num_seqs)
        ]
        self.rows = Rows(self.shards)
        self._balancer = Balancer(self.shards, dict(self.policy.weights))
        self._planning = Planning(
            self.shards, self._balancer, Deadlines(self.policy.targets, self.policy.reserved_prefill_tokens)
        )
        self._requests: dict[str, Request] = {}  # waiting and running
        self._parts: dict[int, list[StepPlan]] = {}  # plans of all shards in flight, by id
        self._next_step_id = 0
        self._last_updated_step_id = -1

    def _new_ledger(self, first_slot: int) -> Ledger:
        sizes, transfers = self._shard_sizes, Transfers(self._tiers, self._move_keys)
        store = PageStore(sizes.num_pages, sizes.kv_groups, transfers)
        return Ledger(sizes, store, dict(self.policy.weights), first_slot)

    @property
    def admission(self) -> Admission:
        """Answers to a balancer of several replicas, whose rows are not divided; another object after `restart`."""
        return self.shards[0].admission

    @property
    def running(self) -> list[Request]:
        """Requests with pages and a slot, shard by shard in the order of admission."""
        return [request for shard in self.shards for request in shard.ledger.running.values()]

    @property
    def waiting(self) -> list[Request]:
        """Requests without: by class, by tenant, in the order of arrival."""
        return [*self._balancer.queued, *(request for shard in self.shards for request in shard.ledger.waiting)]

    @property
    def num_waiting(self) -> int:
        """Requests without pages and slot, new or preempted."""
        return self._balancer.num_queued + sum(len(shard.ledger.waiting) for shard in self.shards)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that these have to compute, as far as is known; on any thread."""
        return self._balancer.num_queued_tokens + sum(shard.ledger.num_waiting_tokens for shard in self.shards)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that wait for a prompt with which they share a prefix, not for slots or pages."""
        return self._balancer.num_deferred + sum(shard.starts.num_held for shard in self.shards)

    @property
    def num_running(self) -> int:
        """Requests with pages and a slot."""
        return sum([len(shard.ledger.running) for shard in self.shards])

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests own; the others are free or can be evicted."""
        return sum(shard.ledger.num_pages_used for shard in self.shards)

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens that were sampled for requests that had ended, since the last restart."""
        return sum(shard.updates.num_wasted_tokens for shard in self.shards)

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
        self._balancer.add([request])

    def check_fits(self, request: Request) -> None:
        """Raise RequestError where a request could not run to its end even alone."""
        num_prompt, max_total = request.num_prompt_tokens, request.max_total_tokens
        longest, groups = self.sizes.max_total_tokens, self._shard_sizes.kv_groups
        if not 0 < num_prompt < max_total <= longest:
            raise RequestError(
                "a prompt must have at least 1 token and fewer than max_total_tokens <= max_model_len, "
                f"got {num_prompt} prompt tokens, max_total_tokens {max_total} and max_model_len {longest}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        num_needed = groups.num_pages(max_total - 1)  # the last token is never computed
        num_pages = self._shard_sizes.num_pages
        if num_needed > num_pages:
            raise RequestError(
                f"a request must fit the page pool: {num_prompt} prompt tokens and up to {max_total - num_prompt} new "
                f"ones need {num_needed} pages of {groups.page_size} tokens, but there are {num_pages}; "
                "lower max_tokens, shorten the prompt or raise num_pages"
            )

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request in whatever state it is; None when no unfinished request has this id.

        Frees its pages and slot. Tokens of it that are still on the device will be dropped by `update()`.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._balancer.finish(request, reason)
        return request

    def withdraw(self) -> list[Request]:
        """Forget the requests that wait and return them in their order, for another scheduler to take.

        Those with tokens on the device stay: what there is to compute of them is not known yet.
        """
        withdrawn = self._balancer.queued + [request for shard in self.shards for request in shard.withdraw()]
        for request in withdrawn:
            self._balancer.finish(request)
            del self._requests[request.request_id]
        return withdrawn

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, as after a change of weights.

        Running requests keep their pages, but no one else will find what they compute on top of them.
        """
        for shard in self.shards:
            shard.reset_prefix_cache()

    def transferred(self, keys: Sequence[int], *, ok: bool) -> None:
        """Take the end of moves of pages between tiers; those from before a restart are ignored.

        Args:
            keys: their numbers.
            ok: False if their content is lost.
        """
        for shard in self.shards:
            shard.transferred(keys, ok=ok)

    def restart(self) -> None:
        """Go on as a new scheduler would: nothing is cached, and whatever broke off has left nothing behind.

        All requests have been ended.
        """
        for tier in self._tiers:
            tier.restart()
        for shard in self.shards:
            shard.restart()
        self._balancer.restart()
        self._requests.clear()
        self._parts.clear()

    # One step

    def schedule(self, choice: StepChoice = ONE_STEP) -> StepPlan | None:
        """Plan the next step, or up to `choice.max_steps` at once; None when nothing can run.

        None while requests are unfinished means that their next tokens depend on plans not yet updated.
        """
        parts = self._planning.make(self._next_step_id, choice)
        plan = parts[0] if len(parts) == 1 else join(parts, self._shard_sizes.num_pages)
        if not plan.requests:
            return None
        self._parts[self._next_step_id] = parts
        self._next_step_id += 1
        return plan

    def update(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Take the token ids that each row of `plan` has sampled, as many as the device came to.

        Returns the requests that they ended. Ids behind the one that ended a request are deleted from its list, as are
        all of a request that had ended before.
        """
        assert plan.step_id > self._last_updated_step_id, "plans must be updated once each, in order"
        self._last_updated_step_id = plan.step_id
        ended: list[Request] = []
        first, parts = 0, self._parts.pop(plan.step_id)
        for shard, part in zip(self.shards, parts, strict=True):
            if part.requests:
                stop = first + len(part.requests)
                ended += shard.updates.take(part, sampled[first:stop] if len(parts) > 1 else sampled)
                shard.changes.note()
                first = stop
        for request in ended:
            self._forget(request)
        return ended

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request all of whose samples were read.

        They are computed like those of a prompt. Returns them up to the one that ended the request.
        """
        request = self._requests[request_id]
        taken = self.shards[self._balancer.locate(request)].updates.extend(request, token_ids)
        if request.status is RequestStatus.FINISHED:
            self._forget(request)
        return taken

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._balancer.finish(request)

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is where its status says."""
        held = [*self._balancer.queued]
        for index, shard in enumerate(self.shards):
            shard.check_integrity()
            own = [*shard.ledger.running.values(), *shard.ledger.waiting]
            assert {request.request_id for request in own} == set(self._balancer.ids_on(index))
            held += own
        assert self._requests == {request.request_id: request for request in held}
        self._balancer.check_integrity(self._requests)
