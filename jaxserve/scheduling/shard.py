"""Shard: slots, pages and a prefix cache of their own, and the requests that have or wait for them.

Every replica has one, unless its attention is data parallel: then the devices of a shard have the keys and values of
its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.admission import Admission, Changes
from jaxserve.scheduling.decode import Decodes
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import Prefills
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.starts import Starts
from jaxserve.scheduling.updates import Updates


class Shard:
    """Requests of a shard, and the parts that change them. A scheduler has its plans made, all others only read.

    Args:
        new_ledger: returns an empty ledger.
        policy: order of requests, and a prompt's share of a step.
        num_spare_tokens: tokens that a row with drafts may compute, and not keep, beyond those it may sample.

    Attributes:
        policy: order of requests, and a prompt's share of a step.
        changes: changes of the requests.
        ledger: requests and pages; this and the following are other objects after `restart`.
        starts: start of requests.
        prefills: rows in prefill.
        decodes: rows in decode.
        updates: what becomes of plans.
        admission: answers to a balancer.
    """

    def __init__(self, new_ledger: Callable[[], Ledger], policy: Policy, num_spare_tokens: int) -> None:
        self._new_ledger, self.policy, self._num_spare_tokens = new_ledger, policy, num_spare_tokens
        self.changes = Changes()
        self.restart()

    def restart(self) -> None:
        """Forget all requests and cached pages."""
        self.ledger = ledger = self._new_ledger()
        prompts = Prompts(ledger, self.policy)
        self.starts = Starts(ledger, self.policy, prompts)
        self.prefills = Prefills(ledger, self.policy, prompts, self.starts)
        self.decodes = Decodes(ledger, self.policy, self._num_spare_tokens)
        self.updates = Updates(ledger, self.starts)
        self.changes.lost_cache()
        self.admission = Admission(ledger, prompts, self.starts, self.changes)

    @property
    def load(self) -> int:
        """Tokens to compute before those of a request added now, and to attend to: shards take equally long if even."""
        return self.admission.load + self.ledger.num_pages_used * self.ledger.page_size // self.ledger.groups.size

    def add(self, request: Request) -> None:
        """Queue a new request, which fits."""
        self.ledger.enqueue(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is."""
        self.updates.end(request, reason)
        self.changes.note()

    def withdraw(self) -> list[Request]:
        """Forget requests that wait and return them in their order.

        Those with tokens on the device stay: what there is to compute of them is not known yet.
        """
        withdrawn = [request for request in self.ledger.waiting.in_order() if not request.num_pending_tokens]
        for request in withdrawn:
            self.ledger.dequeue(request)
            self.starts.forget(request)
        self.changes.note()
        return withdrawn

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, but for what running requests have pages of."""
        self.ledger.store.reset(self.ledger.running.values())
        self.changes.lost_cache()

    def transferred(self, keys: Iterable[int], *, ok: bool) -> None:
        """Take the end of moves of pages between tiers."""
        self.ledger.store.transferred(keys, ok=ok)
        self.changes.note()

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is where its status says."""
        self.ledger.check_integrity()
        self.starts.check_integrity()
