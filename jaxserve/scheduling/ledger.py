"""Ledger: waiting and running requests, their slots and pages, and the tokens left to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxserve.scheduling.adapter_slots import AdapterSlots
from jaxserve.scheduling.encoder_cache import EncoderCache
from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.kv_cache.page_store import PageStore
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.step_plan import PromptCompaction, StepPlan
from jaxserve.scheduling.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxserve.scheduling.schedule_config import ScheduleConfig

RUNS = (RequestStatus.RUNNING, RequestStatus.BLOCKED)  # these have pages and a slot


class Ledger:
    """Requests by state, with counts updated on every change so that callers need not iterate.

    Args:
        sizes: sizes of the shard's steps and page pool.
        store: store of all pages.
        weights: weights by tenant; 1 for others.
        first_slot: the shard's first slot.
        adapters: slots of LoRA adapters, which shards share.
        encoder: the encoder cache, which shards share.

    Attributes:
        groups: layer groups that have pages of their own.
        store: store of all pages.
        adapters: slots of LoRA adapters.
        encoder: the encoder cache.
        waiting: queue of waiting requests.
        running: running requests by id, in admission order.
        num_running_of: number of running requests by class; no entry for 0.
        num_prefill_tokens: tokens that running rows have yet to compute before they decode.
        num_growing: running rows that may need another page.
        num_waiting_tokens: known tokens that waiting requests have yet to compute.
        num_waiting_pages: pages needed to start all waiting requests.
    """

    def __init__(
        self,
        sizes: ScheduleConfig,
        store: PageStore,
        weights: Mapping[str, float],
        first_slot: int,
        adapters: AdapterSlots,
        encoder: EncoderCache,
    ) -> None:
        self.groups, self.store, self.adapters, self.encoder = sizes.kv_groups, store, adapters, encoder
        self.page_size, self._group_size = self.groups.page_size, self.groups.size
        self.max_num_batched_tokens = sizes.max_num_batched_tokens
        self.running: dict[str, Request] = {}
        self.waiting = WaitingQueue(weights, self.running)
        self.num_running_of: dict[int, int] = {}
        self._slots = range(first_slot, first_slot + sizes.max_num_seqs)
        self.free_slots = list(reversed(self._slots))
        self.num_prefill_tokens = 0
        self.num_growing = 0
        self.num_waiting_tokens = 0
        self.num_waiting_pages = 0
        self._num_pages = sizes.num_pages

    @property
    def num_available(self) -> int:
        """Number of free and evictable pages."""
        return self.store.num_available

    @property
    def num_pages_used(self) -> int:
        """Pages owned by requests or moving between tiers; the others are free or evictable."""
        return self._num_pages - self.store.num_available

    # The queue

    def enqueue(self, request: Request) -> None:
        """Queue a new request, and count it."""
        self.waiting.append(request)
        self.store.order.now_s = max(self.store.order.now_s, request.arrival_s)
        self.count(request)

    def dequeue(self, request: Request) -> None:
        """Remove a waiting request from the queue and the counts; release pages that are being loaded for it."""
        self.count(request, -1)
        self.waiting.remove(request)
        self.store.abandon(request)
        self.store.drop_tail(request)
        request.has_failed, request.num_kept_tokens = False, 0
        request.loaded_blocks.clear()

    def count(self, request: Request, sign: int = 1) -> None:
        """Add a waiting request to the counts of waiting tokens and pages; with sign=-1, subtract it.

        A change of its number of tokens needs a call with sign=-1 before, and a call with sign=1 after.
        """
        num_tokens = max(request.num_tokens - request.num_shared_tokens, 1)
        # Blocks of the first chunk, plus one that the scheduler keeps free for every row that can grow.
        num_blocks = self.groups.num_blocks(min(num_tokens, self.max_num_batched_tokens)) + 1
        self.num_waiting_tokens += sign * num_tokens
        self.num_waiting_pages += sign * num_blocks * self.groups.size

    # Running rows

    def start(self, request: Request, pages: list[int], num_computed_tokens: int) -> None:
        """Let a request run: give it a slot and its pages, and charge its tenant. It is still in the queue.

        Args:
            request: waiting request, already subtracted by `count`.
            pages: its pages.
            num_computed_tokens: number of its tokens whose keys and values these pages hold.
        """
        request.status = RequestStatus.RUNNING
        request.has_failed, request.num_kept_tokens = False, 0
        request.loaded_blocks.clear()
        request.slot = self.free_slots.pop()
        request.pages = pages
        request.num_computed_tokens = num_computed_tokens
        # its slot decides when output pages are registered, and a replay must not depend on an earlier slot
        request.quiet_outputs = 0
        request.num_registered_blocks = num_computed_tokens // self.page_size
        if self.groups.sliding:  # only the pages of the cached prefix exist
            num_cached = num_computed_tokens // self.page_size
            request.num_released_blocks = max(num_cached - self.groups.num_window_blocks, 0)
        self.running[request.request_id] = request
        self.num_running_of[request.priority] = self.num_running_of.get(request.priority, 0) + 1
        self.waiting.started(request, num_computed_tokens)
        self.num_prefill_tokens += num_before_decode(request)
        self.num_growing += self.can_grow(request)

    def stop(self, request: Request, *, keep: bool = False) -> None:
        """Take the slot and pages from a running request, which ends or is preempted. Full pages stay cached.

        Args:
            request: running request.
            keep: True to swap it out: also cache its last page, partly filled, and its recurrent layers' state.
        """
        self.waiting.stopped(request)
        del self.running[request.request_id]
        self.num_running_of[request.priority] -= 1
        if not self.num_running_of[request.priority]:
            del self.num_running_of[request.priority]
        self.num_prefill_tokens -= num_before_decode(request)
        self.num_growing -= self.can_grow(request)
        self.free_slots.append(request.slot)
        self.store.leave(request, keep=keep)
        self.adapters.stop(request)
        self.encoder.stop(request)
        request.slot = -1
        request.num_computed_tokens = 0
        request.quiet_until = 0

    def preempt(self, request: Request, plan: StepPlan) -> None:
        """Return a running request to the head of its tenant's queue, to continue later from cached pages.

        With lower tiers it is swapped out; without them its last page is not worth a copy.

        Args:
            request: running request without a row in the plan.
            plan: current plan, which lists preempted requests.
        """
        assert request not in plan.requests, "a row of this plan must keep its pages"
        request.num_tokens_when_preempted = request.num_tokens
        self.waiting.put_back(request)  # first, so that its tenant does not become idle meanwhile
        self.stop(request, keep=self.store.has_tiers)
        request.quiet_outputs = 0  # each token is reviewed: the last one settles the tail
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.num_shared_tokens = 0
        self.count(request)
        plan.preempted.append(request)

    @property
    def lowest_priority(self) -> int:
        """Lowest class of the running requests (the largest number); there must be one."""
        return max(self.num_running_of)

    # Pages

    def num_tokens_held(self, request: Request) -> int:
        """Return how many tokens a running request's pages can hold, released pages included."""
        return len(request.pages) // self._group_size * self.page_size

    def allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Allocate the pages for a running request's next tokens; return False, without a change, if too few are free.

        Args:
            request: running request.
            num_tokens: number of tokens to compute next.
            plan: current plan, which lists requests with new pages.
        """
        if not self._compact(request, plan):
            return False
        num_new = self.store.grow(request, num_tokens)
        if num_new:
            if len(request.pages) * self.page_size >= (request.max_total_tokens - 1) * self._group_size:
                self.num_growing -= 1
            plan.grown.append(request)
        return num_new is not None

    def _compact(self, request: Request, plan: StepPlan) -> bool:
        """Let the plan compact a request's prompt before its first output token is computed.

        The copies take the places of its last prompt pages; the others, and the originals, are released. False,
        without a change, if too few pages are free for them.
        """
        num_copied = self.num_pages_to_compact(request)
        if not num_copied:
            return True
        copies = self.store.allocate(num_copied, request.tenant)
        if copies is None:
            return False
        self.store.register_blocks(request, request.num_prompt_tokens // self.page_size)  # the copies never are
        num_blocks = self.groups.num_blocks(request.num_prompt_tokens)
        self.store.release(request.pages[:num_blocks])
        request.num_hidden_blocks = num_blocks - num_copied
        request.pages[:num_blocks] = [RELEASED] * request.num_hidden_blocks + copies
        plan.compactions.append(PromptCompaction(request.slot, request.prompt_token_ids, copies))
        return True

    def num_pages_to_compact(self, request: Request) -> int:
        """Return the number of pages to which a running request's prompt must be copied next; 0 without a copy."""
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens
        return self.num_pages_to_copy(request) if is_computed else 0

    def must_wait_to_compact(self, request: Request, plan: StepPlan) -> bool:
        """Return whether a running request must wait for the next plan, because this one already copies pages.

        A step compacts prompts first: the compacted one could overwrite a page before it is copied.
        """
        return bool(plan.copies) and self.num_pages_to_compact(request) > 0

    def num_pages_left_by(self, request: Request) -> int:
        """Return the number of pages that become available when a running request's prompt has been copied."""
        prompt_pages = request.pages[: self.groups.num_blocks(request.num_prompt_tokens)]
        others = {page for other in self.running.values() if other is not request for page in other.pages}
        return sum(page not in others for page in prompt_pages)

    def must_end_at_prompt(self, request: Request) -> bool:
        """Return whether a decoding row must not pass its prompt's last token, because the prompt is compacted then."""
        return request.num_computed_tokens < request.num_prompt_tokens and self.num_pages_to_copy(request) > 0

    def num_pages_to_copy(self, request: Request) -> int:
        """Return the number of pages to which a running request's prompt will be copied; 0 if it has been, or stays."""
        sparsity = self.groups.sparsity
        if sparsity is None or request.num_hidden_blocks:
            return 0
        return sparsity.num_copied(request.num_prompt_tokens)

    def num_computable(self, request: Request, start: int) -> int:
        """Return how many tokens a running request may compute next in a row that begins at `start`."""
        end = self.groups.row_end(start, request.num_prompt_tokens)
        return min(num_remaining(request), end - request.num_computed_tokens)

    def token_capacity(self, cached: Sequence[int]) -> int:
        """Return how many tokens fit the whole pool alongside the cached pages of a prefix.

        A longer request runs only because its sliding windows release pages.
        """
        num_held = sum(page != RELEASED for page in cached) if self.groups.sliding else len(cached)
        return (self._num_pages - num_held) // self.groups.size * self.page_size

    def can_grow(self, request: Request) -> bool:
        """Return whether a running request may need another page."""
        return len(request.pages) * self.page_size < (request.max_total_tokens - 1) * self._group_size

    @property
    def num_pages_to_grow(self) -> int:
        """Pages kept free for running rows that can grow: a block for each."""
        return self.num_growing * self.groups.size

    def num_pages_kept(self, request: Request) -> int:
        """Return the number of pages that newcomers must leave for a running request: a block to grow, or more for the
        rest of its prompt.
        """
        return self._group_size * self.can_grow(request) + self.num_prompt_pages_kept(request)

    def num_prompt_pages_kept(self, request: Request) -> int:
        """Return the number of pages kept for the rest of a running request's prompt, beyond the block to grow."""
        if not in_prefill(request):
            return 0
        groups = self.groups
        num_held = len(request.pages) - request.num_released_blocks * len(groups.sliding)
        num_held -= request.num_hidden_blocks * len(groups.full)
        num_needed = groups.num_pages(request.num_tokens, request.num_prompt_tokens) - num_held
        return max(num_needed - self._group_size * self.can_grow(request), 0)

    def num_pages_short(self, num_steps: int, rows: Iterable[Request] | None = None) -> int:
        """Return the number of new pages that running rows need to compute their next `num_steps` tokens each.

        A row needs no pages beyond its maximum length.

        Args:
            num_steps: tokens per row.
            rows: running requests; None for all.
        """
        groups, rows = self.groups, list(self.running.values() if rows is None else rows)
        num_short = 0 if groups.sparsity is None else sum(map(self.num_pages_to_compact, rows))
        for request in rows:
            num_tokens = min(request.num_computed_tokens + num_steps, request.max_total_tokens - 1)
            num_short += max(groups.num_blocks(num_tokens) * groups.size - len(request.pages), 0)
        return num_short

    def cached_pages(self, request: Request) -> list[int]:
        """Return the pages of a waiting request's cached prefix; empty if the request must compute its whole prompt."""
        return self.store.index.match(request) if request.read_prefix_cache else []

    def num_pages_taken(self, request: Request, num_expected: int = 0) -> int:
        """Return the number of free pages that starting a request takes: new pages, and cached ones without an owner.

        Args:
            request: waiting request.
            num_expected: number of tokens expected to be cached when it starts. Plans must not depend on a router's
                expectations.
        """
        groups, cached = self.groups, self.cached_pages(request)
        num_shared = max(len(cached) // groups.size, num_expected // self.page_size)
        num_tokens = min(request.num_tokens, num_shared * self.page_size + self.max_num_batched_tokens)
        num_tokens = min(num_tokens, num_shared * self.page_size + self.token_capacity(cached))
        num_new = groups.num_blocks(num_tokens) - num_shared
        return self.store.num_evictable(cached) + num_new * groups.size

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved, and that states and counts are consistent."""
        owners: dict[int, int] = {}
        for request in self.running.values():
            assert request.status in RUNS, f"{request.request_id} runs as {request.status}"
            # Blocks beyond this number are left over from a plan with several steps.
            num_blocks, groups = self.num_tokens_held(request) // self.page_size, self.groups
            assert num_blocks * groups.size == len(request.pages), request
            assert num_blocks >= groups.num_blocks(request.num_computed_tokens), request
            assert num_blocks <= groups.num_blocks(request.max_total_tokens - 1), request
            num_sinks = 0 if groups.sparsity is None else groups.sparsity.num_sink_pages
            for group in range(groups.size):
                gone = range(request.num_released_blocks)
                if group in groups.full:
                    gone = range(num_sinks, num_sinks + request.num_hidden_blocks)
                pages = request.pages[group :: groups.size]
                assert [page == RELEASED for page in pages] == [block in gone for block in range(num_blocks)]
        loading = [request for request in self.waiting if request.status is RequestStatus.LOADING]
        for request in self.waiting:
            is_loading = request.status is RequestStatus.LOADING
            assert is_loading or request.status is RequestStatus.WAITING, f"{request.request_id} waits: {request}"
            held = (bool(request.pages), request.slot, request.num_computed_tokens, request.num_transfers > 0)
            assert held == (is_loading, -1, 0, is_loading), f"{request.request_id} waits but holds {held}"
        for request in (*self.running.values(), *loading):
            for page in request.pages:
                if page != RELEASED:
                    owners[page] = owners.get(page, 0) + 1
        for page in [page for request in self.waiting if request.tail for page in request.tail.pages]:
            if page != RELEASED:
                owners[page] = owners.get(page, 0) + 1
        self.store.check_integrity(owners, loading)
        assert self.num_prefill_tokens == sum(map(num_before_decode, self.running.values()))
        assert self.num_growing == sum(map(self.can_grow, self.running.values()))
        counted = self.num_waiting_tokens, self.num_waiting_pages
        self.num_waiting_tokens = self.num_waiting_pages = 0
        for request in self.waiting:
            self.count(request)
        assert counted == (self.num_waiting_tokens, self.num_waiting_pages), counted
        assert sum(self.num_running_of.values()) == len(self.running)
        self.waiting.check_integrity()
        slots = [*self.free_slots, *(request.slot for request in self.running.values())]
        assert sorted(slots) == list(self._slots), f"slots are lost or shared: {slots}"


def num_remaining(request: Request) -> int:
    """Return how many tokens a running request must compute before it samples the next one."""
    return request.num_tokens - request.num_computed_tokens


def num_before_decode(request: Request) -> int:
    """Return how many tokens a running request must compute before it decodes: all but the last, unless that is an
    image's.

    Decoding rows hold no images, and programs with drafts take no positions of images.
    """
    ends_in_image = bool(request.images) and request.images[-1].end == request.num_tokens
    return num_remaining(request) - (not ends_in_image)


def in_prefill(request: Request) -> bool:
    """Return whether a running request is between two chunks of its prompt."""
    return num_before_decode(request) > 0
