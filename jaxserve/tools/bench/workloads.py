"""Workloads: only lengths and arrival times, so that they apply to any engine and vocabulary.

The file format is {"name", "seed", "requests": [{"prompt_len", "output_len", "arrival_s", "prefix_id",
"prefix_len", "session_id", "pause_s", "picture"}]}. Lengths count tokens; `arrival_s` is seconds after the start.
Requests with the same `prefix_id` (not null) share their first `prefix_len` tokens. Requests with the same
`session_id` (not null) are turns of a conversation: they also share the tokens after those, as far as both have them,
and each arrives `pause_s` seconds after the end of the one before. A `picture` has rows and columns; its tokens are not
counted. Outputs are greedy and ignore the end-of-sequence token: `output_len` is exact. A later turn's prompt has other
tokens in their place.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.schema import ANY, FILLED_TEXT, OBJECT, Schema, integer, list_of, number
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.agentic import SMALL, AgenticSizes, turns

BUILT_IN = (
    *("mixed-64", "single", "shared-prefix-64", "long-tail-128", "long-prompts-32", "poisson-128", "chat-16x4"),
    *("agentic", "images"),
)
# Rows and columns, and their fraction: photographs as in ShareGPT4V, most of them COCO's, and crops.
PICTURE_SIZES = (((480, 640), 0.4), ((448, 448), 0.3), ((768, 1024), 0.2), ((336, 336), 0.1))
LOWEST_ID = 10  # smaller ids tend to be special tokens

_LENGTHS_SEED = 20261121
_TOKENS_SEED = 1234
_OWN, _SHARED, _ARRIVALS, _SESSIONS = 0, 1, 2, 3  # independent random streams
_WORKLOAD = {
    "name": FILLED_TEXT,
    "seed": integer(0),
    "requests": list_of(ANY, "a list of at least one request", min_len=1),
}


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a ConfigError
@dataclass(frozen=True)
class WorkloadRequest:
    """Lengths and arrival time of one request, and the rows and columns of its picture."""

    prompt_len: int
    output_len: int
    arrival_s: float = 0.0
    prefix_id: int | None = None
    prefix_len: int = 0
    session_id: int | None = None
    pause_s: float = 0.0
    picture: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _REQUEST.check(self)
        if self.prefix_len > self.prompt_len:
            raise ConfigError(f"prefix_len must be at most prompt_len, got {self.prefix_len} and {self.prompt_len}")
        if self.pause_s and self.session_id is None:
            raise ConfigError(f"pause_s needs session_id, the turn's conversation, got only {self.pause_s}")


_LENGTH = integer(1)
_REQUEST = Schema(
    ConfigError,
    WorkloadRequest,
    {
        "prompt_len": _LENGTH,
        "output_len": _LENGTH,
        "arrival_s": number(0),
        "prefix_id": integer(0).optional(),
        "prefix_len": integer(0),
        "session_id": integer(0).optional(),
        "pause_s": number(0),
        "picture": list_of(integer(1, 4096), "a list of rows and columns", 2, 2).optional(),
    },
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in queueing order, and the seed for their tokens."""

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(r.prompt_len for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens in all outputs."""
        return sum(r.output_len for r in self.requests)

    def resized(self, num_requests: int) -> "Workload":
        """Return the first `num_requests` requests of the workload repeated endlessly.

        Each repetition has its own prompts and shared prefixes, so that the prefix cache's hit rate stays the same. It
        begins when the last request of the previous one arrives.
        """
        period_s = max(r.arrival_s for r in self.requests)
        num_prefixes = 1 + max((r.prefix_id for r in self.requests if r.prefix_id is not None), default=-1)
        num_sessions = 1 + max((r.session_id for r in self.requests if r.session_id is not None), default=-1)

        def request(index: int) -> WorkloadRequest:
            repetition, first = divmod(index, len(self.requests))
            r = self.requests[first]
            prefix_id = None if r.prefix_id is None else r.prefix_id + repetition * num_prefixes
            session_id = None if r.session_id is None else r.session_id + repetition * num_sessions
            arrival_s = r.arrival_s + repetition * period_s
            return replace(r, arrival_s=arrival_s, prefix_id=prefix_id, session_id=session_id)

        return replace(self, requests=tuple(map(request, range(num_requests))))


def load_workload(source: str) -> Workload:
    """Load a built-in workload by name, or a workload from a JSON file.

    Raises:
        ConfigError: there is no such workload, or the file is malformed.
    """
    if source in BUILT_IN:
        return Workload(source, _TOKENS_SEED, tuple(_built_in_requests()[source]))
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"workload must be one of {list(BUILT_IN)} or a JSON file, got {source!r}")
    try:
        return parse_workload(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the workload {source}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the workload {source} must be JSON, but: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"the workload {source}: {error}") from error


def parse_workload(content: object) -> Workload:
    """Parse the decoded JSON; ConfigError names the wrong field and request."""
    fields = _checked_keys("a workload", content, _WORKLOAD.keys(), optional=())
    name, seed, entries = (each.read(name, fields[name], ConfigError) for name, each in _WORKLOAD.items())
    return Workload(name, seed, tuple(_parse_request(index, each) for index, each in enumerate(entries)))


def token_ids(workload: Workload, vocab_size: int) -> list[list[int]]:
    """Return each request's prompt; see `iter_token_ids`."""
    return list(iter_token_ids(workload, vocab_size))


def iter_token_ids(workload: Workload, vocab_size: int) -> Iterator[list[int]]:
    """Yield each request's prompt, ids uniform in [LOWEST_ID, vocab_size).

    Each prefix, each session and each other request has its own random stream.
    """
    if vocab_size <= LOWEST_ID:
        raise ConfigError(f"a workload needs a vocabulary of more than {LOWEST_ID} tokens, got {vocab_size}")

    def draw(stream: int, index: int, count: int) -> list[int]:
        """Draw `count` token ids from a random stream."""
        ids: list[int] = _stream(workload, stream, index).integers(LOWEST_ID, vocab_size, count).tolist()
        return ids

    for index, request in enumerate(workload.requests):
        prefix = [] if request.prefix_id is None else draw(_SHARED, request.prefix_id, request.prefix_len)
        own = (_OWN, index) if request.session_id is None else (_SESSIONS, request.session_id)
        yield prefix + draw(*own, request.prompt_len - len(prefix))


def poisson_arrivals(workload: Workload, rate: float, seed: int = 0) -> list[float]:
    """Return Poisson arrival times in seconds at `rate` requests per second; the rate only scales the gaps.

    At an infinite rate all requests arrive simultaneously. Each seed gives different gaps.
    """
    gaps = _stream(workload, _ARRIVALS, seed).exponential(1.0, len(workload.requests))
    arrivals: list[float] = (np.cumsum(gaps) / rate).tolist()
    return arrivals


def _stream(workload: Workload, stream: int, index: int) -> np.random.Generator:
    """Return the generator of one of the workload's independent random streams."""
    return np.random.default_rng([workload.seed, stream, index])


def _parse_request(index: int, content: object) -> WorkloadRequest:
    """Return the request in an entry of a workload file; ConfigError names its index."""
    try:
        required, optional = {"prompt_len", "output_len"}, {"arrival_s", "prefix_id", "prefix_len"}
        optional |= {"session_id", "pause_s", "picture"}
        return WorkloadRequest(**_checked_keys("a request", content, required, optional))
    except ConfigError as error:
        raise ConfigError(f"request {index}: {error}") from error


def _checked_keys(what: str, given: object, required: Set[str], optional: Iterable[str]) -> Mapping[str, Any]:
    """Return a JSON object if it has all required keys and no unknown ones; ConfigError names it as `what`."""
    content: Mapping[str, Any] = OBJECT.read(what, given, ConfigError)
    if missing := sorted(required - content.keys()):
        raise ConfigError(f"{what} must have {sorted(required)}; missing are {missing}")
    if unknown := sorted(content.keys() - required - set(optional)):
        raise ConfigError(f"{what} takes {sorted(required | set(optional))}, got also {unknown}")
    return content


def _built_in_requests() -> dict[str, list[WorkloadRequest]]:
    """Return all built-in workloads. Their lengths are drawn from one stream, in this order."""
    rng = np.random.default_rng(_LENGTHS_SEED)

    def uniform(low: int, high: int, count: int) -> list[int]:
        """Draw `count` lengths uniformly from [low, high]."""
        lengths: list[int] = rng.integers(low, high + 1, count).tolist()
        return lengths

    def pareto(count: int) -> list[int]:
        """Draw `count` lengths, most of them short and a few long, at most 384."""
        return [int(x) for x in np.minimum(8 + rng.pareto(1.2, count) * 12, 384)]

    mixed = _requests(uniform(16, 256, 64), uniform(16, 128, 64))
    long_tail = _requests(uniform(8, 64, 128), pareto(128))
    poisson = _requests(uniform(16, 192, 128), uniform(16, 96, 128), np.cumsum(rng.exponential(0.25, 128)))
    return {
        "mixed-64": mixed,  # the offline batch
        "single": [WorkloadRequest(128, 128)],  # latency without a batch
        "shared-prefix-64": [WorkloadRequest(528, 16, prefix_id=0, prefix_len=512)] * 64,  # one system prompt
        "long-tail-128": long_tail,  # most outputs short, a few long: worst for static batching
        "long-prompts-32": [WorkloadRequest(1500 if i % 8 == 0 else 64, 32) for i in range(32)],  # chunked prefill
        "poisson-128": poisson,  # TTFT and TPOT under load
        "chat-16x4": [_chat_turn(chat, turn) for turn in range(4) for chat in range(16)],  # reuse across turns
        "agentic": agentic_requests(SMALL),  # sessions with tool calls, which reuse nearly all of each prompt
        "images": _with_pictures(_requests([32] * 32, [32] * 32, np.cumsum(rng.exponential(1.0, 32))), rng),
    }


def _with_pictures(requests: list[WorkloadRequest], rng: np.random.Generator) -> list[WorkloadRequest]:
    """Return requests with pictures in sizes drawn from `PICTURE_SIZES`."""
    chosen = rng.choice(len(PICTURE_SIZES), len(requests), p=[fraction for _, fraction in PICTURE_SIZES]).tolist()
    return [replace(request, picture=PICTURE_SIZES[index][0]) for request, index in zip(requests, chosen, strict=True)]


def agentic_requests(sizes: AgenticSizes, seed: int = _LENGTHS_SEED) -> list[WorkloadRequest]:
    """Return the turns of agents' sessions with these sizes, one session after another."""
    return [
        WorkloadRequest(
            turn.prompt_len, sizes.output_len, turn.start_s, turn.system, sizes.system_len, turn.session, turn.pause_s
        )
        for turn in turns(sizes, np.random.default_rng(seed))
    ]


def _requests(
    prompt_lens: list[int], output_lens: list[int], arrivals: NDArray[np.float64] | None = None
) -> list[WorkloadRequest]:
    """Return requests with these lengths, which arrive at these times in seconds, or all at the start."""
    times = [0.0] * len(prompt_lens) if arrivals is None else [round(t, 4) for t in arrivals.tolist()]
    return [WorkloadRequest(*fields) for fields in zip(prompt_lens, output_lens, times, strict=True)]


def _chat_turn(chat: int, turn: int) -> WorkloadRequest:
    """Return a request with 64 new tokens after a history: 64 prompt and 32 output tokens per earlier turn."""
    history = 96 * turn
    return WorkloadRequest(history + 64, 32, 2.0 * turn, chat, history)
