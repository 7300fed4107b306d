"""Traces: requests with arrival times and lengths, read one by one from files in several formats.

| format | recognised by |
| --- | --- |
| Mooncake, JSON lines | `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` per 512 tokens |
| Azure, CSV | `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` |
| Splitwise as Vidur has it, CSV | `arrived_at` in seconds, `num_prefill_tokens`, `num_decode_tokens` |
| JSON lines | `arrival_s`, `prompt_len`, `output_len`; optional `blocks`, `block_len`, `tenant`, `priority` |
| guidellm, JSON | `benchmarks`, whose `requests` have times and numbers of tokens; the first benchmark counts |
| a workload of `jaxserve bench`, JSON | `requests` with `prompt_len`, `output_len`, `arrival_s` |
| an engine's event log | a first line with the schedule's sizes; every later line is an event |

Files may be compressed by gzip. No format has tokens, except event logs: two prompts share a prefix if their first
block ids are equal.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per hash id
_LOGGED_SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size")
LOGGED_BLOCK = 16  # tokens per block of a prompt in an event log

Parsed = Mapping[str, Any]


class TracedRequest(NamedTuple):
    """A request in a trace.

    Attributes:
        arrival_s: arrival time in seconds.
        prompt_len: number of prompt tokens.
        output_len: number of output tokens.
        blocks: id of each block of the prompt; prompts share a prefix if their first ids are equal. Empty if the prompt
            shares nothing.
        block_len: tokens per block.
        tenant: the request's tenant.
        priority: class of the request; lower numbers go first.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    blocks: Sequence[int] = ()
    block_len: int = MOONCAKE_BLOCK
    tenant: str = ""
    priority: int = 0


def read_trace(path: str | Path, on_bad_line: Callable[[str], None] | None = None) -> Iterator[TracedRequest]:
    """Yield the requests of a trace in order, without reading the whole file first.

    Args:
        path: file in one of the formats above.
        on_bad_line: called with a message about each malformed line, which is then skipped; None to raise it.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, or a line is malformed and `on_bad_line` is None.
    """
    latest_s = float("-inf")
    for number, read in _lines(path):
        try:
            request = read()
            if request is None:
                continue
            _check(request, latest_s)
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            message = f"{path}, line {number}: {what}"
            if on_bad_line is None:
                raise ConfigError(f"{message}; correct the line, or skip such lines with --on-bad-line skip") from error
            on_bad_line(message)
            continue
        latest_s = request.arrival_s
        yield request


def _check(request: TracedRequest, latest_s: float) -> None:
    """Raise ValueError unless a request's numbers are valid and it does not arrive before the previous one."""
    if not request.arrival_s >= latest_s:
        raise ValueError(f"requests must be sorted by arrival, got {request.arrival_s} s after {latest_s} s")
    if request.prompt_len < 1 or request.output_len < 1:
        raise ValueError(
            f"prompts and outputs must have at least 1 token, got {request.prompt_len} and {request.output_len}"
        )
    if request.block_len < 1 or (request.blocks and len(request.blocks) * request.block_len < request.prompt_len):
        raise ValueError(
            f"blocks of {request.block_len} tokens must cover the prompt of {request.prompt_len}, "
            f"got {len(request.blocks)} block ids"
        )


def _lines(path: str | Path) -> Iterator[tuple[int, Callable[[], TracedRequest | None]]]:
    """Yield each line's number and a function that reads it; ConfigError if the file is unreadable or unknown."""
    try:
        with _opened(path) as file:
            yield from _parsed(path, file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error


@contextmanager
def _opened(path: str | Path) -> Iterator[io.TextIOWrapper]:
    """Open a file, compressed by gzip or not."""
    with open(path, "rb") as raw:
        is_compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if is_compressed else raw, encoding="utf-8") as file:
            yield file


