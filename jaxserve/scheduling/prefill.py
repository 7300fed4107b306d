"""Prefills: gives prompts what rows in decode leave of a step: those between two chunks, then those that start.

Order. Prompts between two chunks come first, oldest first, then the waiting requests in their order, while there are
slots, budget and pages. A long prompt leaves others half of that, and gets at the end what they did not take; while
rows decode, no more than its chunk may have (`Policy`).

Passing over. A waiting request may have to wait for unfinished prompts: because as many are unfinished as may be, or
because one of them is just computing the next page that it would have to compute itself. Then it is passed over, and
those behind it go on. Nobody starves by that: nothing that is passed over needs more than the end of a prompt that
runs, or that this gets beyond the common part, and in the step in which that happens it is the first that is asked. So
a prefix is computed once however many requests begin with it. A request is never passed over for want of pages or
slots: then all behind it wait too. To know how much of a request is cached, one page is looked up, the one that must be
cached for the request to start; the whole prefix is matched when that is. A request that waits for a prompt to get
beyond their common part is remembered with that part, so that the next plans pass it over without a look.

Pages. A newcomer leaves free what the rest of all unfinished prompts takes, and a page for every other row that can
grow, so that they will rarely lack any. A prompt that does takes as many tokens as the free pages hold, but for those
of the rest of older prompts, and a page for each row in decode that can grow: these would otherwise take them back,
perhaps from this very prompt. If that is no token, younger rows in prefill give way, the last first. None of them has a
row in the plan, which is made in the order of their age; rows in decode never give way to a prompt. If that does not
help either, the prompt waits a step. Nobody is admitted in a step in which a running row lacks pages.

Tiers. A waiting request whose prefix lies in a tier below device memory loads it first, when its turn comes and there
are pages for it; those behind it go on meanwhile. It starts by what is cached when all its transfers have ended.

States. Layers without attention keep a state of a sequence in its slot, which goes on from zeros, or from a snapshot
that an earlier plan took behind a cached page. A snapshot is taken inside a row's tokens, at the last full page of its
prompt, or where others were seen to begin alike though there was none.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter

from jaxserve.kv_cache.page_store import num_last_tokens
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.ledger import RUNS, Ledger, in_prefill, num_remaining
from jaxserve.scheduling.plan import StepPlan, wants_prompt_logprobs
from jaxserve.scheduling.policy import Policy


class Prefills:
    """The prompts between two chunks, and the start of requests.

    Args:
        ledger: ledger of all requests.
        policy: policy that says who may start, and how much of a step a prompt has.
    """

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        self._ledger = ledger
        self._policy = policy
        # Rows in prefill after the last plan, or already in the one being made, in the order of their classes and ages.
        self._unfinished: list[Request] = []
        # Waiting requests that were looked at: the prompt that each waits for, and their common tokens.
        self._seen: dict[Request, tuple[Request, int]] = {}
        self._limit = ledger.max_num_batched_tokens  # tokens of the plan being made

    # Parts of a plan

    def schedule(
        self,
        plan: StepPlan,
        in_prefill_before: Sequence[Request],
        *,
        beside_decode: bool,
        num_displaced: int,
        most_tokens: int = sys.maxsize,
    ) -> None:
        """Add rows to a plan that has those in decode.

        Args:
            plan: plan to add to.
            in_prefill_before: running rows between two chunks, in the order of classes and of admission; some may be
                preempted.
            beside_decode: True if any row in decode waits for this step.
            num_displaced: rows preempted by `make_room`, for requests of higher classes.
            most_tokens: most tokens of prompts, so that rows in decode get theirs in time.
        """
        rows = [request for request in in_prefill_before if request.status in RUNS]
        self._limit = min(plan.num_tokens + most_tokens, self._ledger.max_num_batched_tokens)
        first_row = plan.num_rows
        displaced = min((request.priority for request in plan.preempted[:num_displaced]), default=None)
        self._unfinished = []
        may_admit, num_before = len(plan.preempted) == num_displaced, 0
        for priority, group in groupby(rows, key=attrgetter("priority")):
            if may_admit:
                self._admit_waiting(plan, priority)
            num_after = num_before + len(list(group))
            is_short_of_pages = self._continue(rows, num_before, num_after, plan)
            may_admit &= not is_short_of_pages and len(plan.preempted) == num_displaced
            num_before = num_after
        if may_admit:
            self._admit_waiting(plan, displaced)
        if self._unfinished:
            self._share_out_rest(plan, first_row, beside_decode=beside_decode)
            self._unfinished = [request for request in self._unfinished if in_prefill(request)]
        self._take_snapshots(plan, first_row)

    def _continue(self, rows: Sequence[Request], start: int, stop: int, plan: StepPlan) -> bool:
        """Give rows in prefill of one class their first share, oldest first; returns whether one of them lacks pages.

        Args:
            rows: all rows in prefill; those behind `stop` are of lower classes.
            start: index of the first row of the class.
            stop: index behind its last.
            plan: plan to add to.
        """
        is_short = False
        self._unfinished += [request for request in rows[start:stop] if request.status in RUNS]
        for index, request in enumerate(rows[start:stop], start):
            budget_left = self._budget_left(plan)
            if request.status not in RUNS or not budget_left:  # preempted for an older one
                continue
            wanted = self._policy.first_share(num_remaining(request), budget_left)
            self._ledger.store.release_unseen(request)
            num_tokens = self._num_affordable(request, wanted)
            while not num_tokens and (victim := _last_running(rows[index + 1 :])) is not None:
                self._ledger.preempt(victim, plan)
                num_tokens = self._num_affordable(request, wanted)
            is_short |= num_tokens < wanted
            if num_tokens and self._ledger.allocate(request, num_tokens, plan):
                self._compute(self._add_row(request, plan), num_tokens, plan)
        self._unfinished = [request for request in self._unfinished if request.status in RUNS and in_prefill(request)]
        return is_short

    def _num_affordable(self, request: Request, most: int) -> int:
        """Tokens that a row in prefill may have and leave rows in decode and older prompts the pages they need."""
        ledger, is_older = self._ledger, True
        num_kept, size = ledger.num_pages_to_grow, ledger.groups.size
        for other in self._unfinished:
            is_older &= other is not request
            if other.status in RUNS and in_prefill(other):
                num_kept += (ledger.num_pages_kept(other) if is_older else 0) - size * ledger.can_grow(other)
        num_columns = (len(request.pages) + max(ledger.num_available - num_kept, 0)) // size
        return max(min(most, num_columns * ledger.page_size - request.num_computed_tokens), 0)

    def _share_out_rest(self, plan: StepPlan, first_row: int, *, beside_decode: bool) -> None:
        """Give unfinished prompts that are in the plan what nobody else took, oldest first."""
        for row in range(first_row, plan.num_rows):
            budget_left = self._budget_left(plan)
            if not budget_left:
                return
            if plan.max_new[row]:
                continue
            request = plan.requests[row]
            wanted = self._policy.further_share(
                num_remaining(request), plan.counts[row], budget_left, beside_decode=beside_decode
            )
            num_tokens = self._num_affordable(request, wanted)
            if num_tokens and self._ledger.allocate(request, num_tokens, plan):
                self._compute(row, num_tokens, plan)

    def _take_snapshots(self, plan: StepPlan, first_row: int) -> None:
        """Have rows from one on take snapshots of their states where they are worth it."""
        ledger = self._ledger
        if (states := ledger.store.states) is None:
            return
        for row in range(first_row, plan.num_rows):
            request, start = plan.requests[row], plan.starts[row]
            stop, num_known = start + plan.counts[row], request.num_tokens - plan.max_new[row]
            last = (num_known - 1) // ledger.page_size * ledger.page_size  # its last token is computed in any case
            num_tokens = next((place for place in (request.branch_tokens, last) if start < place <= stop), None)
            if num_tokens is None or request in ledger.store.unshared:
                continue
            entry = states.take(ledger.store.hashes(request)[num_tokens // ledger.page_size - 1])
            if entry is not None:
                plan.snapshots.append((row, num_tokens - start, entry))

    # Starts

    def _admit_waiting(self, plan: StepPlan, above: int | None) -> None:
        """Start waiting requests in their order: those of classes above one, or of all where it is None."""
        ledger = self._ledger
        if not ledger.waiting or not ledger.free_slots:
            return
        if above is not None and ledger.waiting.first_priority >= above:
            return
        ledger.waiting.settle()
        with closing(ledger.waiting.in_order()) as order:
            started = self._start_in_turn(order, plan, above)
        for request in started:
            ledger.waiting.remove(request)
            self._seen.pop(request, None)

    def _start_in_turn(self, order: Iterator[Request], plan: StepPlan, above: int | None) -> list[Request]:
        """Start requests, which stay in the queue, until one cannot; return them."""
        ledger = self._ledger
        num_kept = self.num_pages_kept  # a newcomer that takes the last pages is soon preempted
        started: list[Request] = []
        num_passed_over, num_looks, may_hash = 0, 0, True
        if not self._unfinished:
            self._seen.clear()
        for request in order:
            budget_left = self._budget_left(plan)
            if not budget_left or not ledger.free_slots or ledger.num_available <= num_kept:
                break
            if above is not None and request.priority >= above:
                break
            # Of a preempted one, it is not known what there is to compute before its tokens are read.
            if request.num_pending_tokens or self._lacks_pages_to_load(request, num_kept):
                break
            if request.status is RequestStatus.LOADING:
                continue
            cached: list[int] | None = None
            if not self._is_held(request):
                most_left = self._policy.most_left_to_start(budget_left, len(self._unfinished), self._num_long())
                is_too_long = request.num_tokens > most_left  # unless enough of it is cached
                is_new = request.read_prefix_cache and request not in self._seen  # its pages are to be hashed
                # To hash a long prompt can take as long as a step: one of those in vain is enough.
                if not is_too_long or ((may_hash or not is_new) and 4 * num_looks <= self._policy.most_looks):
                    may_hash &= not (is_too_long and is_new)
                    num_looks += 1
                    cached = self._find_start(request, most_left)
            if cached is None:
                num_passed_over += 1
                if num_passed_over > self._policy.most_passed_over or num_looks > self._policy.most_looks:
                    break
            elif self._admit(request, cached, num_kept, plan):
                started.append(request)
                num_looks -= 1
                num_kept += ledger.num_pages_kept(request)
            else:
                break
        return started

    def _lacks_pages_to_load(self, request: Request, num_kept: int) -> bool:
        """Begin to load what lower tiers have of a request's prefix; return whether there are too few pages for it."""
        wanted = self._ledger.store.pages_below(request)
        return bool(wanted) and not self._ledger.store.load(request, wanted, num_kept)

    def _is_held(self, request: Request) -> bool:
        """Return whether a waiting request was seen to begin like a prompt that has yet to get beyond that part."""
        prompt, num_common = self._seen.get(request, (request, 0))
        runs_here = self._ledger.running.get(prompt.request_id) is prompt
        return runs_here and prompt.num_computed_tokens < num_common and prompt not in self._ledger.store.unshared

    @property
    def num_held(self) -> int:
        """Waiting requests that were passed over, because a prompt computes what they begin with; on any thread."""
        return sum(map(self._is_held, list(self._seen)))

    def forget(self, request: Request) -> None:
        """Forget what was seen of a request that leaves the queue; should it come back, plans take it for a new one."""
        self._seen.pop(request, None)

    def check_integrity(self) -> None:
        """Assert that only waiting requests are remembered."""
        assert self._seen.keys() <= set(self._ledger.waiting), "a request that left the queue is remembered"

    def _num_long(self) -> int:
        return sum(self._policy.is_long(num_remaining(request)) for request in self._unfinished)

    def _find_start(self, request: Request, most_left: int) -> list[int] | None:
        """Return the cached pages of a request; None where it must wait for prompts that are unfinished.

        Args:
            request: waiting request.
            most_left: most tokens that the request may have to compute.
        """
        store = self._ledger.store
        if not request.read_prefix_cache:
            return [] if request.num_tokens <= most_left else None
        self._seen[request] = request, 0
        for other in self._unfinished:
            if other.priority > request.priority:  # it waits for nobody of a lower class
                break
            if self._is_computing(other, other.num_computed_tokens, request):
                self._seen[request] = other, self._num_common_tokens(other, request)
                return None
        num_needed = self._ledger.groups.num_columns(request.num_tokens - most_left)
        if not store.may_match(request, num_needed):
            return None
        cached = store.match(request)
        return cached if request.num_tokens - self._num_cached_tokens(cached) <= most_left else None

    def _num_cached_tokens(self, pages: Sequence[int]) -> int:
        """Tokens of so many pages, of all groups."""
        return len(pages) // self._ledger.groups.size * self._ledger.page_size

    def _is_computing(self, other: Request, num_computed_tokens: int, request: Request) -> bool:
        """Return whether an unfinished prompt with so many tokens computed is at the page that `request` needs next."""
        ledger = self._ledger
        if ledger.store.states is not None:  # states inside a prompt have no snapshots
            return False
        index = num_computed_tokens // ledger.page_size
        theirs, num_matchable = ledger.store.hashes(other), (request.num_known_tokens - 1) // ledger.page_size
        if index >= min(len(theirs), num_matchable) or other in ledger.store.unshared:
            return False
        page_hash = ledger.store.hashes(request)[index]
        return page_hash == theirs[index] and not ledger.store.has(page_hash)

    def _num_common_tokens(self, other: Request, request: Request) -> int:
        """Return how many tokens of pages that may be shared two requests have in common."""
        theirs, own = self._ledger.store.hashes(other), self._ledger.store.hashes(request)
        stop = min(len(theirs), (request.num_known_tokens - 1) // self._ledger.page_size)
        # A page's hash covers all pages before it.
        return self._ledger.page_size * bisect_left(range(stop), True, key=lambda index: own[index] != theirs[index])

    def _admit(self, request: Request, cached: list[int], num_kept: int, plan: StepPlan) -> bool:
        """Start one request with its cached pages and a first share; False, and no change, where pages are short."""
        ledger = self._ledger
        if request.read_prefix_cache:
            copied = ledger.store.match_last(request, len(cached) // ledger.groups.size)
            if copied and self._start(request, cached, copied, num_kept, plan):
                return True
        return self._start(request, cached, [], num_kept, plan)

    def _start(self, request: Request, cached: list[int], copied: list[int], num_kept: int, plan: StepPlan) -> bool:
        """Start a request whose page behind the cached ones is a copy of those in `copied`, if there are any."""
        ledger = self._ledger
        start = num_last_tokens(request) if copied else self._num_cached_tokens(cached)
        num_tokens = self._policy.first_share(request.num_tokens - start, self._budget_left(plan))
        num_tokens = min(num_tokens, ledger.num_tokens_with_room(cached))
        num_pages = ledger.groups.num_columns(start + num_tokens) * ledger.groups.size
        ledger.store.retain(copied)  # lest the allocation evicts them
        pages = ledger.store.acquire(request, cached, num_pages - len(cached), num_kept)
        ledger.store.release(copied)
        if pages is None:
            return False
        plan.copies += zip(copied, pages[len(cached) :], strict=False)
        if (states := ledger.store.states) is not None:
            hashes, num_columns = ledger.store.hashes(request), start // ledger.page_size
            request.branch_tokens = 0
            if request.read_prefix_cache and (num_full := ledger.store.num_full_columns(request)) > num_columns:
                request.branch_tokens = num_full * ledger.page_size
            if num_columns:
                plan.restored.append((plan.num_rows, states.read(hashes[num_columns - 1])))
        if not request.num_preemptions:
            request.num_cached_tokens = start
        ledger.uncount(request)
        ledger.start(request, pages, start)
        plan.num_cached_tokens += start
        plan.admitted.append(request)
        self._compute(self._add_row(request, plan), num_tokens, plan)
        if in_prefill(request):
            self._unfinished.append(request)
        return True

    # Before a plan

    @property
    def num_pages_kept(self) -> int:
        """Free pages that newcomers leave to running rows."""
        ledger, num_kept = self._ledger, self._ledger.num_pages_to_grow
        for request in self._unfinished:
            if request.status in RUNS:
                num_kept += ledger.num_pages_kept(request) - ledger.groups.size * ledger.can_grow(request)
        return num_kept

    def num_budget_left(self) -> int:
        """Tokens that the next plan has for prompts not yet started."""
        if not self._unfinished:
            return self._ledger.max_num_batched_tokens - len(self._ledger.running)
        return self._outlook()[0]

    def must_wait(self, request: Request) -> bool:
        """Return whether the next plan would pass over a request because of unfinished prompts."""
        if not self._unfinished:
            return False
        budget_left, unfinished = self._outlook()
        num_left = [num_remaining(other) - share for other, share in unfinished]
        in_part = [left for left in num_left if left > 1]
        most_left = self._policy.most_left_to_start(budget_left, len(in_part), sum(map(self._policy.is_long, in_part)))
        if not request.read_prefix_cache:
            return request.num_tokens > most_left
        computed = [(other, other.num_computed_tokens + share) for other, share in unfinished]
        if any(self._is_computing(*done, request) for done, left in zip(computed, num_left, strict=True) if left > 1):
            return True
        if request.num_tokens - request.num_shared_tokens <= most_left:
            return False
        return request.num_tokens - self._num_cached_tokens(self._ledger.cached_pages(request)) > most_left

    def _outlook(self) -> tuple[int, list[tuple[Request, int]]]:
        """Return the budget that the next plan has for newcomers, and the share of each unfinished prompt."""
        unfinished = [request for request in self._unfinished if request.status in RUNS] if self._unfinished else []
        budget_left = self._ledger.max_num_batched_tokens - (len(self._ledger.running) - len(unfinished))
        shares: list[tuple[Request, int]] = []
        for request in unfinished:
            share = self._policy.first_share(num_remaining(request), max(budget_left, 0))
            budget_left -= share
            shares.append((request, share))
        return budget_left, shares

    # Rows

    def _budget_left(self, plan: StepPlan) -> int:
        return self._limit - plan.num_tokens

    def _add_row(self, request: Request, plan: StepPlan) -> int:
        """Add a row of no tokens yet; returns its index."""
        plan.requests.append(request)
        plan.starts.append(request.num_computed_tokens)
        plan.counts.append(0)
        plan.max_new.append(0)
        return plan.num_rows - 1

    def _compute(self, row: int, num_tokens: int, plan: StepPlan) -> None:
        """Put the next tokens of the request of a row into the plan, and count them as computed."""
        request = plan.requests[row]
        start = request.num_computed_tokens
        samples = num_remaining(request) == num_tokens
        request.num_computed_tokens = start + num_tokens
        self._ledger.num_prefill_tokens -= num_tokens - samples
        plan.num_prefill_tokens += num_tokens
        plan.counts[row] += num_tokens
        plan.max_new[row] = int(samples)
        if samples and request.waits_for_tokens:
            request.status = RequestStatus.BLOCKED
        plan.wants_logprobs |= samples and request.params.logprobs is not None
        plan.wants_prompt_logprobs |= wants_prompt_logprobs(request, start)
        self._ledger.store.register_columns(request, request.num_computed_tokens // self._ledger.page_size)


def _last_running(rows: Sequence[Request]) -> Request | None:
    return next((request for request in reversed(rows) if request.status in RUNS), None)
