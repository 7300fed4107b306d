"""Requests over HTTP, whole and streamed, against the same requests in one call of `generate`.

    python scripts/bench_server.py --concurrency 64 --rounds 5

The three ways take turns, after one round of each that does not count; every round has prompts of its own. The client
is a process of its own that only counts bytes, so that it costs little. Prints one JSON line: output tokens per second
of each way, the ratio to `generate` of each round, and the processor time of the server for each streamed token: what
the server's process takes beyond what `generate` takes for as many tokens.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import listen, new_server

WAYS = ("generate", "whole", "streamed")


def prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts, no two of which share a page."""
    ids: list[list[int]] = np.random.default_rng(seed).integers(3, vocab_size, (count, length)).tolist()
    return ids


async def fetch(port: int, body: bytes) -> int:
    """Send a request and count the bytes of the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    num_bytes = 0
    first = b""
    while data := await reader.read(2**16):
        first = first or data
        num_bytes += len(data)
    writer.close()
    assert first.startswith(b"HTTP/1.1 200"), first[:400]
    return num_bytes


def client(pipe: Connection) -> None:
    """Run rounds of requests as they come through the pipe."""

    async def run(port: int, bodies: list[bytes]) -> None:
        await asyncio.gather(*(fetch(port, body) for body in bodies))

    while (job := pipe.recv()) is not None:
        started = time.perf_counter()
        asyncio.run(run(*job))
        pipe.send(time.perf_counter() - started)


def cpu_s() -> float:
    """Return the processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=client, args=(theirs,), daemon=True)
    process.start()
    llm = LLM(args.model, compile_ahead="all")
    engine = Engine(EngineConfig(args.model, compile_ahead="all"))
    engine.wait_until_warm()
    config = ServerConfig(port=0)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": args.output_tokens, "ignore_eos": True}
    started = threading.Event()
    with listen(config) as sock:
        app = App(engine, config)
        server = new_server(app, config, sock, lambda url: started.set())
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        started.wait()
        port = sock.getsockname()[1]
        for index in range(args.rounds + 1):
            for number, way in enumerate(WAYS):
                ids = prompts(engine.arch.vocab_size, args.concurrency, args.prompt_tokens, len(WAYS) * index + number)
                before_s, cpu_before_s = time.perf_counter(), cpu_s()
                if way == "generate":
                    llm.generate(ids, SamplingParams(**sampling), use_tqdm=False)
                    took_s = time.perf_counter() - before_s
                else:
                    body = sampling | {"stream": way == "streamed"}
                    ours.send((port, [json.dumps(body | {"prompt": each}).encode() for each in ids]))
                    took_s = ours.recv()
                if index:
                    seconds[way].append(took_s)
                    cpu[way].append(cpu_s() - cpu_before_s)
        num_wakes = app.service.streams.num_wakes
        server.handle_exit(15, None)
        thread.join()
    ours.send(None)
    num_tokens = args.concurrency * args.output_tokens
    rates = {f"{way}_tok_s": round(num_tokens / statistics.median(times), 1) for way, times in seconds.items()}
    ratios = {
        f"{way}_ratio": round(statistics.median(a / b for a, b in zip(seconds["generate"], times, strict=True)), 3)
        for way, times in seconds.items()
        if way != "generate"
    }
    extra = [(b - a) / num_tokens * 1e6 for a, b in zip(cpu["generate"], cpu["streamed"], strict=True)]
    facts = {"concurrency": args.concurrency, "output_tokens": args.output_tokens, "rounds": args.rounds}
    result = facts | rates | ratios | {"cpu_us_per_streamed_token": round(statistics.median(extra), 1)}
    print(json.dumps({"bench": "server", **result, "wakes": num_wakes}))


if __name__ == "__main__":
    main()
