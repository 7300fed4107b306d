"""Messages between an engine and its core in another process: pickled values, at most one message per step.

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

_RESULTS = ("ended_s", "logprobs", "prompt_logprobs", "rounds", "pooled")  # result fields that a frontend reads
_STEP_FIELDS = tuple(field.name for field in fields(StepStats))
# Totals that the frontend updates.
_FRONTENDS = {"num_output_tokens", "num_finished", "iterations_by_tokens", "num_iteration_tokens"}
_STATS_FIELDS = tuple(field.name for field in fields(EngineStats) if field.name not in _FRONTENDS)


class Start(NamedTuple):
    """First message to the process.

    Attributes:
        config: engine options.
        arch: sizes of the model.
        settings: jax settings.
        log_level: minimum level of log records to send.
    """

    config: EngineConfig
    arch: ArchConfig
    eos_ids: frozenset[int]
    settings: dict[str, Any]
    log_level: int


class Started(NamedTuple):
    """Message that the core is ready."""

    schedule: ScheduleConfig


class Constrained(NamedTuple):
    """Event `Submitted` for samples with structured outputs; their constraints are created in the core's process.

    Attributes:
        requests: samples without their constraints.
        tried_bytes: memory that compiling the grammar took.
    """

    requests: Sequence[Any]
    tried_bytes: int


class Call(NamedTuple):
    """Call of a host method. The receiver unpickles it separately: an unreadable argument fails only this call."""

    name: str
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a call, or the exception that it raised."""

    number: int
    value: Any
    error: BaseException | None


class Sent(NamedTuple):
    """Event in transit.

    Attributes:
        keys: keys of the submitted samples, which end if the event cannot be read.
        data: the event or a `Constrained`, pickled by the sender, who gets any pickling error.
    """

    keys: list[int]
    data: bytes


class ToCore(NamedTuple):
    """Message to the core.

    Attributes:
        num_delivered: number of deltas that the frontend has taken since the start.
        call: number of the `Call` that follows; None without one.
    """

    events: list[Sent]
    num_delivered: int
    call: int | None = None


class FromCore(NamedTuple):
    """Message from the core.

    Attributes:
        deltas: deltas in order, as returned by `packed`.
        status: core status after them.
        stats: totals in _STATS_FIELDS.
        steps: fields of new step statistics.
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
    record: dict[str, Any]


def send(connection: Connection, message: object) -> None:
    """Send a message; OSError if the other side is gone."""
    connection.send_bytes(encoded(message))


def encoded(message: object) -> bytes:
    """Pickle a message; RequestError if one of its values, possibly from a caller, cannot be pickled.

    An object of a class that no other process can import, such as one of the user's program, is sent as its base class.
    """
    try:
        try:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):  # the class is local to a function or a notebook cell
            data = _MAIN
        if _MAIN in data:
            file = io.BytesIO()
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
            data = file.getvalue()
    except Exception as error:
        raise RequestError(f"all values must be such that they can be sent to the engine's process: {error}") from error
    return data


_MAIN = b"__main__"  # the user's main module, which another process does not run


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
        if base.__module__ == "builtins":  # builtin types have no further attributes
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
    """Return the next message; EOFError or OSError if the other side is gone."""
    return decoded(connection.recv_bytes())


def decoded(data: bytes) -> Any:
    return pickle.loads(data)


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error if it can be pickled, otherwise a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any exception, raised by the error's own class: its text tells the client what happened
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class PackedStep(NamedTuple):
    """StepDelta in transit: numbers as bytes, and only the device results that a frontend reads.

    Attributes:
        keys: int64 keys.
        token_ids: int32 ids of all rows.
        counts: int32 number of ids per row; empty if each row has one.
        num_rows: number of rows in the device results.
        others: other fields of StepDelta.
        results: StepResult fields in _RESULTS.
    """

    keys: bytes
    token_ids: bytes
    counts: bytes
    num_rows: int
    others: tuple[Any, Any]
    results: tuple[Any, ...]

    @classmethod
    def from_delta(cls, step: StepDelta) -> PackedStep:
        counts, result = list(map(len, step.token_ids)), step.result
        return cls(
            np.array(step.keys, np.int64).tobytes(),
            np.fromiter(chain.from_iterable(step.token_ids), np.int32).tobytes(),
            b"" if counts.count(1) == len(counts) else np.array(counts, np.int32).tobytes(),
            len(result.token_ids),
            (step.ended, step.prompt_chunks),
            tuple([getattr(result, name) for name in _RESULTS]),
        )

    def unpacked(self) -> StepDelta:
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
    """Return a delta in transit format."""
    if isinstance(delta, BaseException):
        return portable(delta)
    step = None if delta.step is None else PackedStep.from_delta(delta.step)
    return delta.at_s, delta.admitted, step, delta.ended, delta.error and portable(delta.error)


def unpacked(delta: tuple[Any, ...] | BaseException) -> Delta | BaseException:
    if isinstance(delta, BaseException):
        return delta
    at_s, admitted, step, ended, error = delta
    return Delta(at_s, admitted, None if step is None else step.unpacked(), ended, error)


def stats_values(stats: EngineStats) -> tuple[Any, ...]:
    return tuple([getattr(stats, name) for name in _STATS_FIELDS])


def take_stats(stats: EngineStats, values: Sequence[Any]) -> None:
    """Set the totals of a core, leaving those that a frontend counts."""
    for name, value in zip(_STATS_FIELDS, values, strict=True):
        setattr(stats, name, value)


def step_values(step: StepStats) -> tuple[Any, ...]:
    return tuple([getattr(step, name) for name in _STEP_FIELDS])


def sent(event: Event) -> Sent:
    """Pickle an event; RequestError if it has a value that cannot be pickled."""
    keys: list[int] = []
    value: Event | Constrained = event
    if isinstance(event, Submitted):
        keys = [request.key for request in event.requests]
        constraint: Any = event.requests[0].constraint
        if constraint is not None:
            value = Constrained([replace(request, constraint=None) for request in event.requests], constraint.num_bytes)
    return Sent(keys, encoded(value))
