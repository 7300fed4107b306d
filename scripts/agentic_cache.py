"""Serve agents' sessions, or a recorded trace, in virtual time: the real scheduler, modelled steps and copies.

    python scripts/agentic_cache.py --hints none,session,pause --fraction 0.25
    python scripts/agentic_cache.py --workload mooncake-conversation.jsonl.gz --num-requests 3000

Prints a JSON line for each type of hint: `none`; `session`, the conversation's name; `pause`, also the typical duration
for the tool that the session waits for, and that its last turn is the last. Hits are cached prompt tokens over prompt
tokens; recomputed tokens were computed before. The page pool has a fraction of the working set, which is all different
pages in the whole run. With `--disk` a tier below it holds the rest. Nothing in it was measured on a chip.
"""

import argparse
import gzip
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.cached_tokens import NO_CACHED_TOKENS, CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.reuse_hint import IN_MEMORY_S, NOT_AGAIN, ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.core import EngineCore
from jaxserve.core.deltas import Delta
from jaxserve.core.events import Submitted
from jaxserve.core.replica import Replica
from jaxserve.errors import ConfigError
from jaxserve.scheduling.request import Request
from jaxserve.tools.bench.agentic import FULL, AgenticSizes
from jaxserve.tools.bench.workloads import WorkloadRequest, agentic_requests
from jaxserve.tools.planner.modelled import ModelledMover
from simulate import modelled

HINTS = ("none", "session", "pause")
BLOCK_LEN = 512  # tokens per hash id in Mooncake's traces
_OTHER_LEN = 8_192  # prompt tokens of other requests
_SESSION, _OWN = 1_000, 1_000_000  # first token ids of sessions' and blocks' tokens


@dataclass
class Turn:
    """A request of the load.

    Attributes:
        parts: token id and length for each prompt part: equal ids at equal positions are equal tokens.
        output_len: tokens to generate.
        arrival_s: arrival time; after the previous turn's end, if there is one.
        session: its conversation's name.
        later: the conversation's next turn.
        hint: its hint.
        counts: False for other requests, which the figures leave out.
    """

    parts: list[tuple[int, int]]
    output_len: int
    arrival_s: float
    session: str = ""
    later: "Turn | None" = None
    hint: ReuseHint | None = None
    counts: bool = True

    @property
    def prompt(self) -> list[int]:
        """Prompt token ids."""
        return [token for token, length in self.parts for _ in range(length)]


def agentic_load(sizes: AgenticSizes, hints: str) -> tuple[list[Turn], int]:
    """Return the first turn in each agent's session, and the number of different tokens in all prompts and outputs."""
    sessions: defaultdict[int, list[WorkloadRequest]] = defaultdict(list)
    for request in agentic_requests(sizes):
        sessions[request.session_id].append(request)
    firsts = []
    for session, requests in sessions.items():
        turns = [
            Turn(
                [
                    (request.prefix_id, request.prefix_len),
                    (_SESSION + session, request.prompt_len - request.prefix_len),
                ],
                request.output_len,
                request.pause_s if index else request.arrival_s,
                f"session-{session}",
            )
            for index, request in enumerate(requests)
        ]
        for turn, later in zip(turns, [*turns[1:], None], strict=True):
            turn.later = later
            if hints == "session":
                turn.hint = ReuseHint(turn.session)
            elif hints == "pause":
                turn.hint = _expected(turn.session, None if later is None else later.arrival_s)
        firsts.append(turns[0])
    lasts = [requests[-1] for requests in sessions.values()]
    num_systems = len({request.prefix_id for request in lasts})
    own = sum(last.prompt_len + last.output_len - last.prefix_len for last in lasts)
    return firsts, own + num_systems * sizes.system_len


