"""Twice a server's sustainable load, compared with nine tenths of it: refusals, and waiting times of the others.

    python scripts/overload.py --seconds 60

The server runs here, with the embedded model by default, the client in a separate process, which sends streamed
requests at random times, independently of earlier ones, and reads bytes. First it finds the server's sustainable rate,
by exceeding it; then it sends nine tenths of that, without a target; then twice that, while a request is refused if its
first token would be later than the previous phase's 99th percentile, or than `--target-ttft-ms`.

Prints one JSON line: times to first token for accepted requests, refusals by status, requests without an end, errors of
wait estimates, and the server's memory over time. Times include the client's delays: `late_ms` is how much later than
planned it sent requests.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import new_server
from jaxserve.server.sockets import listen

LOOK_S = 0.05
CAPACITY_S = 20  # seconds for measuring the sustainable rate


class Reply(NamedTuple):
    """One request, as seen by the client."""

    sent_s: float  # system clock time
    late_s: float
    status: int
    first_s: float | None
    is_whole: bool
    retry_after_s: float | None


async def ask(port: int, body: bytes, at_s: float) -> Reply:
    late_s = time.time() - at_s
    sent_s, first_s = time.time(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    start, end = b"", b""
    while data := await reader.read(2**16):
        if first_s is None:
            start += data
            if b"data: " in start:
                first_s = time.time() - sent_s
        end = (end + data)[-64:]
    writer.close()
    headers = dict(line.lower().split(b": ", 1) for line in start.split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    wait = headers.get(b"retry-after-ms")
    status = int(start.split()[1])
    return Reply(sent_s, late_s, status, first_s, b"[DONE]" in end, None if wait is None else int(wait) / 1e3)


def client(pipe: Connection) -> None:
    """Run phases received through the pipe."""

    async def run(port: int, bodies: list[bytes], times_s: list[float]) -> list[Reply | BaseException]:
        began_s = time.time()
        tasks = []
        for body, at_s in zip(bodies, times_s, strict=True):
            await asyncio.sleep(max(began_s + at_s - time.time(), 0))
            tasks.append(asyncio.create_task(ask(port, body, began_s + at_s)))
        return await asyncio.gather(*tasks, return_exceptions=True)

    while (job := pipe.recv()) is not None:
        pipe.send([each if isinstance(each, Reply) else repr(each) for each in asyncio.run(run(*job))])


class Watch:
    """Observes estimates and memory while a phase runs."""

    def __init__(self, app: App, num_tokens: int) -> None:
        self.times_s: list[float] = []
        self.estimates_s: list[float] = []
        self.rss_mib: list[float] = []
        self._app, self._num_tokens, self._stop = app, num_tokens, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            wait = self._app.service.observer.wait_estimator.wait(self._num_tokens)
            self.times_s.append(time.time())
            self.estimates_s.append(0.0 if wait is None else wait.first_token_s)
            self.rss_mib.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)

    def errors(self, replies: list[Reply]) -> list[float]:
        """Return the relative errors of estimates made right before accepted requests."""
        found = []
        for reply in replies:
            index = bisect_left(self.times_s, reply.sent_s) - 1
            if reply.first_s is not None and index >= 0:
                found.append(abs(self.estimates_s[index] - reply.first_s) / reply.first_s)
        return found


def phase(
    engine: Engine, pipe: Connection, args: argparse.Namespace, times_s: list[float], target_ms: float | None
) -> dict[str, Any]:
    """Run one phase on a separate server; return its figures."""
    targets = [] if target_ms is None else [f"{target_ms:.3f}"]
    config = ServerConfig(port=0, admission_ttft_ms=targets)
    rng = random.Random(len(times_s))
    vocab = engine.arch.vocab_size
    body = {"max_tokens": args.output_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    bodies = [
        json.dumps(body | {"prompt": [rng.randrange(3, vocab) for _ in range(args.prompt_tokens)]}).encode()
        for _ in times_s
    ]
    started = threading.Event()
    with listen(config) as sock:
        app = App(engine, config)
        server = new_server(app, config, sock, lambda url: started.set())
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        started.wait()
        with Watch(app, args.prompt_tokens) as watch:
            began_s = time.time()
            pipe.send((sock.getsockname()[1], bodies, times_s))
            results = pipe.recv()
            took_s = time.time() - began_s
        print(f"{len(times_s)} requests in {took_s:.1f} s", file=sys.stderr)
        climbs = dict(app.service.admission.ladder.num_climbs)
        server.handle_exit(15, None)
        thread.join()
    replies = [each for each in results if isinstance(each, Reply)]
    accepted = [reply for reply in replies if reply.status == 200]
    firsts = sorted(reply.first_s for reply in accepted if reply.first_s is not None)
    quarter = max(len(watch.rss_mib) // 4, 1)
    errors = watch.errors(accepted)
    return {
        "requests": len(times_s),
        "seconds": round(took_s, 1),
        "accepted": len(accepted),
        "statuses": dict(Counter(reply.status for reply in replies)),
        "lost": len(results) - len(replies) + sum(not reply.is_whole for reply in accepted),
        "ttft_ms": {f"p{share}": _percentile(firsts, share) for share in (50, 90, 99)},
        "estimate_median_relative_error": round(statistics.median(errors), 3) if errors else None,
        "retry_after_ms_median": _median_ms([r.retry_after_s for r in replies if r.retry_after_s is not None]),
        "rss_mib": [round(max(part)) for part in (watch.rss_mib[:quarter], watch.rss_mib[-quarter:])],
        "late_ms": _percentile(sorted(reply.late_s for reply in replies), 99),
        "rungs": climbs,
        "tok_s": round(len(accepted) * args.output_tokens / took_s, 1),
    }


def _random_times(rate: float, seconds: float) -> list[float]:
    """Return the arrival times of a Poisson process."""
    rng, times_s = random.Random(0), [0.0]
    while times_s[-1] < seconds:
        times_s.append(times_s[-1] + rng.expovariate(rate))
    return times_s


def _rate(figures: dict[str, Any]) -> float:
    """Return the accepted requests per second of a phase."""
    return figures["accepted"] / figures["seconds"]


def _percentile(values: list[float], share: int) -> float | None:
    """Return a percentile of sorted seconds, in milliseconds."""
    return round(values[min(int(len(values) * share / 100), len(values) - 1)] * 1e3, 1) if values else None


def _median_ms(values: list[float]) -> float | None:
    """Return the median of seconds, in milliseconds."""
    return round(statistics.median(values) * 1e3, 1) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--seconds", type=float, default=60, help="length of each phase")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--target-ttft-ms", type=float, help="target under overload; measured by default")
    parser.add_argument("--compile-ahead", default="all", help="programs to compile first: all or minimal")
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=client, args=(theirs,), daemon=True)
    process.start()
    engine = Engine(EngineConfig(args.model, max_num_seqs=args.max_num_seqs, compile_ahead=args.compile_ahead))
    engine.wait_until_warm()
    capacity = _rate(phase(engine, ours, args, [0.0] * (8 * args.max_num_seqs), None))
    for seconds in (CAPACITY_S / 8, CAPACITY_S, CAPACITY_S):  # each comes closer to the sustainable rate
        capacity = _rate(phase(engine, ours, args, _random_times(1.2 * capacity, seconds), None))
    figures: dict[str, Any] = {"capacity_req_s": round(capacity, 2)}
    target_ms = args.target_ttft_ms
    for name, load in (("at_0.9", 0.9), ("at_2.0", 2.0)):
        times_s = _random_times(load * capacity, args.seconds)
        figures[name] = phase(engine, ours, args, times_s, target_ms if load > 1 else None)
        target_ms = target_ms or figures[name]["ttft_ms"]["p99"]
    ratio = figures["at_2.0"]["ttft_ms"]["p99"] / figures["at_0.9"]["ttft_ms"]["p99"]
    engine.check_integrity()
    ours.send(None)
    print(json.dumps({"bench": "overload", "target_ttft_ms": target_ms, "p99_ratio": round(ratio, 3)} | figures))


if __name__ == "__main__":
    main()
