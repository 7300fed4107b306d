"""Kill producers and consumers of KV pages with SIGKILL around a transfer, and compare every reply.

    python scripts/kill_transfers.py --rounds 10 --json out.json
    python scripts/kill_transfers.py path/to/checkpoint --store unix:/run/redis.sock

A producer, two consumers and a router are processes on loopback, with a shared directory as their store. For each kind
of fault a client sends long prompts through the router, and a server dies

- before: the producer, before the prompt arrives;
- in: the producer, while it computes the prompt and writes its pages;
- after: the producer, once a consumer has begun the stream;
- consumer: the consumer, in the middle of the stream, which continues on the other one;
- none: no server, for comparison.

Each reply must have the tokens of an undisturbed one, which a consumer has computed alone (with another `cache_salt`).
`transferred` counts the prompts that a producer computed. At the end no server has a page in use, and after `--ttl-s`
the store deletes the pages that nobody has loaded, the dead producers' among them. The exit status is 1 if a reply
differs or fails, or pages are left.
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

FAULTS = ("none", "before", "in", "after", "consumer")
START_S = 900.0  # longest start of a server


class Servers:
    """A producer, two consumers and a router, each a process of its own on loopback.

    Args:
        model: arguments that name the model and its options.
        store: URL of the store.
        ttl_s: time after which it deletes pages.
        first_port: the router's port; the servers' ports follow.
        logs: directory for their logs.
    """

    def __init__(self, model: list[str], store: str, ttl_s: float, first_port: int, logs: Path) -> None:
        self._logs = logs
        config = json.dumps({"url": store, "ttl_s": ttl_s})
        self.ports = {name: first_port + 1 + index for index, name in enumerate(("producer", "first", "second"))}
        self._commands = {
            name: [
                *("serve", *model, "--port", str(port), "--kv-store", config),
                *("--kv-role", "kv_producer" if name == "producer" else "kv_consumer"),
            ]
            for name, port in self.ports.items()
        }
        self.processes = {name: self._start(name) for name in self.ports}
        urls = [self.url(name) for name in self.ports]
        options = ["--port", str(first_port), "--poll-interval-s", "0.1", "--min-transfer-tokens", "64"]
        self._commands["router"] = ["route", *urls, *options]
        self.ports["router"] = first_port
        self.processes["router"] = self._start("router")

    def url(self, name: str) -> str:
        """Return a process's URL."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "jaxserve", *self._commands[name]], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def restart(self, name: str) -> None:
        """Start a process again if it has died."""
        if self.processes[name].poll() is not None:
            self.processes[name] = self._start(name)

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return a server's metrics without labels, or summed over them."""
    found: Counter[str] = Counter()
    async with session.get(url + "/metrics") as reply:
        for line in (await reply.text()).splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.partition("{")[0]] += float(value)
    return dict(found)


