"""Kill servers with SIGKILL while a router gives them requests, and compare every reply with an undisturbed one.

    python scripts/kill_replicas.py --seconds 600 --json out.json
    python scripts/kill_replicas.py path/to/checkpoint --replicas 3 --clients 16 --kill-every 5

It starts servers of one model and a router, and first asks one server for the replies to a set of requests: greedy and
seeded, whole and streamed, completions and chats. Then clients repeat these requests through the router, while every
few seconds a server is killed and started again. A reply counts as

- same: it has exactly the text of the undisturbed reply;
- different: it has another text;
- refused: an error (503) before its first byte, because no server was ready;
- failed: any other error, or a stream that ended without its last event.

The exit status is 1 if any reply is different or has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

START_S = 900.0  # longest start of a server
TEXTS = ("def main(", "class Queue:\n    def ", "import os\n", "def read_lines(path):\n    ", "async def fetch(")
NUM_LONGEST = 200  # tokens of the longest reply


def requests(rng: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return different requests, each a path and a body."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": rng.randint(20, NUM_LONGEST), "stream": rng.random() < 0.8}
        body |= rng.choice(({"temperature": 0.0}, {"temperature": 0.8, "seed": number}))
        text = f"# {number}\n{rng.choice(TEXTS)}"
        if rng.random() < 0.3:
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append(("/v1/completions", body | {"prompt": text, "n": rng.choice((1, 1, 2))}))
    return found


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """Return a request's outcome, and the texts by sample if it was answered."""
    try:
        async with session.post(url + path, json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                return ("refused" if reply.status == 503 else "failed"), data.decode(errors="replace")
    except (aiohttp.ClientError, OSError) as error:
        return "failed", repr(error)
    events = [data] if not body["stream"] else data.removesuffix(b"\n\n").split(b"\n\n")
    if body["stream"] and events.pop() != b"data: [DONE]":
        return "failed", data[-500:].decode(errors="replace")
    found = dict.fromkeys(range(body.get("n", 1)), "")
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: ")).get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            found[choice["index"]] += part.get("content") or ""
    return "answered", found


class Processes:
    """Servers and a router, each a process of its own on loopback.

    Args:
        model: arguments that name the model and its options.
        num_replicas: server count.
        first_port: the router's port; the servers' ports follow.
        logs: directory for their logs.
    """

    def __init__(self, model: list[str], num_replicas: int, first_port: int, logs: Path) -> None:
        self._model, self._logs = model, logs
        self.urls = [f"http://127.0.0.1:{first_port + 1 + index}" for index in range(num_replicas)]
        self.router_url = f"http://127.0.0.1:{first_port}"
        self._servers = [self._start_server(index) for index in range(num_replicas)]
        arguments = ["route", *self.urls, "--port", str(first_port), "--poll-interval-s", "0.2"]
        self._router = self._start(arguments, "router")

    def _start_server(self, index: int) -> subprocess.Popen[bytes]:
        port = self.urls[index].rpartition(":")[2]
        return self._start(["serve", *self._model, "--port", port], f"server-{index}")

    def _start(self, arguments: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "jaxserve", *arguments], stdout=log, stderr=log)

    def kill(self, index: int) -> None:
        """Kill a server and start it again."""
        self._servers[index].send_signal(signal.SIGKILL)
        self._servers[index].wait()
        self._servers[index] = self._start_server(index)

    def close(self) -> None:
        """End all processes."""
        for process in (self._router, *self._servers):
            process.terminate()
        for process in (self._router, *self._servers):
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


async def wait_until_ready(session: aiohttp.ClientSession, urls: list[str]) -> None:
    """Wait until all servers take requests."""
    until_s = time.monotonic() + START_S
    for url in urls:
        while True:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(url + "/ready") as reply:
                    if reply.status == 200:
                        break
            if time.monotonic() > until_s:
                raise SystemExit(f"{url} was not ready after {START_S:.0f} s")
            await asyncio.sleep(0.2)


async def run(args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    """Return the outcome counts."""
    rng, outcomes, examples = random.Random(args.seed), Counter[str](), list[str]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await wait_until_ready(session, [*processes.urls, processes.router_url])
        work = requests(rng, args.requests)
        expected = [await ask(session, processes.urls[0], *request) for request in work]
        if wrong := [reply for outcome, reply in expected if outcome != "answered"]:
            raise SystemExit(f"an undisturbed request has failed: {wrong[0]}")
        end_s = time.monotonic() + args.seconds

        async def send(client: int) -> None:
            order = random.Random(client)
            while time.monotonic() < end_s:
                number = order.randrange(len(work))
                outcome, reply = await ask(session, processes.router_url, *work[number])
                if outcome == "answered":
                    outcome = "same" if reply == expected[number][1] else "different"
                outcomes[outcome] += 1
                if outcome in ("different", "failed"):
                    examples.append(f"{outcome}: {work[number]}: {reply} instead of {expected[number][1]}")
                if outcome == "refused":
                    await asyncio.sleep(0.5)

        clients = [asyncio.create_task(send(client)) for client in range(args.clients)]
        num_kills = 0
        while time.monotonic() + args.kill_every < end_s:
            await asyncio.sleep(args.kill_every)
            index = rng.randrange(len(processes.urls))
            await asyncio.to_thread(processes.kill, index)
            num_kills += 1
            if not args.overlapping:
                await wait_until_ready(session, processes.urls)
        await asyncio.gather(*clients)
        async with session.get(processes.router_url + "/metrics") as reply:
            metrics = [line.split() for line in (await reply.text()).splitlines() if not line.startswith("#")]
    totals = {name: float(value) for name, value in metrics if "{" not in name}
    return {
        "outcomes": dict(outcomes),
        "kills": num_kills,
        "moved_streams": totals["jaxserve:router_moved_streams_total"],
        "attempts": {name: float(value) for name, value in metrics if name.startswith("jaxserve:router_attempts")},
        "examples": examples[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint; by default the embedded model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--requests", type=int, default=40, help="number of different requests")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="S")
    parser.add_argument("--overlapping", action="store_true", help="kill servers even if others are not ready again")
    parser.add_argument("--port", type=int, default=8380, help="first port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="option of the servers, as --option=--page-size=8"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes
    model = [*([] if args.model is None else [args.model]), *args.option]
    with tempfile.TemporaryDirectory() as logs:
        processes = Processes(model, args.replicas, args.port, Path(logs))
        try:
            found = asyncio.run(run(args, processes))
        finally:
            processes.close()
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found | {"arguments": {**vars(args), "json": str(args.json)}}, indent=2) + "\n")
    sys.exit(bool(found["outcomes"].get("different") or found["outcomes"].get("failed")))


if __name__ == "__main__":
    main()
