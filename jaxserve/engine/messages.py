"""Messages between an engine and its core in another process: pickled values, a message for each step at most.

CoreClient --ToCore: events, calls--> CoreProcess
CoreClient <--FromCore: deltas, status, replies-- CoreProcess
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.engine.events import Event, Submitted
from jaxserve.metrics import EngineStats, StepStats

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jaxserve.config import EngineConfig
    from jaxserve.engine.deltas import Delta
    from jaxserve.engine.status import CoreStatus
    from jaxserve.models.arch import ArchConfig
    from jaxserve.schedule_config import ScheduleConfig

_STEP_FIELDS = tuple(field.name for field in fields(StepStats))
# Totals that the frontend adds to.
_FRONTENDS = {"num_output_tokens", "num_finished", "iterations_by_tokens", "num_iteration_tokens"}
_STATS_FIELDS = tuple(field.name for field in fields(EngineStats) if field.name not in _FRONTENDS)


class Start(NamedTuple):
    """First message to the process.

    Attributes:
        config: options of the engine.
        arch: sizes of the model.
        eos_ids: tokens that end an output.
        settings: settings of jax.
        log_level: level from which on records of the log are wanted.
    """

    config: EngineConfig
    arch: ArchConfig
    eos_ids: frozenset[int]
    settings: dict[str, Any]
    log_level: int


class Started(NamedTuple):
    """Message that the core is ready."""

    schedule: ScheduleConfig


class Formed(NamedTuple):
    """Event `Submitted` of samples whose outputs have a form; their constraints are made in the core's process.

    Attributes:
        requests: the samples, without their constraints.
        tried_bytes: memory that the form has taken where it was compiled.
    """

    requests: Sequence[Any]
    tried_bytes: int


class Call(NamedTuple):
    """Call of a method of the host."""

    number: int
    name: str
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a call, or the exception that it has raised."""

    number: int
    value: Any
    error: BaseException | None


class ToCore(NamedTuple):
    """Message to the core.

    Attributes:
        events: events for the core.
        num_delivered: deltas that the frontend has taken since the start.
        call: call to answer.
    """

    events: list[Event | Formed]
    num_delivered: int
    call: Call | None = None


class FromCore(NamedTuple):
    """Message from the core.

    Attributes:
        deltas: deltas of the core, in order.
        status: its status behind them.
        stats: values of the totals of _STATS_FIELDS.
        steps: values of the fields of the statistics of new steps.
        reply: reply to a call.
    """

    deltas: list[Delta | BaseException | None]
    status: CoreStatus
    stats: tuple[Any, ...]
    steps: list[tuple[Any, ...]]
    reply: Reply | None = None


class Failed(NamedTuple):
    """Message that the core could not start."""

    error: BaseException


class Logged(NamedTuple):
    """Record of the log."""

    record: dict[str, Any]


def send(connection: Connection, message: object) -> None:
    """Send a message; OSError if the other side has gone."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Return the next message; EOFError or OSError if the other side has gone."""
    return pickle.loads(connection.recv_bytes())


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error as it can be sent: as it is, or else as a RuntimeError of its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def portable_delta(delta: Delta | BaseException) -> Delta | BaseException | None:
    """Return a delta as it can be sent."""
    if isinstance(delta, BaseException):
        return portable(delta)
    return delta if delta.error is None else replace(delta, error=portable(delta.error))


def stats_values(stats: EngineStats) -> tuple[Any, ...]:
    """Return the totals of a core."""
    return tuple([getattr(stats, name) for name in _STATS_FIELDS])


def take_stats(stats: EngineStats, values: Sequence[Any]) -> None:
    """Set the totals of a core, beside those that a frontend counts."""
    for name, value in zip(_STATS_FIELDS, values, strict=True):
        setattr(stats, name, value)


def step_values(step: StepStats) -> tuple[Any, ...]:
    """Return the fields of a step's statistics."""
    return tuple([getattr(step, name) for name in _STEP_FIELDS])


def formed(event: Event) -> Event | Formed:
    """Return an event as it is sent."""
    if not isinstance(event, Submitted) or event.requests[0].constraint is None:
        return event
    constraint: Any = event.requests[0].constraint
    return Formed([replace(request, constraint=None) for request in event.requests], constraint.num_bytes)
