"""Shard: slots, pages and a prefix cache of their own, and the requests that have or wait for them.

Every replica has one, unless its attention is data parallel: then the devices of a shard have the keys and values of
its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.scheduling.admission import Admission, Changes
from jaxserve.scheduling.choice import StepChoice
from jaxserve.scheduling.class_preemption import preempt_lower_classes
from jaxserve.scheduling.decode import Decodes, may_sample_late
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import Prefills
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.starts import Starts
from jaxserve.scheduling.step_plan import StepPlan
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
        # The plan being made
        self._num_displaced = 0  # rows preempted for requests of higher classes
        self._held_back: list[Request] = []  # decoding rows that get the tokens that prompts leave
        self._in_prefill: list[Request] = []  # running rows between two chunks
        self._decode_waits = False  # True if any row in decode waits for the step

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

    # A plan: each part is made once, in their order here

    def preempt_lower_classes(self, plan: StepPlan) -> None:
        """Have rows give way to waiting requests of higher classes."""
        self.changes.planned()
        if (states := self.ledger.store.states) is not None:
            states.begin_plan()
        preempt_lower_classes(self.ledger, self.policy, plan)
        self._num_displaced = len(plan.preempted)

    def decode(self, plan: StepPlan, limits: StepChoice) -> None:
        """Give decoding rows their tokens, as far as there are pages."""
        rows = self.ledger.running.values()
        plan.num_steps = limits.max_steps
        plan.is_split = limits.may_split and any(map(may_sample_late, rows))
        self._held_back = self.decodes.rows_to_hold_back()
        self._in_prefill = self.decodes.schedule(plan, self._held_back, limits.num_drafts)
        has_row = bool(plan.requests or self._held_back)
        self._decode_waits = has_row or any(row.status is RequestStatus.BLOCKED for row in rows)

    def fill(self, plan: StepPlan, max_prefill_tokens: int) -> None:
        """Fill the plan with rows in prefill, up to a number of tokens, and with decoding rows held back before."""
        self.prefills.schedule(
            plan,
            self._in_prefill,
            decode_waits=self._decode_waits,
            num_displaced=self._num_displaced,
            max_tokens=max_prefill_tokens,
        )
        if self._held_back:
            self.decodes.schedule_held_back(plan, self._held_back)
        if plan.num_steps > 1 and not plan.num_drafts:
            plan.num_steps = max(plan.max_new, default=1)
        plan.slots = [request.slot for request in plan.requests]
        plan.num_pages_used = self.ledger.num_pages_used

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is where its status says."""
        self.ledger.check_integrity()
        self.starts.check_integrity()