def _parsed(path: str | Path, file: io.TextIOWrapper) -> Iterator[tuple[int, Callable[[], TracedRequest | None]]]:
    """Yield each line's number and a function that reads it, by the format that the first line shows."""
    first = file.readline()
    if not first.lstrip().startswith("{"):
        names = next(csv.reader([first]), [])
        read_row = next((read for needed, read in _CSV if needed <= set(names)), None)
        if read_row is None:
            raise ConfigError(f"{path}: {_EXPECTED}, got the first line {first.strip()[:80]!r}")
        for number, line in enumerate(file, start=2):
            if line.strip():
                yield number, partial(_read, read_row, partial(_row, names), line)
        return
    found = _first_object(path, first, file)
    if whole := [read for name, read in _WHOLE.items() if name in found]:
        yield from _whole_file(path, whole[0], found)
        return
    if "max_num_batched_tokens" in found:
        start = _LogReader()
        for number, line in enumerate(file, start=2):
            if line.endswith("\n"):  # an interrupted engine's last line may be incomplete
                yield number, partial(_read, start.read, json.loads, line)
        return
    read = next((read for needed, read in _JSON if needed <= found.keys()), None)
    if read is None:
        raise ConfigError(f"{path}: {_EXPECTED}, got an object with the fields {sorted(found)}")
    yield 1, partial(read, found)
    for number, line in enumerate(file, start=2):
        if line.strip():
            yield number, partial(_read, read, _object, line)


def _first_object(path: str | Path, first: str, file: io.TextIOWrapper) -> Parsed:
    """Return the JSON object in the first line, or in the whole file if its JSON has several lines."""
    try:
        return _object(first)
    except ValueError:
        pass
    try:
        return _object(first + file.read())
    except ValueError as error:
        raise ConfigError(f"{path}, line 1: {error}; {_EXPECTED}") from error


def _whole_file(
    path: str | Path, read: Callable[[Parsed], Iterator[TracedRequest]], found: Parsed
) -> Iterator[tuple[int, Callable[[], TracedRequest | None]]]:
    """Yield each request's number and a function that returns it, in order of arrival."""
    try:
        requests = sorted(read(found), key=attrgetter("arrival_s"))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} must have requests as guidellm or jaxserve bench has them: {error!r}") from error
    for number, request in enumerate(requests, start=1):
        yield number, partial(_given, request)


def _read(read: Callable[[Any], TracedRequest | None], parse: Callable[[str], Any], line: str) -> TracedRequest | None:
    """Parse a line and return the request in it; None if it has none."""
    return read(parse(line))


def _given(request: TracedRequest) -> TracedRequest:
    """Return a request that was read before."""
    return request


def _guidellm(found: Parsed) -> Iterator[TracedRequest]:
    """Yield the requests of the first benchmark in a report by guidellm; their times count from the first."""
    requests = found["benchmarks"][0]["requests"]
    served = requests["successful"] if isinstance(requests, dict) else requests
    starts = [_first(each, "request_start_time", "start_time") for each in served]
    first_s = min(starts, default=0.0)
    for each, start_s in zip(served, starts, strict=True):
        yield TracedRequest(start_s - first_s, _whole(each["prompt_tokens"]), _whole(each["output_tokens"]))


