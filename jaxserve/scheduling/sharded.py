"""ShardedScheduler: one plan for all shards of the rows, each with slots, pages and a prefix cache of its own.

Where attention is data parallel, the devices of a shard have the keys and values of its rows alone, and a step gives
each shard an equal share of the token axis. So each shard has a scheduler of its own, and their plans are joined: the
rows of one shard follow those of another. A request goes to a shard as soon as it comes: to the one with the least to
compute and to hold, or one that has its prefix; if none has room, to one where rows of lower classes give way. Where
a shard could start a request of a class at once, and nothing of that class or above waits for it, requests that wait
for others move there: those of the highest class first, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.choice import ONE_STEP, StepChoice
from jaxserve.scheduling.ledger import Demand
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.router import NO_PREFIX, Prefix, Router
from jaxserve.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from jaxserve.schedule_config import ScheduleConfig


def _turn(request: Request) -> tuple[int, int]:
    """Return the key by which requests of all shards come in turn; without classes all have the same priority."""
    return request.priority, request.arrival


class ShardedAdmission:
    """Requests of all shards, for those who estimate how long others wait."""

    def __init__(self, shards: Sequence[Scheduler]) -> None:
        self._shards = shards

    @property
    def running(self) -> list[Request]:
        """Requests with pages and a slot, shard by shard."""
        return [request for shard in self._shards for request in shard.admission.running]

    @property
    def waiting(self) -> list[Request]:
        """Requests without, shard by shard."""
        return [request for shard in self._shards for request in shard.admission.waiting]

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that these have to compute, as far as is known."""
        return sum(shard.admission.num_waiting_tokens for shard in self._shards)


