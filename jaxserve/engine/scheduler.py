"""Decides which request computes which tokens in the next step, from one token budget.

There are no phases: every request has `num_computed_tokens` of `num_tokens`, and a step gives it some more until they
meet, which samples one further token. Chunked prefill, prefix-cache hits and recompute after preemption are that one
case. The scheduler is a pure function of its state and the order of calls: no clock, no randomness.

The budget. Rows in decode come first, with a token each; then rows in prefill, oldest first, then new requests, each
with as much of its prompt as the budget leaves. Where that would leave prompts less than `prefill_share` of the budget,
some rows in decode are held back: they get what the prompts did not need, and otherwise take turns to miss a step. That
can only be where max_num_batched_tokens is less than 8/7 of max_num_seqs; everywhere else no row in decode ever waits.

Step-ahead. Plan n + 1 may be made before the tokens of plan n are read, so `schedule()` already counts the tokens that
a plan computes, and `num_pending_tokens` counts those sampled but not read. The caller promises one thing: every plan
is packed before the next call into the scheduler, the device runs all plans in order, and `update()` gets them in that
order. Then what a request frees can be handed out at once, although a step in flight may still write to it:

- Pages. The next owner computes the page's positions in a later step, thus after that write.
- Slots. The next owner is marked `admitted` in a later plan and from then on sets every position that it reads.

Shared pages. A page is registered in the prefix cache as soon as all its ids are known and all its positions are in
plans made, or in rows already in the plan being made. A request that finds it attends to it in that same plan at the
earliest, and `ragged_paged_attention` writes all new keys and values of a step before any row of the step attends: the
page is complete before its content is read. Steps in flight write nothing but this content to it. A row of a plan
keeps its pages while the plan is made, so that no page registered by it can be handed to another row of the same step.
A chunk that does not complete its prefill takes the rest of the budget. So no sibling is admitted while the pages of
its prompt are only partly planned, and a prefix is computed once however many requests begin with it.

Upper bounds. What the device computes may be less than was planned: it stops a row with its last token, and goes on
with the others. `num_computed_tokens` counts what plans allow for, `update()` takes back what did not happen. A plan
made meanwhile needs no condition: a row that has stopped computes nothing in it, and one that goes on is where the plan
has it at most, for which its pages were allocated. Of a prompt, all that was planned is computed. Of an output, all but
the last known token are computed for certain, because each token is sampled from the one before; only pages of these
are registered.

Waiting. A request whose `waits_for_tokens` is set goes on when the host has read its last token: it is BLOCKED from a
plan that samples for it to the update of that plan, keeps slot and pages, and others go on meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxserve.config import ScheduleConfig, prefill_share
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.plan import StepPlan, wants_prompt_logprobs
from jaxserve.engine.prefix_cache import PrefixCache
from jaxserve.errors import RequestError
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.router import ROW_CHARGE_TOKENS

_RUNS = (RequestStatus.RUNNING, RequestStatus.BLOCKED)  # has pages and a slot


class Scheduler:
    """Continuous batching over a page pool: first come, first served; the last admitted is the first preempted.

    At most one request is between two chunks of its prefill at a time, and it is the last admitted: a chunk
    that does not complete a prefill takes the rest of the budget. So a preemption on behalf of a prefill can only hit
    that prefill itself, and no row in decode ever loses its pages because of one.

    Args:
        max_num_seqs: rows in a step and requests running at once.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`.
        page_size: tokens per page.
        num_pages: pages in the pool.
        max_model_len: limit on a request's prompt and output tokens together.

    Attributes:
        num_wasted_tokens: tokens that were sampled for requests that had ended.
        num_schedules: calls of `schedule`.
        num_cache_resets: calls of `reset_prefix_cache`.
    """

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, page_size: int, num_pages: int, max_model_len: int
    ):
        assert max_num_batched_tokens >= max_num_seqs, "all rows in decode must fit one step; the config checks it"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.num_wasted_tokens = 0
        self._cache = PrefixCache(PagePool(num_pages), page_size)
        self._requests: dict[str, Request] = {}  # waiting and running
        # Ordered by arrival, the preempted in front. Not a deque: an abort in the middle takes constant time.
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}  # in order of admission
        self._decode_limit = max_num_batched_tokens - prefill_share(max_num_batched_tokens)  # while prompts wait
        self._next_held_slot = 0  # where the turn of rows in decode begins that are held back next
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._unshared: set[Request] = set()  # running since before the last reset of the prefix cache
        self.num_schedules = 0
        self.num_cache_resets = 0
        # The load, kept up to date by every event so that routers read it in constant time.
        self._num_prefill_tokens = 0  # that running rows have to compute beyond one each
        self._num_growing = 0  # running rows that may need a further page
        self._num_waiting_tokens = 0  # that waiting requests have to compute, as far as is known
        self._num_waiting_pages = 0  # that the start of all waiting requests takes
        self._next_step_id = 0
        self._last_updated_step_id = -1

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> Scheduler:
        """Return a scheduler of these sizes."""
        return cls(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            page_size=schedule.page_size,
            num_pages=schedule.num_pages,
            max_model_len=schedule.max_model_len,
        )

    @property
    def num_waiting(self) -> int:
        """Requests without pages and slot, new or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with pages and a slot."""
        return len(self._running)

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests own; the others are blank or can be evicted."""
        return self.num_pages - self._cache.num_free

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    # Events

    def add(self, request: Request) -> None:
        """Queues a new request.

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
        self._enqueue(request)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request in whatever state it is; None when no unfinished request has this id.

        Frees its pages and slot. Tokens of it that are still on the device will be dropped by `update()`.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    def withdraw(self) -> list[Request]:
        """Forgets the requests that wait and returns them in their order, for another scheduler to take.

        Those with tokens on the device stay: what there is to compute of them is not known yet.
        """
        withdrawn = [request for request in self._waiting.values() if not request.num_pending_tokens]
        for request in withdrawn:
            self._dequeue(request)
            del self._requests[request.request_id]
        return withdrawn

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content, as after a change of weights or a step that failed on the device.

        Running requests keep their pages, but no one else will find what they compute on top of them.
        """
        self.num_cache_resets += 1
        self._cache.reset()
        self._unshared.update(self._running.values())

    # Placement among several schedulers

    def check_fits(self, request: Request) -> None:
        """RequestError where a request could not run to its end even alone."""
        num_prompt, max_total = request.num_prompt_tokens, request.max_total_tokens
        if not 0 < num_prompt < max_total <= self.max_model_len:
            raise RequestError(
                "a prompt must have at least 1 token and fewer than max_total_tokens <= max_model_len, "
                f"got {num_prompt} prompt tokens, max_total_tokens {max_total} and max_model_len {self.max_model_len}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        num_needed = self._num_pages_for(max_total - 1)  # the last token is never computed
        if num_needed > self.num_pages:
            raise RequestError(
                f"a request must fit the page pool: {num_prompt} prompt tokens and up to {max_total - num_prompt} new "
                f"ones need {num_needed} pages of {self.page_size} tokens, but there are {self.num_pages}; "
                "lower max_tokens, shorten the prompt or raise num_pages"
            )

    @property
    def load(self) -> int:
        """Tokens to compute before those of a request added now, and a charge for every request."""
        return self._num_tokens_ahead + ROW_CHARGE_TOKENS * len(self._requests)

    def has_room(self, request: Request | None = None) -> bool:
        """Whether the next plan could start `request`, or any that takes one page, behind those that wait here.

        Rows in decode that need a page in that plan already may yet take those that are counted as free.
        """
        if len(self._waiting) >= len(self._free_slots) or self._num_tokens_ahead >= self.max_num_batched_tokens:
            return False
        num_reserved = self._num_growing + self._num_pages_for(self._num_prefill_tokens) + self._num_waiting_pages
        num_new = 1 if request is None else max(self._num_pages_taken(request), 1)
        return num_reserved + num_new <= self._cache.num_free

    def prefix_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the pages of a request that others may share with it."""
        return self._cache.hashes(request)[: (request.num_known_tokens - 1) // self.page_size]

    @property
    def _num_tokens_ahead(self) -> int:
        return len(self._running) + self._num_prefill_tokens + self._num_waiting_tokens

    def _num_pages_taken(self, request: Request) -> int:
        """Of the free pages, by the start of a request: those it finds cached that nobody has, and new ones."""
        cached = self._cached_pages(request)
        num_shared = max(len(cached), request.num_shared_tokens // self.page_size)
        num_tokens = min(request.num_tokens, num_shared * self.page_size + self.max_num_batched_tokens)
        return self._cache.num_evictable(cached) + self._num_pages_for(num_tokens) - num_shared

    def _cached_pages(self, request: Request) -> list[int]:
        return self._cache.match(request) if request.read_prefix_cache else []

    # One step

    @property
    def wants_logprobs(self) -> bool:
        """Whether a running request does, of the tokens that it samples."""
        return any(request.params.logprobs is not None for request in self._running.values())

    def most_steps(self, limit: int) -> int:
        """Return how many steps, at most `limit`, one plan may have: all rows are in decode, and their pages are there.

        One where a request could join sooner: a row that ends gives its slot to one that waits for it.
        """
        if limit < 2 or not self._running or (self._waiting and self._free_slots):
            return 1
        if self._num_prefill_tokens:
            return 1
        left = [request.max_total_tokens - request.num_tokens for request in self._running.values()]
        num_steps = min(limit, (min if self._waiting else max)(left))
        while num_steps > 1 and self._num_pages_short(num_steps) > self._cache.num_free:
            num_steps //= 2
        return max(num_steps, 1)

    def schedule(self, max_steps: int = 1) -> StepPlan | None:
        """Plan the next step, or up to `max_steps` at once; None when nothing can run.

        None while requests are unfinished means that their next tokens depend on plans not yet updated.
        """
        self.num_schedules += 1
        plan = StepPlan(self._next_step_id, num_steps=self.most_steps(max_steps))
        held_back = self._rows_to_hold_back()
        self._schedule_running(plan, held_back)
        if not plan.preempted:
            self._admit_waiting(plan)
        if held_back:
            self._decode_held_back(plan, held_back)
        if not plan.requests:
            return None
        self._next_step_id += 1
        if plan.num_steps > 1:
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
        for request, most, token_ids in zip(plan.requests, plan.max_new, sampled, strict=True):
            assert len(token_ids) <= most, f"a row that may sample {most} tokens cannot have sampled {len(token_ids)}"
            if request.status is RequestStatus.FINISHED:
                self.num_wasted_tokens += len(token_ids)
                token_ids.clear()
                continue
            if most > len(token_ids):
                self._take_back(request, most - len(token_ids))
            if most and request.status is RequestStatus.BLOCKED:
                request.status = RequestStatus.RUNNING
            del token_ids[self._append(request, token_ids) :]
            if request.status is RequestStatus.FINISHED:
                ended.append(request)
        return ended

    def check_integrity(self) -> None:
        """Asserts that pages and slots are conserved and that every request is where its status says."""
        owners: dict[int, int] = {}
        for request in self._running.values():
            assert request.status in _RUNS, f"{request.request_id} runs as {request.status}"
            # More than that only what a plan of several steps has left.
            assert len(request.pages) >= self._num_pages_for(request.num_computed_tokens), request
            assert len(request.pages) <= self._num_pages_for(request.max_total_tokens - 1), request
            for page in request.pages:
                owners[page] = owners.get(page, 0) + 1
        for request in self._waiting.values():
            assert request.status is RequestStatus.WAITING, f"{request.request_id} waits as {request.status}"
            held = (request.pages, request.slot, request.num_computed_tokens)
            assert held == ([], -1, 0), f"{request.request_id} waits but holds {held}"
        self._cache.check_integrity(owners)
        assert self._num_prefill_tokens == sum(_num_remaining(r) - 1 for r in self._running.values())
        assert self._num_growing == sum(map(self._can_grow, self._running.values()))
        counted = self._num_waiting_tokens, self._num_waiting_pages
        self._num_waiting_tokens = self._num_waiting_pages = 0
        for request in self._waiting.values():
            self._count_waiting(request, 1)
        assert counted == (self._num_waiting_tokens, self._num_waiting_pages), counted
        assert self._requests.keys() == self._running.keys() | self._waiting.keys()
        slots = [*self._free_slots, *(request.slot for request in self._running.values())]
        assert sorted(slots) == list(range(self.max_num_seqs)), f"slots are lost or shared: {slots}"

    # Parts of schedule()

    def _rows_to_hold_back(self) -> list[Request]:
        """Rows in decode that would take the prompts' share of the budget, in turn; none without prompts to compute."""
        if len(self._running) <= self._decode_limit:
            return []
        rows = self._running.values()
        if not (self._waiting and self._free_slots) and not any(map(_in_prefill, rows)):
            return []
        # Rows at their length limit compute nothing more: `_can_decode`.
        in_decode = [
            row
            for row in rows
            if row.status is RequestStatus.RUNNING and not _in_prefill(row) and row.num_tokens < row.max_total_tokens
        ]
        in_decode.sort(key=lambda request: (request.slot - self._next_held_slot) % self.max_num_seqs)
        return in_decode[: max(len(in_decode) - self._decode_limit, 0)]

    def _schedule_running(self, plan: StepPlan, held_back: list[Request]) -> None:
        """Gives the running rows in decode their token, then rows in prefill what the budget leaves, oldest first."""
        num_steps, in_prefill = plan.num_steps, []
        rows = list(self._running.values())
        if held_back:
            held = set(held_back)
            rows = [request for request in rows if request not in held]
        for request in rows:
            start = request.num_computed_tokens
            most = num_steps
            if start + num_steps > request.quiet_until:
                if request.status is RequestStatus.BLOCKED:
                    continue
                if _in_prefill(request):
                    in_prefill.append(request)
                    continue
                most = min(num_steps, request.max_total_tokens - request.num_tokens)
                if request.waits_for_tokens:
                    most = min(most, 1)
                if not self._can_decode(request, most, plan):
                    continue
            request.num_computed_tokens = start + most
            plan.requests.append(request)
            plan.starts.append(start)
            plan.max_new.append(most)
        plan.num_decode_tokens = plan.num_rows
        plan.counts = [1] * plan.num_rows
        for request in in_prefill:
            if request.status not in _RUNS:  # preempted for an older one
                continue
            num_tokens = min(_num_remaining(request), self._budget_left(plan))
            if num_tokens and self._allocate_or_preempt(request, num_tokens, plan):
                self._prefill(request, num_tokens, plan)

    def _decode_held_back(self, plan: StepPlan, held_back: list[Request]) -> None:
        """Gives rows held back what prompts left of the budget, those last whose turn it is to miss the step.

        Takes no pages from anyone: all others may have rows in this plan already.
        """
        num_missing = len(held_back)
        for request in reversed(held_back):
            if not self._budget_left(plan):
                break
            num_missing -= 1
            has_page = len(request.pages) * self.page_size > request.num_computed_tokens or self._cache.num_free
            if request.status is RequestStatus.RUNNING and has_page and self._can_decode(request, 1, plan):
                plan.requests.append(request)
                plan.starts.append(request.num_computed_tokens)
                plan.counts.append(1)
                plan.max_new.append(1)
                plan.num_decode_tokens += 1
                request.num_computed_tokens += 1
        if num_missing:
            self._next_held_slot = (held_back[num_missing - 1].slot + 1) % self.max_num_seqs

    def _can_decode(self, request: Request, most: int, plan: StepPlan) -> bool:
        """Whether a row in decode goes on; if so, its pages are there, and `quiet_until` says for how long."""
        # A row that reaches its limit with a token on the device computes nothing more; update() will end it.
        if request.num_tokens >= request.max_total_tokens:
            return False
        if not self._allocate_or_preempt(request, most, plan):
            return False
        if request.params.logprobs is not None:
            plan.wants_logprobs = True
        elif not request.waits_for_tokens:
            request.quiet_until = min(len(request.pages) * self.page_size, request.max_total_tokens - 1)
        if request.waits_for_tokens:
            request.status = RequestStatus.BLOCKED
        return True

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Allocates the pages of the next `num_tokens`; while too few are free, preempts the last admitted request.

        False when that was `request` itself. It never is the oldest, which alone fits the pool: there is progress.
        """
        num_new = -(-(request.num_computed_tokens + num_tokens) // self.page_size) - len(request.pages)
        if num_new <= 0:
            return True
        while (pages := self._cache.allocate(num_new)) is None:
            victim = next(reversed(self._running.values()))
            self._preempt(victim, plan)
            if victim is request:
                return False
        request.pages += pages
        self._num_growing -= not self._can_grow(request)
        plan.grown.append(request)
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Sends a running request back to the head of the queue; it will find its pages again if they stay cached."""
        assert request not in plan.requests, "a row of this plan must keep its pages"
        request.num_tokens_when_preempted = request.num_tokens
        self._stop_running(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.num_shared_tokens = 0
        self._enqueue(request)
        self._waiting.move_to_end(request.request_id, last=False)
        plan.preempted.append(request)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Starts waiting requests in their order while there are slots, budget and pages; none is overtaken."""
        if not self._waiting or not self._free_slots:
            return
        # Each running row that can grow will soon need a page; a newcomer that takes the last ones is soon preempted.
        num_reserved = self._num_growing
        while self._waiting and self._free_slots and self._budget_left(plan):
            request = next(iter(self._waiting.values()))
            # Preempted with tokens on the device: what there is to compute is not known before they are read.
            if request.num_pending_tokens or not self._admit(request, num_reserved, plan):
                break
            num_reserved += self._can_grow(request)

    def _admit(self, request: Request, num_reserved: int, plan: StepPlan) -> bool:
        """Starts one request with its cached pages and a first chunk; False (and no change) if it must wait a step."""
        if self._cache.num_free <= num_reserved:
            return False
        cached = self._cached_pages(request)
        start = len(cached) * self.page_size
        num_tokens = min(request.num_tokens - start, self._budget_left(plan))
        pages = self._acquire(cached, self._num_pages_for(start + num_tokens) - len(cached), num_reserved)
        if pages is None:
            return False
        if not request.num_preemptions:
            request.num_cached_tokens = start
        self._dequeue(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.pages = pages
        request.num_computed_tokens = start
        self._running[request.request_id] = request
        self._num_prefill_tokens += _num_remaining(request) - 1
        self._num_growing += self._can_grow(request)
        plan.num_cached_tokens += start
        plan.admitted.append(request)
        self._prefill(request, num_tokens, plan)
        return True

    def _acquire(self, cached: list[int], num_new: int, num_reserved: int) -> list[int] | None:
        """Takes `cached` pages and `num_new` behind them; None (and no change) unless `num_reserved` stay free."""
        self._cache.retain(cached)  # first of all, lest the allocation evicts them
        new = self._cache.allocate(num_new) if num_new + num_reserved <= self._cache.num_free else None
        if new is None:
            self._cache.release(cached)
            return None
        return cached + new

    def _prefill(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """Puts the next `num_tokens` of a request into the plan and counts them as computed."""
        start = request.num_computed_tokens
        samples = _num_remaining(request) == num_tokens
        request.num_computed_tokens = start + num_tokens
        self._num_prefill_tokens -= num_tokens - samples
        plan.num_prefill_tokens += num_tokens
        plan.requests.append(request)
        plan.starts.append(start)
        plan.counts.append(num_tokens)
        plan.max_new.append(int(samples))
        if samples and request.waits_for_tokens:
            request.status = RequestStatus.BLOCKED
        plan.wants_logprobs |= samples and request.params.logprobs is not None
        plan.wants_prompt_logprobs |= wants_prompt_logprobs(request, start)
        self._register_full_pages(request, start, request.num_computed_tokens)

    # Parts of update()

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """Count tokens that the device did not come to as not computed."""
        if request.status in _RUNS:
            request.num_computed_tokens -= num_tokens
            request.quiet_until = 0
        else:  # it waits again, and counts by its tokens
            self._count_waiting(request, -1)
            request.num_tokens_when_preempted -= num_tokens
            self._count_waiting(request, 1)

    def _append(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append tokens until one ends the request; returns how many those are."""
        output = request.output_token_ids
        for num_taken, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            if token_id in request.stop_ids or len(output) >= request.review_at:
                self._review(request)
                if request.status is RequestStatus.FINISHED:
                    self.num_wasted_tokens += len(token_ids) - num_taken
                    return num_taken
        return len(token_ids)

    def _review(self, request: Request) -> None:
        """Looks at a request whose last token may end it or come behind a full page."""
        num_known = request.num_known_tokens
        self._register_full_pages(request, num_known - 2, min(num_known - 1, request.num_computed_tokens))
        if request.output_token_ids[-1] in request.stop_ids and _may_stop(request):
            self._end(request, FinishReason.STOP)
        elif num_known == request.max_total_tokens:
            self._end(request, FinishReason.LENGTH)
        behind_page = ((num_known - 1) // self.page_size + 1) * self.page_size + 1
        request.review_at = min(behind_page, request.max_total_tokens) - request.num_prompt_tokens

    # Parts of both

    def _register_full_pages(self, request: Request, start: int, stop: int) -> None:
        """Register the full pages of positions [start, stop), whose tokens are known and certain to be computed."""
        first, stop = start // self.page_size, stop // self.page_size
        if first >= stop or request in self._unshared:
            return
        for page_hash, page in zip(self._cache.hashes(request)[first:stop], request.pages[first:stop], strict=True):
            self._cache.register(page_hash, page)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status in _RUNS:
            self._stop_running(request)
        else:
            self._dequeue(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_tokens_when_preempted = 0

    def _enqueue(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._count_waiting(request, 1)

    def _dequeue(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._count_waiting(request, -1)

    def _count_waiting(self, request: Request, sign: int) -> None:
        num_tokens = max(request.num_tokens - request.num_shared_tokens, 1)
        self._num_waiting_tokens += sign * num_tokens
        # Pages of a first chunk, and one more, which the scheduler keeps free for every row that can grow.
        self._num_waiting_pages += sign * (self._num_pages_for(min(num_tokens, self.max_num_batched_tokens)) + 1)

    def _stop_running(self, request: Request) -> None:
        del self._running[request.request_id]
        self._num_prefill_tokens -= _num_remaining(request) - 1
        self._num_growing -= self._can_grow(request)
        self._unshared.discard(request)
        self._free_slots.append(request.slot)
        self._cache.release(request.pages)
        request.slot = -1
        request.pages = []
        request.num_computed_tokens = 0
        request.quiet_until = 0

    def _num_pages_short(self, num_steps: int) -> int:
        """New pages that the running rows need for so many tokens each."""
        return sum(
            max(self._num_pages_for(request.num_computed_tokens + num_steps) - len(request.pages), 0)
            for request in self._running.values()
        )

    def _can_grow(self, request: Request) -> bool:
        return len(request.pages) < self._num_pages_for(request.max_total_tokens - 1)

    def _budget_left(self, plan: StepPlan) -> int:
        return self.max_num_batched_tokens - plan.num_tokens

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def _in_prefill(request: Request) -> bool:
    return _num_remaining(request) > 1


def _num_remaining(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def _may_stop(request: Request) -> bool:
    """Whether the token just appended may end the request."""
    # The device masks stop ids for the first min_tokens tokens, so that the first that may end a request follows those.
    return len(request.output_token_ids) > request.params.min_tokens