def other_load(rate: float, until_s: float) -> list[Turn]:
    """Return requests that share nothing with each other, with Poisson arrivals until a time."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, math.ceil(rate * until_s)))
    return [Turn([(_OWN + index, _OTHER_LEN)], 64, float(at_s), counts=False) for index, at_s in enumerate(arrivals)]


def _expected(session: str, pause_s: float | None) -> ReuseHint:
    """Return a client's knowledge about a pause: its magnitude, a power of ten, by the tool; None for the last turn."""
    if pause_s is None:
        return ReuseHint(session, NOT_AGAIN)
    magnitude = 10.0 ** math.floor(math.log10(max(pause_s, 0.1)))
    return ReuseHint(session, 3 * magnitude, max(IN_MEMORY_S, 30 * magnitude))


def trace_load(path: Path, num_requests: int | None, speed: float) -> tuple[list[Turn], int]:
    """Return the requests in a Mooncake trace, and the number of different tokens in their prompts."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [json.loads(line) for line in file]
    turns, blocks = [], set()
    for row in rows[:num_requests]:
        blocks.update(row["hash_ids"])
        lengths = [BLOCK_LEN] * (len(row["hash_ids"]) - 1)
        lengths.append(row["input_length"] - sum(lengths))
        parts = [(_OWN + block, length) for block, length in zip(row["hash_ids"], lengths, strict=True)]
        turns.append(Turn(parts, max(row["output_length"], 1), row["timestamp"] / 1e3 / speed))
    return turns, len(blocks) * BLOCK_LEN


class Arrival(NamedTuple):
    """A turn that is due."""

    due_s: float
    number: int
    turn: Turn


@dataclass
class Served:
    """What was served so far."""

    num_prompt_tokens: int = 0  # in sessions or a trace, without other requests
    cached: CachedTokens = NO_CACHED_TOKENS
    started: set[int] = field(default_factory=set)
    ttft_s: list[float] = field(default_factory=list)
    now_s: float = 0.0


def serve(core: EngineCore, executor: Any, mover: ModelledMover | None, firsts: list[Turn]) -> Served:
    """Serve a load until the end."""
    due = [Arrival(turn.arrival_s, number, turn) for number, turn in enumerate(firsts)]
    heapq.heapify(due)
    running: dict[int, Arrival] = {}
    served, number = Served(), len(due)
    while due or core.has_work():
        while due and due[0].due_s <= executor.now_s:
            arrival = heapq.heappop(due)
            request = _request(number, arrival)
            number += 1
            running[request.key] = arrival
            served.num_prompt_tokens += arrival.turn.counts * request.num_prompt_tokens
            core.inbox.append(Submitted([request]))
        if not core.has_work() or not core.step(executor.now_s):  # nothing to compute: wait for an arrival or a load
            executor.now_s = min(_next_times(due, mover), default=executor.now_s)
        for key, at_s, ended in _changes(core, served, running):
            turn = running[key].turn
            if not ended and turn.counts:
                served.ttft_s.append(at_s - running[key].due_s)
            elif ended and (later := running.pop(key).turn.later) is not None:
                heapq.heappush(due, Arrival(at_s + later.arrival_s, number, later))
                number += 1
    served.now_s = executor.now_s
    return served


def _request(key: int, due: Arrival) -> Request:
    """Return the scheduler's request for a turn."""
    prompt, turn = due.turn.prompt, due.turn
    params = SamplingParams(max_tokens=turn.output_len)
    total = len(prompt) + turn.output_len
    return Request(f"{key}#0", prompt, params, 0, total, key=key, arrival=key, arrival_s=due.due_s, reuse=turn.hint)


def _next_times(due: list[Arrival], mover: ModelledMover | None) -> Iterator[float]:
    """Yield when the next request arrives and when the next load ends."""
    if due:
        yield due[0].due_s
    if mover is not None and (end_s := mover.next_end_s) is not None:
        yield end_s


