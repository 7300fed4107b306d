"""Scheduler: decides which request computes which tokens in the next step, within one token budget.

There are no phases: every request has `num_computed_tokens` out of `num_tokens`, and each step computes more until both
are equal, which samples one further token. Chunked prefill, prefix-cache hits and recomputation after preemption are
all this one case. The scheduler is a pure function of its state and the order of calls: no clock, no randomness.

One request. `add` queues it in the `Ledger`. Each `schedule` makes a plan (`StepPlanner`): decoding rows
(`DecodePlanner`), then prompts and new requests (`PrefillPlanner`, `StartPlanner`). `update` appends the sampled tokens
of a plan and ends finished requests (`RequestUpdater`); `finish` ends others. Only the `Ledger` moves requests between
queue, slots and pages.

Shards. With data-parallel attention, a shard's devices hold only the keys and values of its own rows, and a step gives
each shard an equal part of the token axis. Each `Shard` therefore has its own ledger, and their plans are joined, one
shard's rows after another's. A `Balancer` gives each request to a shard that can start it.

Step-ahead. Plan n + 1 may be made before the tokens of plan n are read. `schedule()` therefore already counts a plan's
tokens as computed, and `num_pending_tokens` counts tokens sampled but not read. The caller guarantees one thing: every
plan is packed before the next call into the scheduler, the device runs all plans in order, and `update()` receives them
in that order. Resources freed by a request can then be reused immediately, although a step in flight may still write to
them:

- Pages. The next owner computes the page's positions in a later step, after that write.
- Slots. The next owner is `admitted` in a later plan and then sets every position that it reads.

Shared pages. A page is registered in the prefix cache when all its ids are known and all its positions are in plans
already made, or in rows already in the current plan: prompt pages immediately, output pages several together, and the
rest when the request stops. A request that finds a page attends to it in that same plan at the earliest, and
`ragged_paged_attention` writes all new keys and values of a step before any row attends: the page is complete before it
is read. Steps in flight write only this same content to it. A planned row keeps its pages while the plan is made, so no
page that it registered can move to another row of the same step.

Waiting. A request with `waits_for_tokens` samples only after the host has read its last token: it is BLOCKED from a
plan that samples for it until that plan's update, keeps its slot and pages, and others continue meanwhile. It may take
part in a split plan, which computes its last token before that update and samples after it, unless tokens may be
appended to the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError
from jaxserve.scheduling.adapter_slots import AdapterSlots
from jaxserve.scheduling.balancer import Balancer
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.encoder_cache import EncoderCache
from jaxserve.scheduling.even_chunks import EvenChunks
from jaxserve.scheduling.kv_cache.page_events import PageEvents
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages
from jaxserve.scheduling.kv_cache.transfers import Requested, Transfers
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.planning import StepPlanner, join
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.row_turns import RowTurns
from jaxserve.scheduling.shard import Shard
from jaxserve.scheduling.shard_view import ShardView
from jaxserve.scheduling.step_plan import ONE_STEP, StepChoice, StepPlan

if TYPE_CHECKING:
    from jaxserve.scheduling.schedule_config import ScheduleConfig


class Rows:
    """Running rows of all shards, with the properties that limit the next plan."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    @property
    def _all(self) -> Iterator[Request]:
        """Running requests, by shard and admission."""
        return (request for shard in self._shards for request in shard.ledger.running.values())

    @property
    def num_even(self) -> int:
        """Number of rows if each shard had as many as the fullest."""
        return len(self._shards) * max([len(shard.ledger.running) for shard in self._shards])

    @property
    def slots(self) -> list[int]:
        """Slots of all rows, by shard and admission."""
        return [request.slot for request in self._all]

    @property
    def waiting_slots(self) -> list[int]:
        """Slots of the rows that sample only after their last token is read."""
        return [request.slot for request in self._all if request.waits_for_tokens]

    @property
    def has_split(self) -> bool:
        """True if a row can compute a token before it is read, but not sample the next one."""
        return any(request.waits_for_tokens and not request.may_be_extended for request in self._all)

    @property
    def wants_logprobs(self) -> bool:
        """True if any row requests log probabilities."""
        return any(request.params.logprobs is not None for request in self._all)


