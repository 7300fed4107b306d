"""Events: everything that reaches the core, and everything on which a replica's plans depend.

A scheduler is a pure function of its events and their order, so a replica's events reproduce its plans elsewhere: in
the other processes of a lock-step run, which must start the same programs in the same order for the collectives of
their devices, and in the replay of a recorded log. Only the leading process has texts, a clock and users. Everything
that depends on time (the choice for a plan) is part of an event, and so are the sampled tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from jaxserve.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.scheduling.step_plan import StepChoice, StepPlan, StepShape


# Events for the core


class Submitted(NamedTuple):
    """New samples to queue."""

    requests: Sequence[Request]


class Cancelled(NamedTuple):
    """Samples to end, unless they have ended."""

    keys: Sequence[int]
    reason: FinishReason


class CacheReset(NamedTuple):
    """The prefix cache is to be emptied."""

    with_adapters: bool = False  # True if adapters without rows are to be loaded again, as after a change of weights


class Transferred(NamedTuple):
    """Page moves between tiers have ended."""

    keys: Sequence[int]  # keys of the moves
    ok: bool  # False if their content is lost
    replica: int = 0  # index of the replica that requested them


class DraftsAllowed(NamedTuple):
    """Steps should use drafts if available, or never."""

    is_allowed: bool


Event = Submitted | Cancelled | CacheReset | Transferred | DraftsAllowed

# Events of a replica


class Added(NamedTuple):
    """A request was queued."""

    request: Request


class Finished(NamedTuple):
    """A request was ended from outside: aborted, or by a stop string."""

    request_id: str
    reason: FinishReason


class Withdrawn(NamedTuple):
    """Waiting requests were taken back, for another replica."""


class Scheduled(NamedTuple):
    """A plan was requested."""

    choice: StepChoice  # limits of the plan
    program: StepShape | None  # program that runs the plan; None if there was nothing to plan
    digest: int  # digest of all plans up to this one, since the last recovery


class Updated(NamedTuple):
    """Token ids sampled by each row of the oldest plan in flight."""

    token_ids: Sequence[list[int]]


class Found(NamedTuple):
    """A lower tier, which others write, too, was asked for the pages of a prompt."""

    tier: int  # its number
    present: Sequence[tuple[int, str]]  # group and hash, in hexadecimal, of the pages that it has
    absent: Sequence[tuple[int, str]]  # those that it has not


class Extended(NamedTuple):
    """A request continues with tokens that no plan has sampled."""

    request_id: str
    token_ids: Sequence[int]


class Recovered(NamedTuple):
    """A step broke off, and its requests were ended: steps in flight and cached pages are forgotten."""


class WeightsRead(NamedTuple):
    """New weights were read from this directory."""

    path: str


class AdapterPart(NamedTuple):
    """The next bytes of an adapter that was given as tensors, in base64; `AdapterRead` follows the last ones."""

    digest: str
    content: str


class AdapterRead(NamedTuple):
    """An adapter was read; every process is to do so before requests have it.

    Attributes:
        path: its directory; empty if its bytes were sent before.
        digest: hash over its content.
    """

    path: str
    digest: str


class AdapterEvicted(NamedTuple):
    """An adapter without requests has left host memory; `AdapterRead` precedes its next request."""

    digest: str


class AdapterDropped(NamedTuple):
    """An adapter has neither name nor requests left."""

    digest: str


AdapterEvent = AdapterPart | AdapterRead | AdapterEvicted | AdapterDropped
DeviceEvent = WeightsRead | AdapterEvent  # has no effect on plans
ReplicaEvent = (
    Added
    | Finished
    | Withdrawn
    | CacheReset
    | Transferred
    | Found
    | Scheduled
    | Updated
    | Extended
    | Recovered
    | DeviceEvent
)
Record = Callable[[ReplicaEvent], None]


def replay(
    events: Iterable[ReplicaEvent],
    scheduler: Scheduler,
    launch: Callable[[StepPlan, StepShape], object] = lambda plan, program: None,
    on_device_event: Callable[[DeviceEvent], None] = lambda event: None,
) -> int:
    """Replay a replica's plans from its events, and return their number.

    Args:
        events: all events, in order.
        scheduler: a new scheduler with the same sizes.
        launch: called with each plan and its program.
        on_device_event: called with each event that concerns only the devices.

    Raises:
        RuntimeError: a plan differs from the recorded one.
    """
    in_flight: deque[StepPlan] = deque()
    digest = num_plans = 0
    for event in events:
        match event:
            case Added(request):
                scheduler.add(request)
            case Finished(request_id, reason):
                scheduler.finish(request_id, reason)
            case Withdrawn():
                scheduler.withdraw()
            case CacheReset(with_adapters):
                scheduler.reset_prefix_cache(with_adapters=with_adapters)
            case Transferred() | Found():
                note_tiers(event, scheduler)
            case Scheduled():
                plan, digest = _plan_again(event, scheduler, digest, num_plans)
                if plan is not None and event.program is not None:
                    num_plans += 1
                    in_flight.append(plan)
                    launch(plan, event.program)
            case Updated(token_ids):
                scheduler.update(in_flight.popleft(), token_ids)
            case Extended(request_id, token_ids):
                scheduler.extend(request_id, token_ids)
            case Recovered():
                in_flight.clear()
                scheduler.restart()
                digest = 0
            case WeightsRead() | AdapterPart() | AdapterRead() | AdapterEvicted() | AdapterDropped():
                on_device_event(event)
    return num_plans


def note_tiers(event: Transferred | Found, scheduler: Scheduler) -> None:
    """Pass an event about lower tiers to a scheduler."""
    match event:
        case Transferred(keys, ok):
            scheduler.transferred(keys, ok=ok)
        case Found(tier, present, absent):
            scheduler.found(tier, _page_keys(present), _page_keys(absent))


def _page_keys(named: Sequence[Sequence[Any]]) -> list[PageKey]:
    """Return the keys of pages in a `Found` event."""
    return [PageKey(group, bytes.fromhex(page_hash)) for group, page_hash in named]


def _plan_again(event: Scheduled, scheduler: Scheduler, digest: int, num_plans: int) -> tuple[StepPlan | None, int]:
    """Make an event's plan; return it and the digest of all plans. RuntimeError if it differs from the record.

    Args:
        event: event with the plan's limits and the recorded digest.
        scheduler: scheduler after all earlier events.
        digest: digest of all earlier plans.
        num_plans: number of earlier plans.
    """
    plan = scheduler.schedule(event.choice)
    digest = digest if plan is None else plan.digest(digest)
    if digest != event.digest or (plan is None) != (event.program is None):
        raise RuntimeError(
            f"its plans differ from the {num_plans + 1}th on ({plan}); all processes must run the same "
            "versions with the same options, and a log must be replayed by the version that recorded it"
        )
    return plan, digest
