"""ShardView: read-only answers to a balancer, such as whether a shard could start a request now."""

import sys
from dataclasses import dataclass, field

from jaxserve.scheduling.class_preemption import fits_after_preemption
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.router import ROW_CHARGE_TOKENS, Prefix, Start
from jaxserve.scheduling.starts import StartPlanner


@dataclass(slots=True)
class Changes:
    """Reports that a shard's `ShardView` may answer differently, for the balancer's next look.

    The balancer itself knows of the requests that it adds.

    Attributes:
        was_planned: True if a plan was requested.
        has_lost_cache: True if all cached pages were dropped.
        changed: indices of changed targets; a set that the balancer shares among all targets.
        index: index of this target.
    """

    was_planned: bool = False
    has_lost_cache: bool = False
    changed: set[int] = field(default_factory=set)
    index: int = 0

    def note(self, *, was_planned: bool = False, has_lost_cache: bool = False) -> None:
        """Report a change, with its cause if the balancer must know it."""
        self.was_planned |= was_planned
        self.has_lost_cache |= has_lost_cache
        self.changed.add(self.index)


class ShardView:
    """Read-only answers about a shard's load and free capacity, for a balancer.

    Args:
        ledger: requests and pages.
        prompts: unfinished prompts.
        starts: starter of waiting requests.
        changes: reports of changes in the answers.

    Attributes:
        changes: reports of changes in the answers.
    """

    def __init__(self, ledger: Ledger, prompts: Prompts, starts: StartPlanner, changes: Changes) -> None:
        self._ledger, self._prompts, self._starts, self.changes = ledger, prompts, starts, changes

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot."""
        return len(self._ledger.waiting)

    @property
    def is_idle(self) -> bool:
        return not (self._ledger.running or self._ledger.waiting)

    @property
    def load(self) -> int:
        """Tokens to compute before a request added now, plus a charge per request."""
        ledger, num_running = self._ledger, len(self._ledger.running)
        num_tokens = num_running + ledger.num_prefill_tokens + ledger.num_waiting_tokens
        return num_tokens + ROW_CHARGE_TOKENS * (num_running + len(ledger.waiting))

    def is_open(self, priority: int = sys.maxsize) -> bool:
        """Return whether the next plan could start any request of this class after the waiting ones."""
        ledger = self._ledger
        may_displace = bool(ledger.running) and ledger.lowest_priority > priority
        return may_displace or self._num_pages_left() >= ledger.groups.size

    def could_start(self, request: Request) -> Start:
        """Return whether the next plan could start a request after the waiting ones.

        Decoding rows that need a page in that plan may still take pages counted as free here.
        """
        ledger, num_left = self._ledger, self._num_pages_left()
        if self._starts.would_skip(request):
            return Start.LATER
        if ledger.groups.num_blocks(request.num_tokens) * ledger.groups.size <= num_left:  # even with nothing cached
            return Start.NOW
        fits = num_left > 0 and ledger.num_pages_taken(request, request.num_shared_tokens) <= num_left
        return Start.NOW if fits or self._could_preempt(request) else Start.FULL

    def prefix(self, request: Request) -> Prefix:
        """Return a request's sampled prefixes of whole pages, which other requests may share."""
        page_size, hashes = self._ledger.page_size, self._ledger.store.index.hashes(request)
        return Prefix.from_hashes(hashes, page_size, (request.num_known_tokens - 1) // page_size)

    def _num_pages_left(self) -> int:
        """Return the pages left for newcomers after the waiting requests; 0 without a free slot or token."""
        ledger = self._ledger
        if len(ledger.waiting) >= len(ledger.free_slots):
            return 0
        if ledger.num_waiting_tokens >= self._prompts.next_budget_left():
            return 0
        return ledger.num_available - self._prompts.num_pages_kept - ledger.num_waiting_pages

    def _could_preempt(self, request: Request) -> bool:
        """Return whether preempting lower classes would fit the request after the waiting ones of its class."""
        ledger = self._ledger
        if not ledger.running or ledger.lowest_priority <= request.priority:
            return False
        num_ahead = ledger.waiting.num_ahead(request.priority)
        num_pages = ledger.num_pages_taken(request) + ledger.groups.size
        num_pages += ledger.num_waiting_pages if num_ahead else 0
        return fits_after_preemption(request.priority, num_ahead + 1, num_pages, ledger)