class Scheduler:
    """Continuous batching over the page pools of one or several shards.

    Args:
        sizes: sizes of steps and page pool.
        policy: order of requests and chunk sizes; None for the policy in `sizes`.
        tiers: page tiers below device memory, for a single shard.
        events: where changes of the prefix cache are noted; None if nobody wants them.

    Attributes:
        sizes: sizes of steps and page pool.
        policy: order of requests and chunk sizes.
        max_prompt_tokens: maximum tokens of one prompt in a step.
        adapters: slots of LoRA adapters.
        encoder: the encoder cache, which has images' embeddings.
    """

    def __init__(
        self,
        sizes: ScheduleConfig,
        policy: Policy | None = None,
        tiers: Sequence[StoredPages] = (),
        events: PageEvents | None = None,
    ) -> None:
        self.events = events
        self.sizes, self._shard_sizes = sizes, sizes.shard_config
        self.max_prompt_tokens = self._shard_sizes.max_num_batched_tokens
        self.policy = policy or self._shard_sizes.policy
        self._transfers = Transfers(tiers)
        self.adapters = AdapterSlots(sizes.max_loras)
        max_whole = self._shard_sizes.max_num_batched_tokens - self._shard_sizes.max_num_seqs
        self.encoder = EncoderCache(sizes.num_encoder_rows, max_whole if sizes.sees_images else None, self._shard_sizes)
        turns, chunks = partial(RowTurns, sizes.row_turns), EvenChunks(self._shard_sizes, sizes.smallest_chunk)
        self.shards = [
            Shard(partial(self._new_ledger, first_slot), self.policy, sizes.num_spare_drafts, turns, chunks)
            for first_slot in range(0, sizes.max_num_seqs, self._shard_sizes.max_num_seqs)
        ]
        self.rows = Rows(self.shards)
        self._balancer = Balancer(self.shards, dict(self.policy.weights))
        deadlines = Deadlines(self.policy.targets, self.policy.reserved_prefill_tokens)
        self._planning = StepPlanner(self.shards, self._balancer, deadlines, self.encoder)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._parts: dict[int, list[StepPlan]] = {}  # plans in flight, one per shard, by step id
        self._next_step_id = 0
        self._last_updated_step_id = -1

    def _new_ledger(self, first_slot: int) -> Ledger:
        """Return an empty ledger for a shard whose slots begin at `first_slot`."""
        sizes = self._shard_sizes
        store = PageStore(sizes.num_pages, sizes.kv_groups, self._transfers)
        store.events = self.events
        return Ledger(sizes, store, dict(self.policy.weights), first_slot, self.adapters, self.encoder)

    @property
    def view(self) -> ShardView:
        """Read-only answers for a balancer of several replicas with one shard each; replaced by `restart`."""
        return self.shards[0].view

    @property
    def running(self) -> list[Request]:
        """Requests with pages and a slot, by shard and admission."""
        return [request for shard in self.shards for request in shard.ledger.running.values()]

    @property
    def waiting(self) -> list[Request]:
        """Requests without pages and slot: by class, by tenant, in the order of arrival."""
        return [*self._balancer.queued, *(request for shard in self.shards for request in shard.ledger.waiting)]

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot, new or preempted."""
        return self._balancer.num_queued + sum(len(shard.ledger.waiting) for shard in self.shards)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens known to be uncomputed in waiting requests; callable on any thread."""
        return self._balancer.num_queued_tokens + sum(shard.ledger.num_waiting_tokens for shard in self.shards)

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that are held back until a running prompt has computed their common prefix."""
        return self._balancer.num_deferred + sum(shard.starts.num_held for shard in self.shards)

    @property
    def num_running(self) -> int:
        return sum([len(shard.ledger.running) for shard in self.shards])

    @property
    def num_pages_used(self) -> int:
        """Number of pages owned by running requests; the others are free or evictable."""
        return sum(shard.ledger.num_pages_used for shard in self.shards)

    @property
    def num_wasted_tokens(self) -> int:
        """Number of tokens sampled for requests that had already ended, since the last restart."""
        return sum(shard.updates.num_wasted_tokens for shard in self.shards)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # Events

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: the id is in use, or the request could not finish even by itself.
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
        """Raise RequestError if a request could not finish even by itself."""
        num_prompt, max_total = request.num_prompt_tokens, request.max_total_tokens
        longest, groups = self.sizes.max_total_tokens, self._shard_sizes.kv_groups
        if not 0 < num_prompt < max_total <= longest:
            raise RequestError(
                "a prompt must have at least 1 token and fewer than max_total_tokens <= max_model_len, "
                f"got {num_prompt} prompt tokens, max_total_tokens {max_total} and max_model_len {longest}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        self.encoder.check_fits(request)
        num_needed = groups.num_pages(max_total - 1, num_prompt)  # the last token is never computed
        num_pages = self._shard_sizes.num_pages
        if num_needed > num_pages:
            raise RequestError(
                f"a request must fit the page pool: {num_prompt} prompt tokens and up to {max_total - num_prompt} new "
                f"ones need {num_needed} pages of {groups.page_size} tokens, but there are {num_pages}; "
                "lower max_tokens, shorten the prompt or raise num_pages"
            )

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request in any state; return None if no unfinished request has this id.

        Frees its pages and slot. `update()` drops its tokens that are still on the device.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._balancer.finish(request, reason)
        return request

    def withdraw(self) -> list[Request]:
        """Remove and return the waiting requests in order, for another scheduler.

        Requests with tokens on the device stay, because their uncomputed tokens are not known yet.
        """
        withdrawn = self._balancer.queued + [request for shard in self.shards for request in shard.withdraw()]
        for request in withdrawn:
            self._balancer.finish(request)
            del self._requests[request.request_id]
        return withdrawn

    def reset_prefix_cache(self, *, with_adapters: bool = False) -> None:
        """Forget all cached pages and images. Running requests keep their pages, but no other request will find them.

        Args:
            with_adapters: True to load idle adapters again, too: their scales depend on the weights, and a loss of
                device memory takes them.
        """
        if with_adapters:
            self.adapters.forget_idle()
        self.encoder.forget()
        for shard in self.shards:
            shard.reset_prefix_cache()

    def transferred(self, keys: Sequence[int], *, ok: bool) -> None:
        """Make the pages usable whose moves between tiers have ended; moves from before a restart are ignored.

        Args:
            keys: keys of the moves.
            ok: False if their content is lost.
        """
        for shard in self.shards:
            shard.transferred(keys, ok=ok)

    def found(self, tier: int, present: Sequence[PageKey], absent: Sequence[PageKey]) -> None:
        """Note which pages a lower tier was found to have; see `Transfers.found`."""
        self._transfers.found(tier, present, absent)

    @property
    def has_moves(self) -> bool:
        """True if page moves were requested that have not started; callable from any thread."""
        return self._transfers.has_requested

    def take_kept_states(self) -> list[tuple[int, int]]:
        """Return the copies of recurrent states, as (slot, page), that must precede the step planned last."""
        return self._transfers.take_kept_states()

    def take_moves(self) -> Requested:
        """Return the page moves requested since the last call; they start after the step that was planned meanwhile."""
        return self._transfers.take_requested()

    def restart(self) -> None:
        """Return to the initial state after a failure: forget all requests (which have ended), plans and pages."""
        self._transfers.restart()
        self.adapters.restart()
        self.encoder.restart()
        if self.events is not None:
            self.events.cleared()
        for shard in self.shards:
            shard.restart()
        self._balancer.restart()
        self._requests.clear()
        self._parts.clear()

    # One step

    def schedule(self, choice: StepChoice = ONE_STEP) -> StepPlan | None:
        """Plan the next dispatch, with up to `choice.max_steps` steps; None if nothing can run.

        None while requests are unfinished means that their next tokens depend on plans not yet updated.
        """
        if choice.loads is not None:  # else the last ones hold for the next arrivals
            self._transfers.use_costs(choice.loads, self._shard_sizes.kv_groups)
        parts = self._planning.make(self._next_step_id, choice)
        plan = parts[0] if len(parts) == 1 else join(parts, self._shard_sizes.num_pages)
        if not plan.requests:
            self.encoder.unsent += plan.encoder_runs
            return None
        self._parts[self._next_step_id] = parts
        self._next_step_id += 1
        return plan

    def update(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Append the token ids that a plan's rows have sampled to their requests, and return the requests that ended.

        Args:
            plan: oldest plan that was not updated.
            sampled: token ids per row, possibly fewer than planned. Ids after a request's end are deleted from its
                list, as are all ids of a request that had already ended.
        """
        assert plan.step_id > self._last_updated_step_id, "plans must be updated once each, in order"
        self._last_updated_step_id = plan.step_id
        ended: list[Request] = []
        first, parts = 0, self._parts.pop(plan.step_id)
        for shard, part in zip(self.shards, parts, strict=True):
            if part.requests:
                stop = first + len(part.requests)
                shard.turns.ended(plan.step_id)
                ended += shard.updates.take(part, sampled[first:stop] if len(parts) > 1 else sampled)
                shard.changes.note()
                first = stop
        for request in ended:
            self._forget(request)
        return ended

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request without samples in flight; return the appended ones.

        They are computed like prompt tokens. The request may end at one of them; further ones are not appended.
        """
        request = self._requests[request_id]
        taken = self.shards[self._balancer.locate(request)].updates.extend(request, token_ids)
        if request.status is RequestStatus.FINISHED:
            self._forget(request)
        return taken

    def _forget(self, request: Request) -> None:
        """Remove a request that an update has ended from all collections."""
        del self._requests[request.request_id]
        self._balancer.finish(request)

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is in the right collection."""
        held = [*self._balancer.queued]
        for index, shard in enumerate(self.shards):
            shard.check_integrity()
            on_shard = [*shard.ledger.running.values(), *shard.ledger.waiting]
            assert {request.request_id for request in on_shard} == set(self._balancer.ids_on(index))
            held += on_shard
        assert self._requests == {request.request_id: request for request in held}
        self.adapters.check_integrity(self.running)
        self.encoder.check_integrity(self.running)
        self._balancer.check_integrity(self._requests)
