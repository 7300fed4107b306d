"""Compare two equal servers with one that computes prompts and one that decodes, under the same load.

    python scripts/prefill_apart.py --json out.json
    python scripts/prefill_apart.py path/to/checkpoint --streams 4 --prompt-len 900 --prompts-per-s 2

A router gives requests to two servers, each on one core: alike, or a producer and a consumer that share a directory. A
few clients read streams without a pause, while long prompts, each of which asks for one token, come at a constant
rate. Both ways take turns. Reported are, for each, the medians over the turns of: the streams' tokens per second, and
the median, 99th percentile and maximum of the time between two tokens of a stream; the long prompts' median and 99th
percentile of the time to their token, and the prompts per second that were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

ROLES: dict[str, Sequence[str | None]] = {"alike": (None, None), "apart": ("kv_producer", "kv_consumer")}
START_S = 900.0  # a server's longest start


@contextmanager
def served(roles: Sequence[str | None], args: argparse.Namespace) -> Iterator[str]:
    """Run servers of these roles and a router; yield the router's URL."""
    model = [] if args.model is None else [args.model]
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    with tempfile.TemporaryDirectory() as store:
        for index, role in enumerate(roles):
            command = ["serve", *model, *args.option, "--port", str(args.port + 1 + index), "--log-level", "error"]
            command += [] if role is None else ["--kv-store", store, "--kv-role", role]
            core = str(cores[index % len(cores)])
            processes.append(subprocess.Popen(["taskset", "-c", core, sys.executable, "-m", "jaxserve", *command]))
        urls = [f"http://127.0.0.1:{args.port + 1 + index}" for index in range(len(roles))]
        options = ["--port", str(args.port), "--min-transfer-tokens", "128", "--log-level", "error"]
        processes.append(subprocess.Popen([sys.executable, "-m", "jaxserve", "route", *urls, *options]))
        try:
            yield f"http://127.0.0.1:{args.port}"
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()


class Load:
    """Streams and long prompts, and their times.

    Args:
        session: HTTP client.
        url: the router's URL.
        args: options.
        seed: the prompts' seed, which differs between turns.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, args: argparse.Namespace, seed: int) -> None:
        self._session, self._url, self._args, self._rng = session, f"{url}/v1/completions", args, random.Random(seed)
        self.gaps_s: list[float] = []
        self.waits_s: list[float] = []
        self.num_tokens = 0

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(300, 1000) for _ in range(num_tokens)]

    async def stream(self, until_s: float) -> None:
        """Read streams one after the other until then."""
        while time.monotonic() < until_s:
            body = {"prompt": self._prompt(16), "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
            last_s = None
            async with self._session.post(self._url, json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            self.gaps_s.append(now_s - last_s)
                        self.num_tokens, last_s = self.num_tokens + 1, now_s

    async def prompt(self) -> None:
        """Send a long prompt and wait for its token."""
        began_s = time.monotonic()
        body = {"prompt": self._prompt(self._args.prompt_len), "max_tokens": 1, "temperature": 0}
        async with self._session.post(self._url, json=body) as reply:
            await reply.read()
            reply.raise_for_status()
        self.waits_s.append(time.monotonic() - began_s)

    async def run(self, seconds: float) -> None:
        """Send both for so long."""
        until_s = time.monotonic() + seconds
        tasks = [asyncio.create_task(self.stream(until_s)) for _ in range(self._args.streams)]
        next_s = time.monotonic()
        while next_s < until_s:
            tasks.append(asyncio.create_task(self.prompt()))
            next_s += 1 / self._args.prompts_per_s
            await asyncio.sleep(max(next_s - time.monotonic(), 0))
        await asyncio.gather(*tasks)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which this fraction of the values lies, in milliseconds."""
    return sorted(values)[min(int(fraction * len(values)), len(values) - 1)] * 1e3


async def measure(url: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return one turn's times."""
    async with aiohttp.ClientSession() as session:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(url + "/health") as reply:
                    if {*(await reply.json())["replicas"].values()} == {"ok"}:
                        break
            await asyncio.sleep(0.2)
        await Load(session, url, args, -seed).run(3.0)  # warms every cache
        load, began_s = Load(session, url, args, seed), time.monotonic()
        await load.run(args.seconds)
        lasted_s = time.monotonic() - began_s
        async with session.get(url + "/metrics") as reply:
            lines = (await reply.text()).splitlines()
    transferred = next(line for line in lines if line.startswith("jaxserve:router_transferred_prompts_total"))
    return {
        "stream_tokens_per_s": load.num_tokens / lasted_s,
        "gap_p50_ms": percentile(load.gaps_s, 0.5),
        "gap_p99_ms": percentile(load.gaps_s, 0.99),
        "gap_max_ms": max(load.gaps_s) * 1e3,
        "first_token_p50_ms": percentile(load.waits_s, 0.5),
        "first_token_p99_ms": percentile(load.waits_s, 0.99),
        "prompts_per_s": len(load.waits_s) / lasted_s,
        "transferred": float(transferred.rpartition(" ")[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint; by default the embedded model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=900, help="tokens of each long prompt")
    parser.add_argument("--prompts-per-s", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--port", type=int, default=8350, help="first port")
    parser.add_argument("--option", action="append", default=[], help="option of the servers: --option=--page-size=8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in ROLES}
    for turn in range(args.turns):
        for way, roles in ROLES.items():
            with served(roles, args) as url:
                turns[way].append(asyncio.run(measure(url, args, turn + 1)))
            print(way, json.dumps(turns[way][-1]), flush=True)
    medians: dict[str, Any] = {
        way: {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
        for way, found in turns.items()
    }
    print(json.dumps(medians, indent=2))
    if args.json is not None:
        arguments = {**vars(args), "json": str(args.json)}
        args.json.write_text(json.dumps({**medians, "turns": turns, "arguments": arguments}, indent=2) + "\n")


if __name__ == "__main__":
    main()
