"""Admission: whether a scheduler could start a request that is queued before it, and what it has to do before."""

from jaxserve.request import Request
from jaxserve.scheduling.ledger import Demand, Ledger
from jaxserve.scheduling.prefill import Prefills
from jaxserve.scheduling.router import ROW_CHARGE_TOKENS, Prefix


class Admission:
    """Answers to those who queue requests, from the state of one scheduler, which they only read.

    Args:
        ledger: requests and pages of the scheduler.
        prefills: its prompts.
    """

    def __init__(self, ledger: Ledger, prefills: Prefills) -> None:
        self._ledger, self._prefills = ledger, prefills

    @property
    def load(self) -> int:
        """Tokens to compute before those of a request added now, and a charge for every request."""
        return self.load_behind(self._ledger.waiting_demand)

    def load_behind(self, ahead: Demand) -> int:
        """Return the load before a request that comes behind these waiting ones."""
        ledger, num_running = self._ledger, len(self._ledger.running)
        num_tokens = num_running + ledger.num_prefill_tokens + ahead.num_tokens
        return num_tokens + ROW_CHARGE_TOKENS * (num_running + ahead.num_requests)

    @property
    def running(self) -> list[Request]:
        """Requests with pages and a slot, in the order of admission."""
        return list(self._ledger.running.values())

    @property
    def waiting(self) -> list[Request]:
        """Requests without: by class, by tenant, in the order of arrival."""
        return list(self._ledger.waiting)

    @property
    def queued(self) -> Demand:
        """Demand of all of these."""
        return self._ledger.waiting_demand

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that these have to compute, as far as is known."""
        return self._ledger.num_waiting_tokens

    def has_room(self, request: Request | None = None, ahead: Demand | None = None) -> bool:
        """Return whether the next plan has a slot, budget and pages to start `request`, or any that takes one page.

        Requests that wait here come first, or those `ahead` where they are given. Rows in decode that need a page in
        that plan may still take pages that count as free, and the plan may pass over `request` if it `must_wait`.
        """
        ledger = self._ledger
        num_ahead, num_tokens, num_pages = ahead or ledger.waiting_demand
        if num_ahead >= len(ledger.free_slots):
            return False
        if num_tokens >= self._prefills.num_budget_left():
            return False
        num_left = ledger.num_available - self._prefills.num_pages_kept - num_pages
        num_columns = 1 if request is None else ledger.groups.num_columns(request.num_tokens)
        if num_columns * ledger.groups.size <= num_left:  # whatever of it is cached
            return True
        return request is not None and max(ledger.num_pages_taken(request, request.num_shared_tokens), 1) <= num_left

    def would_yield(self, priority: int, num_ahead: int, request: Request | None = None) -> bool:
        """Return whether rows of lower classes would give way to `request`, or to any of a class.

        Args:
            priority: class of the request.
            num_ahead: waiting requests that come before it.
            request: the request; None for any that has the pages it needs.
        """
        ledger = self._ledger
        if not ledger.running or ledger.lowest_priority <= priority:
            return False
        lower = [other for other in ledger.running.values() if other.priority > priority]
        if num_ahead >= len(ledger.free_slots) + len(lower):
            return False
        num_freed = sum(len(other.pages) + ledger.groups.size for other in lower)
        num_left = ledger.num_available - self._prefills.num_pages_kept + num_freed
        return request is None or ledger.num_pages_taken(request) + ledger.groups.size <= num_left

    def num_ahead(self, priority: int) -> int:
        """Return the number of waiting requests of a class and those above."""
        return self._ledger.waiting.num_ahead(priority)

    def demand(self, request: Request) -> Demand:
        """Return what the start of a waiting request takes."""
        return self._ledger.demand(request)

    def num_cached_tokens(self, request: Request) -> int:
        """Return the tokens of a waiting request that are cached here."""
        ledger = self._ledger
        return len(ledger.cached_pages(request)) // ledger.groups.size * ledger.page_size

    def must_wait(self, request: Request) -> bool:
        """Return whether the next plan would pass over `request`, because it waits for an unfinished prompt."""
        return self._prefills.must_wait(request)

    def prefix(self, request: Request) -> Prefix:
        """Return the sampled prefixes of a request that others may share with it."""
        page_size = self._ledger.page_size
        return Prefix.of(self._ledger.store.hashes(request), page_size, (request.num_known_tokens - 1) // page_size)