def _first(found: Parsed, *names: str) -> Any:
    """Return the first of these fields that is present; versions name them differently."""
    value = next((found[name] for name in names if found.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{names[0]} must be a number, got {value!r}")
    return value


def _workload(found: Parsed) -> Iterator[TracedRequest]:
    """Yield a `jaxserve bench` workload's requests."""
    for each in found["requests"]:
        arrival_s = float(each.get("arrival_s", 0.0))
        yield TracedRequest(arrival_s, _whole(each["prompt_len"]), _whole(each["output_len"]))


def _row(names: Sequence[str], line: str) -> Parsed:
    """Return the values of a CSV line by column; ValueError if their number is wrong."""
    values = next(csv.reader([line]))
    if len(values) != len(names):
        raise ValueError(f"a line must have {len(names)} values, got {len(values)}")
    return dict(zip(names, values, strict=True))


def _object(line: str) -> Parsed:
    """Return the JSON object in a line; ValueError if there is none."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line must be a JSON object, got {line.strip()[:80]!r}")
    return found


def _mooncake(found: Parsed) -> TracedRequest:
    """Return a Mooncake line's request."""
    blocks = [_whole(each) for each in found["hash_ids"]]
    return TracedRequest(
        float(found["timestamp"]) / 1e3, _whole(found["input_length"]), _whole(found["output_length"]), blocks
    )


def _plain(found: Parsed) -> TracedRequest:
    """Return the request of a line in the simulator's own format."""
    return TracedRequest(
        float(found["arrival_s"]),
        _whole(found["prompt_len"]),
        _whole(found["output_len"]),
        [_whole(each) for each in found.get("blocks", ())],
        _whole(found.get("block_len", MOONCAKE_BLOCK)),
        str(found.get("tenant", "")),
        _whole(found.get("priority", 0)),
    )


def _vidur(row: Parsed) -> TracedRequest:
    """Return a Vidur row's request."""
    return TracedRequest(float(row["arrived_at"]), int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


def _azure(row: Parsed) -> TracedRequest:
    """Return the request of a row of Azure's trace, whose times have seven decimals."""
    text, _, fraction = row["TIMESTAMP"].rstrip("Z").partition(".")
    arrival_s = (datetime.fromisoformat(text) - datetime(1970, 1, 1)).total_seconds()
    arrival_s += float(f"0.{fraction.partition('+')[0] or 0}")
    return TracedRequest(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


class _LogReader:
    """Event log reader."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}  # id of each block of tokens, by its tokens and the previous id

    def read(self, event: Any) -> TracedRequest | None:
        """Return the request that an event adds; None for other events."""
        if event[0] != "Added":
            return None
        given = event[1]
        if not given["arrival_s"]:
            raise ValueError("the log has no arrival times; record one with an engine")
        prompt, previous, blocks = given["prompt_token_ids"], -1, []
        for start in range(0, len(prompt), LOGGED_BLOCK):
            key = (previous, *prompt[start : start + LOGGED_BLOCK])
            previous = self._ids.setdefault(key, len(self._ids))
            blocks.append(previous)
        return TracedRequest(
            given["arrival_s"],
            len(prompt),
            given["max_total_tokens"] - len(prompt),
            blocks,
            LOGGED_BLOCK,
            given["tenant"],
            given["priority"],
        )


def _whole(value: Any) -> int:
    """Return an integer; ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"lengths and ids must be integers, got {value!r}")
    return value


_CSV: Sequence[tuple[set[str], Callable[[Parsed], TracedRequest]]] = (
    ({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}, _vidur),
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
)
_JSON: Sequence[tuple[set[str], Callable[[Parsed], TracedRequest]]] = (
    ({"timestamp", "input_length", "output_length", "hash_ids"}, _mooncake),
    ({"arrival_s", "prompt_len", "output_len"}, _plain),
)
_WHOLE: Mapping[str, Callable[[Parsed], Iterator[TracedRequest]]] = {"benchmarks": _guidellm, "requests": _workload}
_EXPECTED = (
    "a trace must be CSV with the columns "
    + " or ".join(", ".join(sorted(needed)) for needed, _ in _CSV)
    + ", JSON lines with the fields "
    + " or ".join(", ".join(sorted(needed)) for needed, _ in _JSON)
    + ", a report of guidellm, a workload of jaxserve bench, or an engine's event log"
)


def read_log_sizes(path: str) -> dict[str, int]:
    """Return the engine options that an event log's sizes come from.

    Raises:
        ConfigError: the file is not an event log.
    """
    try:
        with _opened(path) as file:
            found = json.loads(file.readline())
        return {name: _whole(found[name]) for name in _LOGGED_SIZES}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} must be an engine's event log: {error!r}") from error
