"""Decides which request computes which tokens in the next step, from one token budget.

There are no phases: every request has `num_computed_tokens` of `num_tokens`, and a step gives it some more until they
meet, which samples one further token. Chunked prefill, prefix-cache hits and recompute after preemption are that one
case. The scheduler is a pure function of its state and the order of calls: no clock, no randomness.

The budget. Rows in decode come first, with a token each; then prompts, as the module `prefill` says. Where that would
leave prompts less than `prefill_share` of the budget, some rows in decode are held back: they get what the prompts did
not need, and otherwise take turns to miss a step. That can only be where max_num_batched_tokens is less than 8/7 of
max_num_seqs; everywhere else no row in decode ever waits.

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

States. Layers without attention keep a state of a sequence in its slot, which goes on from zeros, or from a snapshot
that an earlier plan took behind a cached page. A snapshot is taken inside a row's tokens, at the last full page of its
prompt, or where others were seen to begin alike though there was none.

KV groups. Layers of one kind have pages of their own, and a sequence a page in each group for each `page_size` tokens.
A sequence releases the pages of a group with a sliding window that its next token does not see any more, before it gets
a row in a plan: `Ledger.release_unseen`. Steps in flight may still read them, and the next owner writes to them later.

Upper bounds. What the device computes may be less than was planned: it stops a row with its last token, and goes on
with the others. `num_computed_tokens` counts what plans allow for, `update()` takes back what did not happen. A plan
made meanwhile needs no condition: a row that has stopped computes nothing in it, and one that goes on is where the plan
has it at most, for which its pages were allocated. Of a prompt, all that was planned is computed. Of an output, all but
the last known token are computed for certain, because each token is sampled from the one before; only pages of these
are registered.

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

Waiting. A request whose `waits_for_tokens` is set samples when the host has read its last token: it is BLOCKED from a
plan that samples for it to the update of that plan, keeps slot and pages, and others go on meanwhile. It may take part
in a split plan, whose sampling starts behind that update, though its last token is computed before, unless tokens may
be appended behind that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.errors import RequestError
from jaxserve.kv_cache.groups import KVGroups
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.admission import Admission
from jaxserve.scheduling.classes import make_room
from jaxserve.scheduling.deadlines import Deadlines, Timing
from jaxserve.scheduling.decode import Decodes, may_sample_late
from jaxserve.scheduling.ledger import RUNS, Ledger
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import Prefills

if TYPE_CHECKING:
    from jaxserve.schedule_config import ScheduleConfig


class Decoded(NamedTuple):
    """A plan with its rows in decode, which lacks those in prefill.

    Attributes:
        plan: the plan.
        num_displaced: rows preempted for requests of higher classes.
        held_back: rows in decode that get what prompts leave.
        in_prefill: running rows between two chunks.
        beside_decode: True if any row in decode waits for the step.
    """

    plan: StepPlan
    num_displaced: int
    held_back: list[Request]
    in_prefill: list[Request]
    beside_decode: bool


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

    Attributes:
        groups: groups of layers with pages of their own.
        policy: order of requests, and a prompt's share of a step.
        num_spare_tokens: tokens that a row with drafts may compute, and not keep, beyond those it may sample.
        num_wasted_tokens: tokens that were sampled for requests that had ended.
        deadlines: deadlines of tokens.
        admission: answers to a load balancer; another object after `restart`.
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
    ):
        assert max_num_batched_tokens >= max_num_seqs, "all rows in decode must fit one step; the config checks it"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.page_size = groups.page_size
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.num_wasted_tokens = 0
        self.num_schedules = 0
        self.num_cache_resets = 0
        self.watcher: Callable[[], None] | None = None
        self.groups = groups
        self.num_spare_tokens = num_spare_tokens
        self._first_slot = first_slot
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
        )
        self._columns_at_once = self._ledger.columns_at_once
        self._decodes = Decodes(self._ledger, self.policy, self.num_spare_tokens)
        self._prefills = Prefills(self._ledger, self.policy)
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
        return self.num_pages - self._ledger.num_available

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
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)
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
        self._ledger.cache.reset()
        self._ledger.unshared.update(self._ledger.running.values())
        self._notify()

    def restart(self) -> None:
        """Go on as a new scheduler would: nothing is cached, and whatever broke off has left nothing behind.

        All requests have been ended.
        """
        self.num_cache_resets += 1
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

    def schedule(
        self,
        max_steps: int = 1,
        num_drafts: Sequence[int] = (),
        timing: Sequence[float] = (),
        *,
        may_split: bool = False,
    ) -> StepPlan | None:
        """Plan the next step, or up to `max_steps` at once; None when nothing can run.

        None while requests are unfinished means that their next tokens depend on plans not yet updated.

        Args:
            max_steps: most steps, or rounds with drafts.
            num_drafts: tokens to draft by slot, where all rows are in decode; empty for a plan without drafts.
            timing: the fields of a `Timing`, by which rows in decode get their tokens in time; empty if not known.
            may_split: True if a plan of one step without drafts may be split for rows that wait for tokens.
        """
        plan = self.begin()
        num_steps = self.most_steps(min(max_steps, self.steps_left(num_drafts)), num_drafts) if num_drafts else 0
        if not num_steps:
            num_drafts = ()
            num_steps = self.most_steps(min(max_steps, self.steps_left())) if max_steps > 1 else 1
        decoded = self.decode(plan, max(num_steps, 1), num_drafts, may_split=may_split)
        times = Timing(*timing) if timing else None
        filled = self.fill(decoded, self.deadlines.most_prefill_tokens([plan], times))
        self.deadlines.note_first_tokens([plan], times)
        return filled

    def begin(self) -> StepPlan:
        """Begin a plan: rows give way to waiting requests of higher classes."""
        self.num_schedules += 1
        if self._ledger.cache.snapshots is not None:
            self._ledger.cache.snapshots.begin_plan()
        plan = StepPlan(self._next_step_id)
        make_room(self._ledger, self.policy, plan)
        return plan

    def most_steps(self, limit: int, num_drafts: Sequence[int] = ()) -> int:
        """Return the most steps that the plan begun may have; see `Decodes.most_steps`."""
        return self._decodes.most_steps(limit, num_drafts)

    def steps_left(self, num_drafts: Sequence[int] = ()) -> int:
        """Return the steps until all running rows have ended; see `Decodes.steps_left`."""
        return self._decodes.steps_left(num_drafts)

    def decode(
        self, plan: StepPlan, num_steps: int, num_drafts: Sequence[int] = (), *, may_split: bool = False
    ) -> Decoded:
        """Give rows in decode `num_steps` steps of the plan begun, at most what `most_steps` allows; see `schedule`."""
        num_displaced = len(plan.preempted)
        rows = self._ledger.running.values()
        plan.num_steps = num_steps
        plan.is_split = may_split and self._decodes.most_steps(1) > 0 and any(map(may_sample_late, rows))
        held_back = self._decodes.rows_to_hold_back()
        in_prefill_before = self._decodes.schedule(plan, held_back, num_drafts)
        beside_decode = bool(plan.num_rows or held_back) or any(row.status is RequestStatus.BLOCKED for row in rows)
        return Decoded(plan, num_displaced, held_back, in_prefill_before, beside_decode)

    def fill(self, decoded: Decoded, most_prefill_tokens: int) -> StepPlan | None:
        """Return the plan with rows in prefill of so many tokens at most; None if it has no rows."""
        plan = decoded.plan
        self._prefills.schedule(
            plan,
            decoded.in_prefill,
            beside_decode=decoded.beside_decode,
            num_displaced=decoded.num_displaced,
            most_tokens=most_prefill_tokens,
        )
        if decoded.held_back:
            self._decodes.schedule_held_back(plan, decoded.held_back)
        self._notify()
        if not plan.requests:
            return None
        self._next_step_id += 1
        if plan.num_steps > 1 and not plan.num_drafts:
            plan.num_steps = max(plan.max_new)
        plan.slots = [request.slot for request in plan.requests]
        plan.num_pages_used = self.num_pages_used
        return plan

    def update(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Take the token ids that each row of `plan` has sampled, as many as the device came to.

        Returns the requests that they ended. Ids behind the one that ended a request are deleted from its list, as are
        all of a request that had ended before.
        """
        assert plan.step_id > self._last_updated_step_id, "plans must be updated once each, in order"
        self._last_updated_step_id = plan.step_id
        ended: list[Request] = []
        running = RequestStatus.RUNNING
        for request, most, token_ids in zip(plan.requests, plan.max_new, sampled, strict=True):
            output = request.output_token_ids
            if most == len(token_ids) == 1:
                token_id, is_quiet = token_ids[0], len(output) < request.quiet_outputs
                if is_quiet and token_id not in request.stop_ids:  # nearly always: the shortest way
                    output.append(token_id)
                    continue
                if request.status is running:
                    output.append(token_id)
                    self._review(request)
                    if request.status is not running:
                        ended.append(request)
                    continue
            assert len(token_ids) <= most, f"a row that may sample {most} tokens cannot have sampled {len(token_ids)}"
            if request.status is RequestStatus.FINISHED:
                self.num_wasted_tokens += len(token_ids)
                token_ids.clear()
                continue
            if most > len(token_ids):
                self._take_back(request, most - len(token_ids))
            if request.status is RequestStatus.BLOCKED and request.num_pending_tokens == len(token_ids):
                request.status = RequestStatus.RUNNING
            del token_ids[self._append(request, token_ids) :]
            if request.status is RequestStatus.FINISHED:
                ended.append(request)
        self._notify()
        return ended

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request all of whose samples were read.

        They are computed like those of a prompt. Returns them up to the one that ended the request.
        """
        request, ledger = self._requests[request_id], self._ledger
        assert not request.num_pending_tokens, "samples in flight come first"
        output = request.output_token_ids
        for num_taken, token_id in enumerate(token_ids, start=1):
            if request.status in RUNS:
                output.append(token_id)
                ledger.num_prefill_tokens += 1
            else:
                ledger.uncount(request)
                output.append(token_id)
                ledger.count(request)
            if token_id in request.stop_ids or len(output) > request.quiet_outputs:
                self._review(request)
                if request.status is RequestStatus.FINISHED:
                    return list(token_ids[:num_taken])
        return list(token_ids)

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is where its status says."""
        self._ledger.check_integrity()
        self._prefills.check_integrity()
        waiting = {request.request_id for request in self._ledger.waiting}
        assert self._requests.keys() == self._ledger.running.keys() | waiting

    # Parts of update()

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """Count tokens that the device did not come to as not computed."""
        if request.status in RUNS:
            request.num_computed_tokens -= num_tokens
            request.quiet_until = 0
        else:
            self._ledger.uncount(request)
            request.num_tokens_when_preempted -= num_tokens
            self._ledger.count(request)

    def _append(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append tokens until one ends the request; returns how many those are."""
        output = request.output_token_ids
        for num_taken, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            if token_id in request.stop_ids or len(output) > request.quiet_outputs:
                self._review(request)
                if request.status is RequestStatus.FINISHED:
                    self.num_wasted_tokens += len(token_ids) - num_taken
                    return num_taken
        return len(token_ids)

    def _review(self, request: Request) -> None:
        """Look at a request whose last token may end it or come behind full pages that are registered together."""
        output, num_prompt, page_size = request.output_token_ids, len(request.prompt_token_ids), self.page_size
        num_known, max_total, columns = num_prompt + len(output), request.max_total_tokens, self._columns_at_once
        shift = request.slot % columns  # rows that began together take turns
        num_full = ((num_known - 1) // page_size + shift) // columns * columns - shift
        if num_full * page_size == num_known - 1 <= request.num_computed_tokens:
            self._ledger.register_columns(request, num_full)
        if not request.waits_for_tokens:
            behind_pages = (num_full + columns) * page_size + 1
            request.quiet_outputs = (behind_pages if behind_pages < max_total else max_total) - num_prompt - 1
        if output[-1] in request.stop_ids and _may_stop(request):
            self._end(request, FinishReason.STOP)
        elif num_known == max_total:
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status in RUNS:
            self._ledger.stop(request)
        else:
            self._ledger.dequeue(request)
            self._prefills.forget(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_tokens_when_preempted = request.quiet_outputs = 0


def _may_stop(request: Request) -> bool:
    """Return whether the token just appended may end the request."""
    # The device masks stop ids for the first min_tokens tokens, so that the first that may end a request follows those.
    return len(request.output_token_ids) > request.params.min_tokens