class ShardedScheduler:
    """Schedulers of all shards behind the interface of one; see `Scheduler` for what is not described here.

    Args:
        schedule: sizes of all shards together.

    Attributes:
        shards: scheduler of each shard.
        max_prompt_tokens: most tokens of one prompt in a step.
        admission: requests of all shards.
    """

    def __init__(self, schedule: ScheduleConfig) -> None:
        own, count = schedule.of_shard, schedule.num_data_shards
        self.shards = [Scheduler.of(own, first_slot=index * own.max_num_seqs) for index in range(count)]
        self.max_num_seqs, self.max_num_batched_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.num_pages, self.page_size, self.groups = schedule.num_pages, schedule.page_size, schedule.kv_groups
        self.policy = self.shards[0].policy
        self.admission = ShardedAdmission(self.shards)
        self.max_prompt_tokens = own.max_num_batched_tokens
        self._shard_pages = own.num_pages
        self._router = Router(count)
        self._requests: dict[str, tuple[Request, int]] = {}  # unfinished requests, and the shard of each
        self._parts: dict[int, list[tuple[int, StepPlan]]] = {}  # plans of shards in flight, with their rows, by id
        self._next_step_id = 0
        self._last_updated_step_id = -1

    @property
    def num_waiting(self) -> int:
        """Requests without pages and slot."""
        return sum(shard.num_waiting for shard in self.shards)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that wait for a prompt with which they share a prefix."""
        return sum(shard.num_deferred for shard in self.shards)

    @property
    def num_running(self) -> int:
        """Requests with pages and a slot."""
        return sum(shard.num_running for shard in self.shards)

    @property
    def num_even_rows(self) -> int:
        """Running requests, if each shard had as many as the fullest."""
        return len(self.shards) * max(shard.num_running for shard in self.shards)

    @property
    def running_slots(self) -> list[int]:
        """Slots of the running requests."""
        return [slot for shard in self.shards for slot in shard.running_slots]

    @property
    def waiting_slots(self) -> list[int]:
        """Slots of the running requests whose every token must be read before the next is sampled."""
        return [slot for shard in self.shards for slot in shard.waiting_slots]

    @property
    def has_split_rows(self) -> bool:
        """True if a running request can compute a token before it is read, but not sample the next."""
        return any(shard.has_split_rows for shard in self.shards)

    @property
    def wants_logprobs(self) -> bool:
        """True if a running request wants log probabilities of its samples."""
        return any(shard.wants_logprobs for shard in self.shards)

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests own."""
        return sum(shard.num_pages_used for shard in self.shards)

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return any(shard.has_unfinished() for shard in self.shards)

    # Events

    def add(self, request: Request) -> None:
        """Queue a new request at a shard."""
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id must be unique among unfinished requests, got {request.request_id!r} again; "
                "use another id, or abort the request that has it"
            )
        indices: Collection[int] = range(len(self.shards))
        lower = [index for index in indices if self.shards[index].admission.would_yield(request.priority, 0)]
        if lower and not any(shard.admission.has_room(request) for shard in self.shards):
            num_ahead = [shard.admission.num_ahead(request.priority) for shard in self.shards]
            indices = [index for index in lower if self._would_yield(request, index, num_ahead[index])] or indices
        self._bind(request, self._cheapest(request, indices, [shard.admission.queued for shard in self.shards]))

    def check_fits(self, request: Request) -> None:
        """Raise RequestError where a request could not run to its end even alone on its shard."""
        self.shards[0].check_fits(request)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request in whatever state it is."""
        if request_id not in self._requests:
            return None
        _, index = self._requests.pop(request_id)
        return self.shards[index].finish(request_id, reason)

    def withdraw(self) -> list[Request]:
        """Forget the requests that wait and return them by class, in the order in which they came."""
        withdrawn = [request for shard in self.shards for request in shard.withdraw()]
        for request in withdrawn:
            del self._requests[request.request_id]
        return sorted(withdrawn, key=_turn)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content."""
        for index, shard in enumerate(self.shards):
            self._router.forget(index)
            shard.reset_prefix_cache()

    def transferred(self, keys: Sequence[int], *, ok: bool) -> None:
        """Take the end of moves between tiers; shards have none below device memory."""
        assert not keys, "no shard has asked for a move"

    def restart(self) -> None:
        """Go on as a new scheduler would."""
        self._requests.clear()
        self._parts.clear()
        for index, shard in enumerate(self.shards):
            self._router.forget(index)
            shard.restart()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request."""
        request, index = self._requests[request_id]
        taken = self.shards[index].extend(request_id, token_ids)
        if request.status is RequestStatus.FINISHED:
            del self._requests[request_id]
        return taken

    # One step

    def schedule(self, choice: StepChoice = ONE_STEP) -> StepPlan | None:
        """Plan the next step of all shards, as many steps at once as each of them can go."""
        max_steps, num_drafts, timing, may_split = choice
        assert not num_drafts, "there is no speculation where rows are divided; the config checks it"
        self._distribute()
        begun = [shard.planning.begin(self._next_step_id) for shard in self.shards]
        busy, num_steps = [shard for shard in self.shards if shard.has_unfinished()], max_steps
        if num_steps > 1:
            num_steps = min(num_steps, max((shard.planning.steps_left() for shard in busy), default=0))
        for shard in busy:
            num_steps = shard.planning.most_steps(num_steps) if num_steps > 1 else 1
        may_split = may_split and all(shard.planning.most_steps(1) for shard in busy)
        decoded = [
            shard.planning.decode(plan, max(num_steps, 1), may_split=may_split)
            for shard, plan in zip(self.shards, begun, strict=True)
        ]
        deadlines = self.shards[0].deadlines
        most_tokens = deadlines.most_prefill_tokens(begun, timing)
        parts = [shard.planning.fill(part, most_tokens) for shard, part in zip(self.shards, decoded, strict=True)]
        deadlines.note_first_tokens(begun, timing)
        if not any(parts):
            return None
        joined = self._join(begun, parts)
        self._parts[joined.step_id] = [(index, part) for index, part in enumerate(parts) if part is not None]
        self._next_step_id += 1
        return joined

    def update(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Take the token ids that each row of a plan has sampled; return the requests that they ended."""
        assert plan.step_id > self._last_updated_step_id, "plans must be updated once each, in order"
        self._last_updated_step_id = plan.step_id
        ended: list[Request] = []
        first = 0
        for index, part in self._parts.pop(plan.step_id):
            ended += self.shards[index].update(part, sampled[first : first + part.num_rows])
            first += part.num_rows
        for request in ended:
            del self._requests[request.request_id]
        return ended

    def check_integrity(self) -> None:
        """Assert that every shard is sound, and that each request is where it is thought to be."""
        for index, shard in enumerate(self.shards):
            shard.check_integrity()
            own = {each.request_id for each in (*shard.admission.running, *shard.admission.waiting)}
            assert own == {request_id for request_id, (_, other) in self._requests.items() if other == index}

    # Parts

    def _prefix(self, request: Request) -> Prefix:
        return self.shards[0].admission.prefix(request) if request.read_prefix_cache else NO_PREFIX

    def _would_yield(self, request: Request, index: int, num_ahead: int) -> bool:
        return self.shards[index].admission.would_yield(request.priority, num_ahead, request)

    def _cheapest(self, request: Request, indices: Collection[int], ahead: Sequence[Demand]) -> int:
        """Return the shard of least cost for a request.

        The load of a shard is what there is to compute before, and the tokens that its rows hold pages of.

        Args:
            request: the request.
            indices: shards to choose from, one at least.
            ahead: demand of the requests that come before it in each shard.
        """
        for index, shard in enumerate(self.shards):
            num_held = shard.num_pages_used * self.page_size // self.groups.size
            load = shard.admission.load_behind(ahead[index]) + num_held
            self._router.set_load(index, load, is_open=index in indices)
        route = self._router.choose(self._prefix(request), only_open=True)
        assert route is not None, "a shard is open"
        return route.replica

    def _bind(self, request: Request, index: int) -> None:
        """Give a request to a shard, which will have its prefix."""
        self.shards[index].add(request)
        self._requests[request.request_id] = request, index
        self._router.note(index, self._prefix(request))

    def _move(self, request: Request, source: int, target: int) -> None:
        """Move a waiting request, and what is expected to be cached for it."""
        self.shards[source].withdraw([request])
        num_cached = self.shards[source].admission.num_cached_tokens(request)
        self._router.drop(source, self._prefix(request), num_cached)
        self._bind(request, target)

    def _distribute(self) -> None:
        """Move waiting requests to shards that can start them, and for which none waits of their class or above."""
        if not self.num_waiting:
            return
        first = [shard.first_waiting_priority for shard in self.shards]
        ahead = [Demand() for _ in self.shards]
        if not self._takers(min(first), first, ahead):
            return
        waiting = [(each, index) for index, shard in enumerate(self.shards) for each in shard.admission.waiting]
        for request, own in sorted(waiting, key=lambda entry: _turn(entry[0])):
            takers = self._takers(request.priority, first, ahead)
            if not takers:  # nor are there any for those behind it
                return
            index = own if request.num_pending_tokens else self._best(request, own, takers, ahead)
            if index != own:
                self._move(request, own, index)
            ahead[index] = ahead[index].plus(self.shards[index].admission.demand(request))

    def _takers(self, priority: int, first: Sequence[int], ahead: Sequence[Demand]) -> list[int]:
        """Return the shards that could start some request of a class now, if it came behind those ahead.

        Args:
            priority: the class.
            first: highest class that waits for each shard but for those that have moved.
            ahead: demand of those ahead, by shard.
        """
        return [
            index
            for index, shard in enumerate(self.shards)
            if first[index] > priority
            and (
                shard.admission.has_room(None, ahead[index])
                or shard.admission.would_yield(priority, ahead[index].num_requests)
            )
        ]

    def _best(self, request: Request, own: int, takers: Sequence[int], ahead: Sequence[Demand]) -> int:
        """Return the shard of least cost that has room for a request, else whose rows would give way, else its own."""
        indices = [own, *takers]
        have_room = [index for index in indices if self.shards[index].admission.has_room(request, ahead[index])]
        able = have_room or [index for index in indices if self._would_yield(request, index, ahead[index].num_requests)]
        return self._cheapest(request, able, ahead) if able else own

    def _join(self, begun: Sequence[StepPlan], parts: Sequence[StepPlan | None]) -> StepPlan:
        """Return the plan of all rows: those of one shard after those of another."""
        plan = StepPlan(self._next_step_id)
        for index, part in enumerate(parts):
            plan.preempted += begun[index].preempted
            if part is None:
                continue
            for name in ("requests", "slots", "starts", "counts", "max_new", "admitted", "grown"):
                getattr(plan, name).extend(getattr(part, name))
            first_page = index * self._shard_pages
            plan.copies += [(first_page + source, first_page + target) for source, target in part.copies]
            for name in ("num_decode_tokens", "num_prefill_tokens", "num_cached_tokens"):
                setattr(plan, name, getattr(plan, name) + getattr(part, name))
            plan.wants_logprobs |= part.wants_logprobs
            plan.wants_prompt_logprobs |= part.wants_prompt_logprobs
            plan.is_split |= part.is_split
            plan.num_steps = max(plan.num_steps, part.num_steps)
        plan.num_pages_used = self.num_pages_used
        most = max(part.num_tokens for part in parts if part is not None)
        plan.num_uneven_tokens = most * len(parts) - plan.num_tokens
        return plan


AnyScheduler = Scheduler | ShardedScheduler


def new_scheduler(schedule: ScheduleConfig) -> AnyScheduler:
    """Return the scheduler of one pool, or of the pools of all shards."""
    return Scheduler.of(schedule) if schedule.num_data_shards == 1 else ShardedScheduler(schedule)
