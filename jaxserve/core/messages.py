"""Messages between an engine and its core in another process: pickled values, a message for each step at most.

CoreClient --ToCore: events, calls--> CoreProcess
CoreClient <--FromCore: deltas, status, replies-- CoreProcess
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.api.metrics import EngineStats, StepStats
from jaxserve.core.deltas import Delta, StepDelta
from jaxserve.core.events import Event, Submitted
from jaxserve.errors import RequestError
from jaxserve.scheduling.executor import StepResult

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jaxserve.api.config import EngineConfig
    from jaxserve.core.status import CoreStatus
    from jaxserve.models.arch import ArchConfig
    from jaxserve.scheduling.schedule_config import ScheduleConfig

_RESULTS = ("ended_s", "logprobs", "prompt_logprobs", "rounds", "pooled")  # fields that a frontend reads
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
        log_level: level from which on jaxserve's records of the log are wanted.
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
    """Method call of the host. Whoever answers it unpickles it: an unreadable argument fails only this call."""

    name: str
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a call, or the exception that it has raised."""

    number: int
    value: Any
    error: BaseException | None


class Sent(NamedTuple):
    """Event as it is sent.

    Attributes:
        keys: keys of the samples that it submits, which end if it cannot be read.
        data: the event or a `Formed`, pickled by whoever left it, who hears if that cannot be.
    """

    keys: list[int]
    data: bytes


class ToCore(NamedTuple):
    """Message to the core.

    Attributes:
        events: events for the core.
        num_delivered: deltas that the frontend has taken since the start.
        call: number of the `Call` that follows; None if none does.
    """

    events: list[Sent]
    num_delivered: int
    call: int | None = None


class FromCore(NamedTuple):
    """Message from the core.

    Attributes:
        deltas: deltas of the core, in order, as `packed` returns them.
        status: its status after them.
        stats: values of the totals of _STATS_FIELDS.
        steps: values of the fields of the statistics of new steps.
        reply: reply to a call.
    """

    deltas: list[tuple[Any, ...] | BaseException | None]
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
    connection.send_bytes(encoded(message))


def encoded(message: object) -> bytes:
    """Return a message as it is sent; RequestError if it has a value that cannot be, as a caller may have given it.

    An object whose class no other process can import, such as a class of the user's program, is sent as its base class.
    """
    try:
        try:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):  # a class of a function, or of another cell
            data = _MAIN
        if _MAIN in data:
            file = io.BytesIO()
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
            data = file.getvalue()
    except Exception as error:
        raise RequestError(f"all values must be such that they can be sent to the engine's process: {error}") from error
    return data


_MAIN = b"__main__"  # module of the user's program, which another process does not run


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, type) or _is_importable(kind):
            return NotImplemented
        bases = (base for base in kind.__mro__ if _is_importable(base) and not issubclass(base, enum.Enum))
        if (base := next(bases)) is object:
            return NotImplemented
        function, args, *state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if kind not in (function, *args[:1]):
            return NotImplemented
        if base.__module__ == "builtins":  # their values have no further attributes
            state = []
        return (_remade, (base, *args[function is not kind :]), *state)


def _remade(kind: type, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _is_importable(kind: type) -> bool:
    try:
        return kind.__module__ != "__main__" and bool(pickle.dumps(kind))
    except (pickle.PicklingError, AttributeError):
        return False


def receive(connection: Connection) -> Any:
    """Return the next message; EOFError or OSError if the other side has gone."""
    return decoded(connection.recv_bytes())


def decoded(data: bytes) -> Any:
    """Return a value that `encoded` has packed."""
    return pickle.loads(data)


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error as it can be sent: as it is, or else as a RuntimeError of its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any, by the error's own class: its text tells the client what happened
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class PackedStep(NamedTuple):
    """StepDelta as it is sent: numbers as bytes, of the device's results those that a frontend reads.

    Attributes:
        keys: int64 numbers.
        token_ids: int32 ids of all rows.
        counts: int32 numbers of them by row; empty if each row has one.
        num_rows: rows of the device's results.
        others: further fields of StepDelta.
        results: values of the fields of StepResult in _RESULTS.
    """

    keys: bytes
    token_ids: bytes
    counts: bytes
    num_rows: int
    others: tuple[Any, Any]
    results: tuple[Any, ...]

    @classmethod
    def from_delta(cls, step: StepDelta) -> PackedStep:
        """Return a step's delta as it is sent."""
        counts, result = list(map(len, step.token_ids)), step.result
        return cls(
            np.array(step.keys, np.int64).tobytes(),
            np.fromiter(chain.from_iterable(step.token_ids), np.int32).tobytes(),
            b"" if counts.count(1) == len(counts) else np.array(counts, np.int32).tobytes(),
            len(result.token_ids),
            (step.ended, step.prompt_shares),
            tuple([getattr(result, name) for name in _RESULTS]),
        )

    def unpacked(self) -> StepDelta:
        """Return the delta again."""
        keys: list[int] = np.frombuffer(self.keys, np.int64).tolist()
        token_ids: list[int] = np.frombuffer(self.token_ids, np.int32).tolist()
        if self.counts:
            ids = iter(token_ids)
            rows = [list(islice(ids, count)) for count in np.frombuffer(self.counts, np.int32).tolist()]
        else:
            rows = [[token_id] for token_id in token_ids]
        empty = np.zeros((self.num_rows, 0), np.int32)
        result = StepResult(empty, empty, **dict(zip(_RESULTS, self.results, strict=True)))
        return StepDelta(keys, rows, *self.others, result)


def packed(delta: Delta | BaseException) -> tuple[Any, ...] | BaseException | None:
    """Return a delta as it is sent."""
    if isinstance(delta, BaseException):
        return portable(delta)
    step = None if delta.step is None else PackedStep.from_delta(delta.step)
    return delta.at_s, delta.admitted, step, delta.ended, delta.error and portable(delta.error)


def unpacked(delta: tuple[Any, ...] | BaseException) -> Delta | BaseException:
    """Return a delta again."""
    if isinstance(delta, BaseException):
        return delta
    at_s, admitted, step, ended, error = delta
    return Delta(at_s, admitted, None if step is None else step.unpacked(), ended, error)


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


def sent(event: Event) -> Sent:
    """Return an event as it is sent; RequestError if it has something that cannot be."""
    keys: list[int] = []
    value: Event | Formed = event
    if isinstance(event, Submitted):
        keys = [request.key for request in event.requests]
        constraint: Any = event.requests[0].constraint
        if constraint is not None:
            value = Formed([replace(request, constraint=None) for request in event.requests], constraint.num_bytes)
    return Sent(keys, encoded(value))
