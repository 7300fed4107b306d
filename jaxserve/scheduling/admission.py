"""Admission: whether a scheduler could start a request that is queued before it, and what it has to do before."""

from jaxserve.request import Request
from jaxserve.scheduling.ledger import Ledger
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
        ledger = self._ledger
        return ledger.num_tokens_ahead + ROW_CHARGE_TOKENS * (len(ledger.running) + len(ledger.waiting))

    @property
    def running(self) -> list[Request]:
        """Requests with pages and a slot, in the order of admission."""
        return list(self._ledger.running.values())

    @property
    def waiting(self) -> list[Request]:
        """Requests without: by class, by tenant, in the order of arrival."""
        return list(self._ledger.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that these have to compute, as far as is known."""
        return self._ledger.num_waiting_tokens

    def has_room(self, request: Request | None = None) -> bool:
        """Return whether the next plan has a slot, budget and pages to start `request`, or any that takes one page.

        Requests that wait here come first. Rows in decode that need a page in that plan may still take pages that count
        as free, and the plan may pass over `request` if it `must_wait`.
        """
        ledger = self._ledger
        if len(ledger.waiting) >= len(ledger.free_slots):
            return False
        if ledger.num_waiting_tokens >= self._prefills.num_budget_left():
            return False
        num_left = ledger.num_available - self._prefills.num_pages_kept - ledger.num_waiting_pages
        num_columns = 1 if request is None else ledger.groups.num_columns(request.num_tokens)
        if num_columns * ledger.groups.size <= num_left:  # whatever of it is cached
            return True
        return request is not None and max(ledger.num_pages_taken(request, request.num_shared_tokens), 1) <= num_left

    def must_wait(self, request: Request) -> bool:
        """Return whether the next plan would pass over `request`, because it waits for an unfinished prompt."""
        return self._prefills.must_wait(request)

    def prefix(self, request: Request) -> Prefix:
        """Return the sampled prefixes of a request that others may share with it."""
        page_size = self._ledger.page_size
        return Prefix.of(self._ledger.cache.hashes(request), page_size, (request.num_known_tokens - 1) // page_size)
