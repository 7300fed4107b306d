"""Shard: requests with their slots, pages and prefix cache.

Every replica has one, unless its attention is data parallel: then the devices of a shard hold only the keys and values
of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.scheduling.class_preemption import preempt_lower_classes
from jaxserve.scheduling.decode import DecodePlanner, may_sample_late
from jaxserve.scheduling.even_chunks import EvenChunks
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.prefill import PrefillPlanner
from jaxserve.scheduling.prompts import Prompts
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.row_turns import RowTurns
from jaxserve.scheduling.shard_view import Changes, ShardView
from jaxserve.scheduling.starts import StartPlanner
from jaxserve.scheduling.step_plan import StepChoice, StepPlan
from jaxserve.scheduling.updates import RequestUpdater


class Shard:
    """Requests of a shard, and the components that plan and update them.

    Args:
        new_ledger: returns an empty ledger.
        policy: request order and chunk sizes.
        num_spare_tokens: tokens that a row with drafts may compute and discard, beyond the sampled ones.
        new_turns: returns an empty record of the decoding rows of plans in flight.
        chunks: limit on the prompt tokens of a plan.

    Attributes:
        policy: request order and chunk sizes.
        changes: reports to the balancer that the answers of `view` have changed.
        ledger: requests and pages; this and the following attributes are replaced by `restart`.
        starts: starter of waiting requests.
        prefills: planner of rows in prefill.
        decodes: planner of decoding rows.
        turns: decoding rows of plans in flight.
        updates: updater of requests after a step.
        view: read-only view for a balancer.
        decode_waits: True if any decoding row waits for the current plan's step.
    """

    def __init__(
        self,
        new_ledger: Callable[[], Ledger],
        policy: Policy,
        num_spare_tokens: int,
        new_turns: Callable[[], RowTurns],
        chunks: EvenChunks,
    ) -> None:
        self._new_ledger, self.policy, self._num_spare_tokens = new_ledger, policy, num_spare_tokens
        self._new_turns, self._chunks = new_turns, chunks
        self.changes = Changes()
        self.restart()

    def restart(self) -> None:
        """Forget all requests and cached pages."""
        self.ledger = ledger = self._new_ledger()
        prompts = Prompts(ledger, self.policy)
        self.starts = StartPlanner(ledger, self.policy, prompts)
        self.prefills = PrefillPlanner(ledger, self.policy, prompts, self.starts)
        self.decodes = DecodePlanner(ledger, self.policy, self._num_spare_tokens)
        self.turns = self._new_turns()
        self.updates = RequestUpdater(ledger, self.starts)
        self.changes.note(has_lost_cache=True)
        self.view = ShardView(ledger, prompts, self.starts, self.changes)
        # The current plan
        self._num_displaced = 0  # rows preempted for higher classes
        self._held_back: list[Request] = []  # held-back decoding rows, which get left-over tokens
        self._in_prefill: list[Request] = []  # running rows between two chunks
        self.decode_waits = False

    @property
    def load(self) -> int:
        """Load in tokens: those to compute before a request added now, plus those that rows attend to."""
        return self.view.load + self.ledger.num_pages_used * self.ledger.page_size // self.ledger.groups.size

    def add(self, request: Request) -> None:
        """Queue a new request, which fits."""
        self.ledger.enqueue(request)
        self.starts.arrived(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request, waiting or running."""
        self.updates.end(request, reason)
        self.changes.note()

    def withdraw(self) -> list[Request]:
        """Remove and return the waiting requests in order.

        Requests with tokens on the device stay, because their uncomputed tokens are not known yet.
        """
        withdrawn = [request for request in self.ledger.waiting.in_order() if not request.num_pending_tokens]
        for request in withdrawn:
            self.ledger.dequeue(request)
            self.starts.forget(request)
        self.changes.note()
        return withdrawn

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; running requests keep their pages."""
        self.ledger.store.reset(self.ledger.running.values())
        self.changes.note(has_lost_cache=True)

    def transferred(self, keys: Iterable[int], *, ok: bool) -> None:
        """Make the pages usable whose moves between tiers, by key, have ended; `ok` is False if content was lost."""
        self.ledger.store.transferred(keys, ok=ok)
        self.changes.note()

    # Stages of a plan, each called once, in this order

    def preempt_lower_classes(self, plan: StepPlan) -> None:
        """Begin a plan: preempt running rows for unfinished prompts and waiting requests of higher classes."""
        self.changes.note(was_planned=True)
        self.ledger.adapters.begin_plan()
        self.ledger.encoder.begin_plan()
        if (states := self.ledger.store.states) is not None:
            states.begin_plan()
        preempt_lower_classes(self.ledger, self.policy, plan)
        self._num_displaced = len(plan.preempted)

    def decode(self, plan: StepPlan, limits: StepChoice) -> None:
        """Add the decoding rows to a plan within `limits`, preempting the last rows if pages run out."""
        rows = self.ledger.running.values()
        plan.num_steps = limits.max_steps
        plan.is_split = limits.may_split and any(map(may_sample_late, rows))
        resting = self.turns.resting(rows, plan.step_id)
        self._held_back = [row for row in self.decodes.rows_to_hold_back() if row not in resting]
        self._in_prefill = self.decodes.schedule(plan, [*self._held_back, *resting], limits.num_drafts)
        has_row = bool(plan.requests or self._held_back or resting)
        self.decode_waits = has_row or any(row.status is RequestStatus.BLOCKED for row in rows)

    def fill(self, plan: StepPlan, max_prefill_tokens: int) -> None:
        """Complete a plan: add prompts with at most `max_prefill_tokens`, then held-back decoding rows if budget is
        left.
        """
        start = self._in_prefill[0].num_computed_tokens if self._in_prefill else 0
        num_left = self.ledger.num_prefill_tokens + self.ledger.num_waiting_tokens
        self.prefills.schedule(
            plan,
            self._in_prefill,
            decode_waits=self.decode_waits,
            num_displaced=self._num_displaced,
            max_tokens=min(max_prefill_tokens, self._chunks.max_tokens(start, num_left, plan.num_tokens)),
        )
        if self._held_back:
            self.decodes.schedule_held_back(plan, self._held_back)
        if plan.num_steps > 1 and not plan.num_drafts:
            plan.num_steps = max(plan.max_new, default=1)
        plan.slots = [request.slot for request in plan.requests]
        self.turns.planned(plan)
        plan.num_pages_used = self.ledger.num_pages_used

    def check_integrity(self) -> None:
        """Assert that pages and slots are conserved and that every request is in the right collection."""
        self.ledger.check_integrity()
        self.starts.check_integrity()
