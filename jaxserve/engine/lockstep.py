"""Lock-step: every process of a run has the same scheduler, which sees the same events, and so makes the same plans.

One process leads: it alone has the requests' texts, a clock and the user. What it does to its scheduler it tells the
others as it happens, the tokens that the devices sampled included, so that a recorded log replays a run without them.
The others repeat it, and start the same programs in the same order, which is what the devices' collectives wait for.
What they pack is compared every few steps.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxserve.engine.core import EngineCore


class Added(NamedTuple):
    """A request was queued."""

    request: Request


class Finished(NamedTuple):
    """A request was ended from outside: aborted, or by a stop string."""

    request_id: str
    reason: FinishReason


class CacheReset(NamedTuple):
    """The prefix cache was emptied."""


class Scheduled(NamedTuple):
    """A plan of up to so many steps was asked for."""

    max_steps: int
    bucket: int | None  # in which it runs; None where there was nothing to plan
    digest: int | None  # of all that was packed before, in every few steps


class Updated(NamedTuple):
    """The oldest plan in flight has these tokens: of each row, as many as it sampled."""

    token_ids: list[list[int]]


class WeightsRead(NamedTuple):
    """Other weights were read from this directory."""

    path: str


Event = Added | Finished | CacheReset | Scheduled | Updated | WeightsRead


def follow(core: "EngineCore", events: Iterable[Event], read_weights: Callable[[str], None]) -> None:
    """Repeat what the leader's core did, until there is no more.

    Args:
        core: of this process.
        events: in their order.
        read_weights: from a directory into the core.

    Raises:
        RuntimeError: this process came to another plan.
    """
    for event in events:
        match event:
            case Added(request):
                core.add(request)
            case Finished(request_id, reason):
                core.finish(request_id, reason)
            case CacheReset():
                core.reset_prefix_cache()
            case Scheduled():
                core.repeat(event)
            case Updated(token_ids):
                core.take(token_ids)
            case WeightsRead(path):
                read_weights(path)
