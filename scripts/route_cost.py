"""Measure the processor time that a router takes per request and per part of a stream.

    python scripts/route_cost.py --json out.json

A server without an engine answers immediately, with streams of few and of many parts, each with the comment that lets
a stream move. The router's processor time over the requests gives both costs; the clients and the server are processes
of their own. `added_ms` is the median time that a request alone takes longer through the router than without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

FEW, MANY = 2, 402  # parts of a stream
PART = b'data: {"choices": [{"index": 0, "text": " token"}]}\n\n:jaxserve [0,0,[[0,[17],6,0]]]\n\n'


async def _stream(request: web.Request) -> web.StreamResponse:
    """Answer with as many parts as the body asks for."""
    num_parts = (await request.json())["max_tokens"]
    headers = {"content-type": "text/event-stream", "x-jaxserve-resumable": "1"}
    reply = web.StreamResponse(headers=headers)
    await reply.prepare(request)
    for _ in range(num_parts):
        await reply.write(PART)
        await asyncio.sleep(0)  # so that each part is sent and read by itself
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def _ok(_: web.Request) -> web.Response:
    return web.json_response({})


def serve(port: int) -> None:
    """Run the server without an engine."""
    app = web.Application()
    app.router.add_post("/v1/completions", _stream)
    app.router.add_get("/ready", _ok)
    app.router.add_get("/load", _ok)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


@contextmanager
def processes(port: int) -> Iterator[int]:
    """Run the server and the router at two ports; yield the router's process id."""
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port + 1,))
    server.start()
    command = [sys.executable, "-m", "jaxserve", "route", f"http://127.0.0.1:{port + 1}", "--port", str(port)]
    router = subprocess.Popen(command)
    try:
        yield router.pid
    finally:
        router.terminate()
        server.terminate()
        router.wait(30)
        server.join(30)


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(session: aiohttp.ClientSession, url: str, num_parts: int) -> float:
    """Return the time that a request takes."""
    began_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json={"prompt": "a" * 2000, "max_tokens": num_parts}) as reply:
        data = await reply.read()
    assert data.endswith(b"[DONE]\n\n"), data
    return time.perf_counter() - began_s


async def measure(args: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Return the router's costs."""
    routed, direct = f"http://127.0.0.1:{args.port}", f"http://127.0.0.1:{args.port + 1}"
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            async with asyncio.timeout(30):
                try:
                    await ask(session, routed, FEW)
                    break
                except (aiohttp.ClientError, AssertionError):
                    await asyncio.sleep(0.1)
        costs: dict[int, list[float]] = {FEW: [], MANY: []}
        for _ in range(args.rounds):
            for num_parts, found in costs.items():
                before_s, count = processor_s(pid), args.requests if num_parts == FEW else args.requests // 10
                for _ in range(count):
                    await ask(session, routed, num_parts)
                found.append((processor_s(pid) - before_s) / count)
        times: dict[str, list[float]] = {routed: [], direct: []}
        for _ in range(args.requests):
            for url, each in times.items():
                each.append(await ask(session, url, FEW))
    few, many = (statistics.median(costs[num_parts]) for num_parts in (FEW, MANY))
    part_s = (many - few) / (MANY - FEW)
    return {
        "request_ms": (few - FEW * part_s) * 1e3,
        "part_us": part_s * 1e6,
        "added_ms": (statistics.median(times[routed]) - statistics.median(times[direct])) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8370, help="first port")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with processes(args.port) as pid:
        found = asyncio.run(measure(args, pid))
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