async def wait_until_ready(session: aiohttp.ClientSession, servers: Servers) -> None:
    """Wait until all servers take requests, and the router knows it."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with suppress(aiohttp.ClientError, OSError):
            async with session.get(servers.url("router") + "/health") as reply:
                if [*(await reply.json())["replicas"].values()] == ["ok"] * 3:
                    return
        await asyncio.sleep(0.1)
    raise SystemExit(f"the servers were not ready after {START_S:.0f} s")


def ids_in(events: bytes) -> list[int]:
    """Return the token ids in a stream; SystemExit if it has no end."""
    if not events.endswith(b"data: [DONE]\n\n"):
        raise ValueError(f"the stream has no end: {events[-300:]!r}")
    found: list[int] = []
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                found += choice.get("token_ids") or ()
    return found


class Round:
    """One prompt, a fault, and the reply.

    Args:
        session: HTTP client.
        servers: the processes.
        fault: kind of the fault.
        rng: source of the prompt and of times.
        prompt_len: number of prompt tokens.
    """

    def __init__(
        self, session: aiohttp.ClientSession, servers: Servers, fault: str, rng: random.Random, prompt_len: int
    ) -> None:
        self._session, self._servers, self._fault, self._rng = session, servers, fault, rng
        sampling = rng.choice(({"temperature": 0.0}, {"temperature": 1.0, "seed": rng.randrange(1000)}))
        prompt = [rng.randrange(300, 1000) for _ in range(prompt_len)]
        self._body: dict[str, Any] = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
        self._body |= sampling | {"stream": True}

    async def run(self) -> str:
        """Return the outcome: "same", "different" or "failed"."""
        servers, fault = self._servers, self._fault
        async with self._session.post(
            servers.url("first") + "/v1/completions", json=self._body | {"cache_salt": str(self._rng.random())}
        ) as reply:
            expected = ids_in(await reply.read())
        if fault == "before":
            servers.kill("producer")
        asking = asyncio.create_task(self._ask())
        if fault == "in":
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
            servers.kill("producer")
        try:
            found = await asking
        except (aiohttp.ClientError, ValueError, OSError) as error:
            print(f"{fault}: {error}", file=sys.stderr)
            return "failed"
        return "same" if found == expected else "different"

    async def _ask(self) -> list[int]:
        """Send the prompt through the router; kill the producer or the consumer in the stream if that is the fault."""
        data, has_killed = b"", False
        async with self._session.post(self._servers.url("router") + "/v1/completions", json=self._body) as reply:
            async for part in reply.content.iter_any():
                data += part
                if not has_killed and data.count(b"\n\n") > 3 and self._fault in ("after", "consumer"):
                    has_killed = True
                    self._servers.kill("producer" if self._fault == "after" else await self._busy_consumer())
        return ids_in(data)

    async def _busy_consumer(self) -> str:
        """Return the consumer that serves the request."""
        for name in ("first", "second"):
            async with self._session.get(self._servers.url(name) + "/load") as reply:
                if (await reply.json())["server_load"]:
                    return name
        return "first"  # the stream has just ended


async def run(args: argparse.Namespace, servers: Servers, store: Path | None) -> dict[str, Any]:
    """Return the outcomes by fault."""
    rng, outcomes = random.Random(args.seed), {fault: Counter[str]() for fault in FAULTS}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        await wait_until_ready(session, servers)
        for _ in range(args.rounds):
            for fault in FAULTS:
                outcomes[fault][await Round(session, servers, fault, rng, args.prompt_len).run()] += 1
                for name in ("producer", "first", "second"):
                    servers.restart(name)
                await wait_until_ready(session, servers)
        of_router = await metrics(session, servers.url("router"))
        used = [
            (await metrics(session, servers.url(name)))["vllm:kv_cache_usage_perc"]
            for name in ("producer", "first", "second")
        ]
        pages = {"pages_in_use": sum(used)} | (
            {} if store is None else await _wait_for_deletion(session, servers, store, args)
        )
    return {
        "outcomes": {fault: dict(counts) for fault, counts in outcomes.items()},
        "transferred": of_router["jaxserve:router_transferred_prompts_total"],
        "moved_streams": of_router["jaxserve:router_moved_streams_total"],
        **pages,
    }


async def _wait_for_deletion(
    session: aiohttp.ClientSession, servers: Servers, store: Path, args: argparse.Namespace
) -> dict[str, int]:
    """Return the number of pages in the store, and of those left when the next engine writes there after `ttl_s`."""
    before = {each for each in store.rglob("*") if each.is_file()}
    servers.kill("producer")
    await asyncio.sleep(args.ttl_s)
    servers.restart("producer")
    await wait_until_ready(session, servers)
    body = {"prompt": [*range(300, 300 + args.prompt_len)], "max_tokens": 1}
    async with session.post(servers.url("producer") + "/v1/completions", json=body) as reply:
        await reply.read()
    until_s = time.monotonic() + 30
    while any(each.exists() for each in before) and time.monotonic() < until_s:
        await asyncio.sleep(0.1)
    return {"pages_in_store": len(before), "pages_after_ttl": sum(each.exists() for each in before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint; by default the embedded model")
    parser.add_argument("--rounds", type=int, default=3, help="prompts for each kind of fault")
    parser.add_argument("--prompt-len", type=int, default=400, help="tokens of each prompt")
    parser.add_argument("--store", help="URL of the store; by default a temporary directory")
    parser.add_argument("--ttl-s", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8360, help="first port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="option of the servers, as --option=--page-size=8"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes
    model = [*([] if args.model is None else [args.model]), *args.option]
    with tempfile.TemporaryDirectory() as directory:
        logs, store = Path(directory, "logs"), Path(directory, "store")
        store.mkdir()  # consumers create none
        logs.mkdir()
        servers = Servers(model, args.store or str(store), args.ttl_s, args.port, logs)
        try:
            found = asyncio.run(run(args, servers, None if args.store else store))
        finally:
            servers.close()
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found | {"arguments": {**vars(args), "json": str(args.json)}}, indent=2) + "\n")
    bad = [counts for counts in found["outcomes"].values() if counts.keys() - {"same"}]
    sys.exit(bool(bad or found["pages_in_use"] or found.get("pages_after_ttl")))


if __name__ == "__main__":
    main()
