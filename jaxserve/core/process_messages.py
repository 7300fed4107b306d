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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.api.metrics import EngineStats, StepStats
from jaxserve.core.deltas import Delta, StepDelta
from jaxserve.core.events import Event, Submitted
from jaxserve.errors import RequestError
from jaxserve.scheduling.executor_protocol import StepResult

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jaxserve.api.config import EngineConfig
    from jaxserve.core.status import CoreStatus
    from jaxserve.models.arch import ArchConfig
    from jaxserve.scheduling.schedule_config import ScheduleConfig

_RESULT_FIELDS = ("ended_s", "logprobs", "prompt_logprobs", "rounds", "pooled")  # keys that a frontend reads
_FRONTEND_TOTALS = {"num_output_tokens", "num_finished", "iterations_by_tokens", "num_iteration_tokens"}
_CORE_TOTALS = tuple(field.name for field in fields(EngineStats) if field.name not in _FRONTEND_TOTALS)

stats_values = attrgetter(*_CORE_TOTALS)  # the totals of an EngineStats that the core counts, for `set_stats`
step_values = attrgetter(*(field.name for field in fields(StepStats)))  # the arguments that recreate a StepStats


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


class HostCall(NamedTuple):
    """Call of a host method. The receiver unpickles it separately: an unreadable argument fails only this call."""

    name: str
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a call, or the exception that it raised."""

    number: int
    value: Any
    error: BaseException | None


class SentEvent(NamedTuple):
    """Pickled event.

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
        call: number of the `HostCall` that follows; None without one.
    """

    events: list[SentEvent]
    num_delivered: int
    call: int | None = None


class FromCore(NamedTuple):
    """Message from the core.

    Attributes:
        deltas: deltas in order, as returned by `pack_delta`.
        status: core status after them.
        stats: the core's totals, as returned by `stats_values`.
        steps: new step statistics, as returned by `step_values`.
        reply: reply to a call.
    """

    deltas: list[tuple[Any, ...] | BaseException]
    status: CoreStatus
    stats: tuple[Any, ...]
    steps: list[tuple[Any, ...]]
    reply: Reply | None = None


class Failed(NamedTuple):
    """Message that the core could not start."""

    error: BaseException


class Logged(NamedTuple):
    """Message with the attributes of a log record, for the client's handlers."""

    record: dict[str, Any]


def send(connection: Connection, message: object) -> None:
    """Send a message; OSError if the other side is gone."""
    connection.send_bytes(encode(message))


def encode(message: object) -> bytes:
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
    """Pickler that sends an object of an unimportable class as its nearest importable base class."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to recreate `value` as its base class; NotImplemented to pickle it as usual."""
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
        return (_new_instance, (base, *args[function is not kind :]), *state)


def _new_instance(kind: type, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _is_importable(kind: type) -> bool:
    """Return whether another process can import a class by its module and name."""
    try:
        return kind.__module__ != "__main__" and bool(pickle.dumps(kind))
    except (pickle.PicklingError, AttributeError):
        return False


def receive(connection: Connection) -> Any:
    """Return the next message; EOFError or OSError if the other side is gone."""
    return decode(connection.recv_bytes())


def decode(data: bytes) -> Any:
    return pickle.loads(data)


def portable_error(error: BaseException) -> BaseException:
    """Return an error if it can be pickled, otherwise a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any exception, raised by the error's own class: its text reports what happened to the client
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class PackedStep(NamedTuple):
    """StepDelta in a compact format for pickling: ids as bytes, and only the device results that a frontend reads.

    Attributes:
        keys: int64 keys.
        token_ids: int32 ids of all rows.
        counts: int32 number of ids per row; empty if each row has one.
        num_rows: number of rows in the device results.
        others: `ended` and `prompt_chunks` of the StepDelta, and its `energy_j` last.
        results: values of _RESULT_FIELDS in the StepResult.
    """

    keys: bytes
    token_ids: bytes
    counts: bytes
    num_rows: int
    others: tuple[Any, Any, Any]
    results: tuple[Any, ...]

    @classmethod
    def from_delta(cls, step: StepDelta) -> PackedStep:
        counts, result = list(map(len, step.token_ids)), step.result
        return cls(
            np.array(step.keys, np.int64).tobytes(),
            np.fromiter(chain.from_iterable(step.token_ids), np.int32).tobytes(),
            b"" if counts.count(1) == len(counts) else np.array(counts, np.int32).tobytes(),
            len(result.token_ids),
            (step.ended, step.prompt_chunks, step.energy_j),
            tuple([getattr(result, name) for name in _RESULT_FIELDS]),
        )

    def to_delta(self) -> StepDelta:
        """Return the StepDelta; its result's `token_ids` and `num_tokens` are empty arrays."""
        keys: list[int] = np.frombuffer(self.keys, np.int64).tolist()
        token_ids: list[int] = np.frombuffer(self.token_ids, np.int32).tolist()
        if self.counts:
            ids = iter(token_ids)
            rows = [list(islice(ids, count)) for count in np.frombuffer(self.counts, np.int32).tolist()]
        else:
            rows = [[token_id] for token_id in token_ids]
        empty = np.zeros((self.num_rows, 0), np.int32)
        result = StepResult(empty, empty, **dict(zip(_RESULT_FIELDS, self.results, strict=True)))
        ended, chunks, energy_j = self.others
        return StepDelta(keys, rows, ended, chunks, result, energy_j)


def pack_delta(delta: Delta | BaseException) -> tuple[Any, ...] | BaseException:
    """Return a delta as a compact tuple for pickling, with errors made portable; an exception as a portable one."""
    if isinstance(delta, BaseException):
        return portable_error(delta)
    step = None if delta.step is None else PackedStep.from_delta(delta.step)
    return delta.at_s, delta.admitted, step, delta.ended, None if delta.error is None else portable_error(delta.error)


def unpack_delta(packed: tuple[Any, ...] | BaseException) -> Delta | BaseException:
    """Return the delta or exception that `pack_delta` has packed."""
    if isinstance(packed, BaseException):
        return packed
    at_s, admitted, step, ended, error = packed
    return Delta(at_s, admitted, None if step is None else step.to_delta(), ended, error)


def set_stats(stats: EngineStats, values: Sequence[Any]) -> None:
    """Set the core's totals in `stats` to `values`, and leave those that a frontend counts."""
    for name, value in zip(_CORE_TOTALS, values, strict=True):
        setattr(stats, name, value)


def encode_event(event: Event) -> SentEvent:
    """Pickle an event; RequestError if it has a value that cannot be pickled."""
    keys: list[int] = []
    value: Event | Constrained = event
    if isinstance(event, Submitted):
        keys = [request.key for request in event.requests]
        constraint: Any = event.requests[0].constraint
        if constraint is not None:
            value = Constrained([replace(request, constraint=None) for request in event.requests], constraint.num_bytes)
    return SentEvent(keys, encode(value))