def _changes(core: EngineCore, served: Served, running: dict[int, Arrival]) -> Iterator[tuple[int, float, bool]]:
    """Yield key, time and whether it ended, for each first token and each end."""
    while core.outbox:
        delta = core.outbox.popleft()
        assert isinstance(delta, Delta), delta
        for admitted in delta.admitted:
            if not admitted.num_preemptions and running[admitted.key].turn.counts:
                served.cached += admitted.cached_tokens
        if delta.step is None:
            continue
        for row, (key, token_ids) in enumerate(zip(delta.step.keys, delta.step.token_ids, strict=True)):
            if token_ids and key not in served.started:
                served.started.add(key)
                yield key, delta.at_s, False
            if row in delta.step.ended:
                yield key, delta.at_s, True


def run(args: argparse.Namespace, hints: str) -> dict[str, Any]:
    """Serve the load with one kind of hint, and return the figures."""
    if args.workload == "agentic":
        max_len = min(FULL.max_len, args.max_model_len)
        sizes = replace(FULL, num_sessions=args.sessions, session_gap_s=args.gap, max_len=max_len)
        firsts, working_set = agentic_load(sizes, hints)
        if args.others:
            firsts += other_load(args.others, args.sessions * args.gap)
    else:
        firsts, working_set = trace_load(Path(args.workload), args.num_requests, args.speed)
    num_pages = math.ceil(working_set * args.fraction / args.page_size)
    options = {"max_model_len": args.max_model_len, "page_size": args.page_size, "num_pages": num_pages}
    arch, executor = modelled(args.model, args.target, max_num_batched_tokens=8192, **options)
    stats = EngineStats()
    mover = None
    if args.disk:
        page_bytes = executor.costs.kv_token_bytes * args.page_size
        mover = ModelledMover(executor, math.ceil(working_set / args.page_size), page_bytes / (args.disk * 1e9))
    replica = Replica(EngineConfig("none"), arch, executor, stats, mover=mover)
    core = EngineCore([replica], step_ahead=True, on_failure=lambda error: print(repr(error)))
    served = serve(core, executor, mover, firsts)
    ttft_ms = np.percentile(np.array(served.ttft_s) * 1e3, (50, 90, 99)).round(1).tolist()
    num_computed = served.num_prompt_tokens - served.cached.total
    return {
        "bench": "agentic-cache",
        "workload": Path(args.workload).name,
        "hints": hints,
        "num_requests": len(served.ttft_s),
        "num_prompt_tokens": served.num_prompt_tokens,
        "working_set_tokens": working_set,
        "pool_tokens": num_pages * args.page_size,
        "hits": round(served.cached.total / served.num_prompt_tokens, 4),
        "hits_on_device": round(served.cached.device / served.num_prompt_tokens, 4),
        "hits_on_disk": round(served.cached.disk / served.num_prompt_tokens, 4),
        "recomputed_tokens": max(num_computed - working_set, 0),
        "ttft_ms": dict(zip(("p50", "p90", "p99"), ttft_ms, strict=True)),
        "virtual_s": round(served.now_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="agentic", help="agentic, or a Mooncake trace in JSON lines")
    parser.add_argument("--num-requests", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--speed", type=float, default=1.0, help="factor by which a trace is faster than recorded")
    parser.add_argument("--sessions", type=int, default=FULL.num_sessions, help="agents' sessions")
    parser.add_argument("--gap", type=float, default=FULL.session_gap_s, help="mean seconds between their starts")
    parser.add_argument("--others", type=float, default=0.0, help="other requests per second, without reuse")
    parser.add_argument("--hints", default="none,session,pause", help=f"kinds of hints, among {', '.join(HINTS)}")
    parser.add_argument("--fraction", type=float, default=0.25, help="pool size over the working set")
    parser.add_argument("--disk", type=float, metavar="GB/S", help="rate of a tier that holds the working set")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=131_072)
    args = parser.parse_args()
    kinds = args.hints.split(",") if args.workload == "agentic" else ["none"]
    if unknown := set(kinds) - set(HINTS):
        raise ConfigError(f"--hints must be among {list(HINTS)}, got {sorted(unknown)}")
    for hints in kinds:
        print(json.dumps(run(args, hints)), flush=True)


if __name__ == "__main__":
    main()
