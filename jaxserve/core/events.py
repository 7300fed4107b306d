"""Events: all that reaches the core, and all that a replica's plans depend on.

A scheduler is a pure function of its events in their order. So whoever is told a replica's events makes the same plans:
the other processes of a run (lock-step), which start the same programs in the same order, as the collectives of their
devices need it, and whoever replays a recorded log. The leading process alone has the texts, a clock and the users;
what depends on time, the choice of what a plan may be, is in the event, and so are the tokens that the devices sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxserve.scheduling.choice import StepChoice
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.scheduling.step_plan import StepPlan, StepShape


# To the core


class Submitted(NamedTuple):
    """Samples of a new request are to be queued."""

    requests: Sequence[Request]


class Cancelled(NamedTuple):
    """Samples, known by their keys, are to end, as far as they have not."""

    keys: Sequence[int]
    reason: FinishReason


class CacheReset(NamedTuple):
    """The prefix cache is to be emptied."""


class Transferred(NamedTuple):
    """Moves of pages between tiers have ended."""

    keys: Sequence[int]  # numbers of the moves
    ok: bool  # False if their content is lost
    replica: int = 0  # index of the replica that asked for them


class DraftsAllowed(NamedTuple):
    """Steps are to go on with drafts, if there are any, or without."""

    is_allowed: bool


Event = Submitted | Cancelled | CacheReset | Transferred | DraftsAllowed

# Of a replica


class Added(NamedTuple):
    """A request was queued."""

    request: Request


class Finished(NamedTuple):
    """A request was ended from outside: aborted, or by a stop string."""

    request_id: str
    reason: FinishReason


class Withdrawn(NamedTuple):
    """Requests that waited were taken back, for another replica."""


class Scheduled(NamedTuple):
    """A plan was asked for."""

    choice: StepChoice  # limits of the plan
    program: StepShape | None  # program that runs the plan; None if there was nothing to plan
    digest: int  # digest of all plans up to this one, since the last recovery


class Updated(NamedTuple):
    """The oldest plan in flight has these tokens: of each row, as many as it sampled."""

    token_ids: Sequence[list[int]]


class Extended(NamedTuple):
    """A request goes on by tokens that no plan has sampled."""

    request_id: str
    token_ids: Sequence[int]


class Recovered(NamedTuple):
    """A step broke off, and its requests have been ended: steps in flight, and all that was cached, are forgotten."""


class WeightsRead(NamedTuple):
    """Other weights were read from this directory."""

    path: str


ReplicaEvent = (
    Added | Finished | Withdrawn | CacheReset | Transferred | Scheduled | Updated | Extended | Recovered | WeightsRead
)
Record = Callable[[ReplicaEvent], None]


def replay(
    events: Iterable[ReplicaEvent],
    scheduler: Scheduler,
    launch: Callable[[StepPlan, StepShape], object] = lambda plan, program: None,
    read_weights: Callable[[str], None] = lambda path: None,
) -> int:
    """Make the plans of a replica from its events, and return their number.

    Args:
        events: all of them, in their order.
        scheduler: a new one, of the same sizes.
        launch: called with each plan and its program.
        read_weights: called with the directory of other weights.

    Raises:
        RuntimeError: a plan is another one here.
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
            case CacheReset():
                scheduler.reset_prefix_cache()
            case Transferred(keys, ok):
                scheduler.transferred(keys, ok=ok)
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
            case WeightsRead(path):
                read_weights(path)
    return num_plans


def _plan_again(event: Scheduled, scheduler: Scheduler, digest: int, num_plans: int) -> tuple[StepPlan | None, int]:
    """Return the plan of an event and the digest of all plans; RuntimeError if it is another one here."""
    plan = scheduler.schedule(event.choice)
    digest = digest if plan is None else plan.digest(digest)
    if digest != event.digest or (plan is None) != (event.program is None):
        raise RuntimeError(
            f"its plans differ from the {num_plans + 1}th on ({plan}); all processes must run the same "
            "versions with the same options, and a log must be replayed by the version that recorded it"
        )
    return plan, digest
