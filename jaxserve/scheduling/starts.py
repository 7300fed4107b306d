"""StartPlanner: starts waiting requests with the tokens that unfinished prompts leave in a step.

Skipping. A waiting request may have to wait for unfinished prompts: because their maximum number is reached, or because
one of them is just computing the page that it needs next. Then it is skipped, and later requests may start. This
starves nobody: a skipped request waits only until a running prompt ends or passes the common prefix, and in that step
it is considered first. A prefix is thus computed once, however many requests begin with it. A request is never skipped
for lack of pages or slots: then all later ones wait too. To find out how much of a request is cached, only one page is
looked up, the one that must be cached for the request to start; the whole prefix is matched only if that page is found.
A request that waits for a prompt to pass their common prefix is remembered with that prefix, so that the next plans
skip it without a lookup.

Pages. A newcomer leaves free the pages for the rest of all unfinished prompts, and a block for every other row that can
grow, so that these rarely lack any.

Adapters. A request whose LoRA adapter lacks a slot is skipped, too; see `adapter_slots`.

Tiers. A waiting request with a prefix in a lower tier loads it first: on arrival, if the pages are not needed to start
all waiting requests, otherwise when its turn comes and pages are free. Later requests continue meanwhile. It starts
with the pages cached after all its transfers have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

from jaxserve.scheduling.ledger import Ledger, in_prefill, num_before_decode, num_remaining
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.step_plan import StepPlan


class StartPlanner:
    """Planner that starts waiting requests.

    Args:
        policy: policy that limits starts and sizes chunks.
        prompts: unfinished prompts.
    """

    def __init__(self, ledger: Ledger, policy: Policy, prompts: Prompts) -> None:
        self._ledger, self._policy, self._prompts = ledger, policy, prompts
        # By waiting request looked up before: the prompt that it waits for (or itself), and their common tokens.
        self._seen: dict[Request, tuple[Request, int]] = {}

    def start_waiting(self, plan: StepPlan, above: int | None) -> None:
        """Start waiting requests in a plan, in order, as far as slots, pages and token budget last.

        Args:
            plan: plan to add to.
            above: class below the ones that may start; None if all may.
        """
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
        """Start requests in order, skipping those that wait for unfinished prompts, until one does not fit.

        Args:
            order: waiting requests in order.
            plan: plan to add to.
            above: class below the ones that may start; None if all may.

        Returns:
            Started requests, which are still in the queue.
        """
        ledger = self._ledger
        num_kept = self._prompts.num_pages_kept  # a newcomer that takes the last pages is soon preempted
        started: list[Request] = []
        num_skipped, num_lookups, may_hash = 0, 0, True
        if not self._prompts.unfinished:
            self._seen.clear()
        for request in ledger.adapters.startable(order):
            budget_left = self._prompts.budget_left(plan)
            if not budget_left or not ledger.free_slots or ledger.num_available <= num_kept:
                break
            if above is not None and request.priority >= above:
                break
            # A preempted request's uncomputed tokens are unknown until its sampled tokens are read.
            if request.num_pending_tokens or self._lacks_pages_to_load(request, num_kept):
                break
            if request.status is RequestStatus.LOADING:
                continue
            cached: list[int] | None = None
            if not self._is_held(request):
                max_left = self._policy.max_left_to_start(
                    budget_left, len(self._prompts.unfinished), self._prompts.num_long
                )
                is_too_long = request.num_tokens > max_left  # unless enough of it is cached
                is_new = request.read_prefix_cache and request not in self._seen  # its pages must be hashed first
                # Hashing a long prompt can take as long as a step: at most one per plan may be in vain.
                if not is_too_long or ((may_hash or not is_new) and 4 * num_lookups <= self._policy.max_lookups):
                    may_hash &= not (is_too_long and is_new)
                    num_lookups += 1
                    cached = self._find_start(request, max_left)
            if cached is None:
                num_skipped += 1
                if num_skipped > self._policy.max_skipped or num_lookups > self._policy.max_lookups:
                    break
            elif self._admit(request, cached, num_kept, plan):
                started.append(request)
                num_lookups -= 1
                num_kept += ledger.num_pages_kept(request)
            else:
                break
        return started

    def arrived(self, request: Request) -> None:
        """Begin to load a new request's prefix if lower tiers have it and more pages are free than others need."""
        if self._ledger.store.has_tiers:
            self._lacks_pages_to_load(request, self._prompts.num_pages_kept + self._ledger.num_waiting_pages)

    def _lacks_pages_to_load(self, request: Request, num_kept: int) -> bool:
        """Begin to load a request's prefix if lower tiers have it; return True if too few pages are free for that.

        Args:
            request: waiting request.
            num_kept: number of pages that must stay free.
        """
        prefix = self._ledger.store.prefix_below(request)
        return prefix is not None and not self._ledger.store.load(request, prefix, num_kept)

    def _is_held(self, request: Request) -> bool:
        """Return whether a waiting request is known to share a prefix that a running prompt has not passed yet."""
        prompt, num_common = self._seen.get(request, (request, 0))
        runs_here = self._ledger.running.get(prompt.request_id) is prompt
        return runs_here and prompt.num_computed_tokens < num_common and prompt not in self._ledger.store.unshared

    @property
    def num_held(self) -> int:
        """Number of requests skipped because a prompt is computing their prefix; callable on any thread."""
        return sum(map(self._is_held, list(self._seen)))

    def forget(self, request: Request) -> None:
        """Forget a request that leaves the queue; if it returns, it counts as new."""
        self._seen.pop(request, None)

    def check_integrity(self) -> None:
        """Assert that only waiting requests are remembered."""
        assert self._seen.keys() <= set(self._ledger.waiting), "a request that left the queue is remembered"

    def _find_start(self, request: Request, max_left: int) -> list[int] | None:
        """Return the pages of a request's cached prefix if it can start; None if it must wait for unfinished prompts.

        Args:
            request: waiting request.
            max_left: maximum number of tokens that the request may have to compute.
        """
        store = self._ledger.store
        if not request.read_prefix_cache:
            return [] if request.num_tokens <= max_left else None
        self._seen[request] = request, 0
        computed = ((other, other.num_computed_tokens) for other in self._prompts.unfinished)
        if (prompt := self._prompt_ahead(request, computed)) is not None:
            self._seen[request] = prompt, self._num_common_tokens(prompt, request)
            return None
        num_needed = self._ledger.groups.num_blocks(request.num_tokens - max_left)
        if not store.index.may_match(request, num_needed):
            return None
        cached = store.index.match(request)
        return cached if request.num_tokens - self._num_cached_tokens(cached) <= max_left else None

    def would_skip(self, request: Request) -> bool:
        """Return whether the next plan would skip a new request because of unfinished prompts."""
        if not self._prompts.unfinished:
            return False
        left = [(other, chunk) for other, chunk in self._prompts.next_chunks() if num_before_decode(other) > chunk]
        if request.read_prefix_cache:
            computed = ((other, other.num_computed_tokens + chunk) for other, chunk in left)
            if self._prompt_ahead(request, computed) is not None:
                return True
        num_long = sum(self._policy.is_long(num_remaining(other) - chunk) for other, chunk in left)
        max_left = self._policy.max_left_to_start(self._prompts.next_budget_left(), len(left), num_long)
        if request.num_tokens - request.num_shared_tokens <= max_left:
            return False
        return request.num_tokens - self._num_cached_tokens(self._ledger.cached_pages(request)) > max_left

    def _prompt_ahead(self, request: Request, computed: Iterable[tuple[Request, int]]) -> Request | None:
        """Return an unfinished prompt that will compute the page that `request` needs next; None if there is none.

        Args:
            request: waiting request.
            computed: unfinished prompts, by class, with their numbers of computed tokens.
        """
        for other, num_computed_tokens in computed:
            if other.priority > request.priority:  # it waits for no lower class
                break
            if self._is_computing(other, num_computed_tokens, request):
                return other
        return None

    def _num_cached_tokens(self, pages: Sequence[int]) -> int:
        """Return the number of tokens in the pages of a cached prefix."""
        return len(pages) // self._ledger.groups.size * self._ledger.page_size

    def _is_computing(self, other: Request, num_computed_tokens: int, request: Request) -> bool:
        """Return whether an unfinished prompt will compute the page that a waiting request needs next.

        Args:
            other: unfinished prompt.
            num_computed_tokens: number of its tokens computed so far.
            request: waiting request with the same tokens up to there, if its page hash is equal.
        """
        ledger = self._ledger
        if ledger.store.states is not None:  # states inside a prompt have no snapshots
            return False
        index = num_computed_tokens // ledger.page_size
        theirs, num_matchable = ledger.store.index.hashes(other), (request.num_known_tokens - 1) // ledger.page_size
        num_shareable = ledger.groups.num_shareable(other.num_known_tokens, other.num_prompt_tokens) // ledger.page_size
        if index >= min(num_shareable, num_matchable) or other in ledger.store.unshared:
            return False
        page_hash = ledger.store.index.hashes(request)[index]
        return page_hash == theirs[index] and not ledger.store.index.has(page_hash)

    def _num_common_tokens(self, other: Request, request: Request) -> int:
        """Return the number of tokens in the shareable pages that two requests have in common."""
        store, page_size = self._ledger.store, self._ledger.page_size
        theirs, ours = store.index.hashes(other), store.index.hashes(request)
        stop = min(len(theirs), (request.num_known_tokens - 1) // page_size)
        # A page's hash covers all earlier pages.
        return page_size * bisect_left(range(stop), True, key=lambda index: ours[index] != theirs[index])

    def _admit(self, request: Request, cached: list[int], num_kept: int, plan: StepPlan) -> bool:
        """Start a waiting request with its cached pages, a copy of a partly filled page if one is cached, and a chunk.

        Args:
            request: waiting request.
            cached: pages of its cached prefix.
            num_kept: number of pages that must stay free.
            plan: plan to add to.

        Returns:
            False, without a change, if too few pages are free.
        """
        ledger = self._ledger
        if request.read_prefix_cache:
            copied = ledger.store.index.match_last(request, len(cached) // ledger.groups.size)
            if copied and self._start(request, cached, copied, num_kept, plan):
                return True
            if copied and request.num_kept_tokens:
                return False  # soon the pages fit: it takes over the partly filled ones once they are stored
            if copied:
                cached = ledger.store.index.match(request, with_last=False)
        return self._start(request, cached, [], num_kept, plan)

    def _start(self, request: Request, cached: list[int], copied: list[int], num_kept: int, plan: StepPlan) -> bool:
        """Start a waiting request with its cached pages and a first chunk; False, without a change, if pages are short.

        Args:
            request: waiting request.
            cached: pages of its cached prefix.
            copied: partly filled pages, one per KV group; it gets copies of them after the cached pages, or the pages
                themselves if it was swapped out and nobody else uses them. Or none.
            num_kept: number of pages that must stay free.
            plan: plan to add to.
        """
        ledger = self._ledger
        start = request.num_last_tokens if copied else self._num_cached_tokens(cached)
        num_left = min(request.num_tokens, ledger.groups.row_end(start, request.num_prompt_tokens)) - start
        num_tokens = self._policy.first_chunk(num_left, self._prompts.budget_left(plan))
        num_tokens = min(num_tokens, ledger.token_capacity(cached))
        num_tokens = self._prompts.num_wanted(request, start, num_tokens, plan)
        if not num_tokens:  # its first image must wait for other images
            return False
        num_pages = ledger.groups.num_blocks(start + num_tokens) * ledger.groups.size
        taken = copied if request.num_kept_tokens and ledger.store.num_evictable(copied) == len(copied) else []
        num_new = num_pages - len(cached) - len(taken)
        if not ledger.store.fits([*cached, *copied], num_new, num_kept):
            return False
        ledger.store.retain(copied)  # so that the allocation does not evict them
        pages = ledger.store.acquire(request, cached, num_new, num_kept)
        assert pages is not None, "they fit"
        if taken:  # no other request has computed them
            ledger.store.forget(taken)
            pages[len(cached) : len(cached)] = taken
        else:
            ledger.store.release(copied)
            plan.copies += zip(copied, pages[len(cached) :], strict=False)
        if (states := ledger.store.states) is not None:
            num_blocks, request.branch_tokens = start // ledger.page_size, 0
            if request.read_prefix_cache and (num_full := ledger.store.index.num_full_blocks(request)) > num_blocks:
                request.branch_tokens = num_full * ledger.page_size
            if start:
                plan.restored.append((plan.num_rows, states.read(ledger.store.index.hash_at(request, start))))
        if ledger.store.events is not None and request.loaded_blocks:
            hashes = ledger.store.index.hashes(request)[: start // ledger.page_size]
            ledger.store.events.loaded(request, hashes, pages, ledger.groups.size)
        found = request.by_tier(start, ledger.page_size)
        if not request.num_preemptions:
            request.cached_tokens = found
        ledger.count(request, -1)
        ledger.start(request, pages, start)
        if (load := ledger.adapters.start(request)) is not None:
            plan.adapter_loads.append(load)
        plan.cached_tokens += found
        plan.num_sought_tokens += request.num_tokens - found.device if ledger.store.has_tiers else 0
        plan.admitted.append(request)
        self._prompts.compute(self._prompts.add_row(request, plan), num_tokens, plan)
        if in_prefill(request):
            self._prompts.unfinished.append(request)
        return True
