"""Requests over HTTP, whole and streamed, compared with the same requests in one call of `generate`.

    python scripts/bench_server.py --concurrency 64 --rounds 5

The three ways take turns, after one warm-up round each; every round has different prompts. The client is a separate
process that opens a connection per request before a round and only counts bytes, so that it costs little. Prints one
JSON line: output tokens per second by way, each round's ratio to `generate`, engine steps, and the server's processor
time per streamed token: the process's time beyond that of `generate` for the same number of tokens, and the event loop
thread's time, which other load disturbs less.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.engine import Engine
from jaxserve.offline.llm import LLM
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import new_server
from jaxserve.server.sockets import listen

WAYS = ("generate", "whole", "streamed")


def prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts without common pages."""
    ids: list[list[int]] = np.random.default_rng(seed).integers(3, vocab_size, (count, length)).tolist()
    return ids


async def fetch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """Send a request over an open connection and count the reply's bytes, up to its end."""
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    if (length := re.search(rb"content-length: (\d+)", head)) is not None:
        return len(await reader.readexactly(int(length[1])))
    num_bytes, end = 0, b""
    while end != b"0\r\n\r\n":  # the last chunk
        data = await reader.read(2**16)
        assert data, "the server has closed the connection"
        num_bytes += len(data)
        end = (end + data[-5:])[-5:]
    return num_bytes


def client(pipe: Connection) -> None:
    """Run rounds of requests received through the pipe, each over a connection opened before its round."""

    async def run(port: int, bodies: list[bytes]) -> None:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
        pipe.send("ready")
        pipe.recv()
        await asyncio.gather(*(fetch(*each, body) for each, body in zip(connections, bodies, strict=True)))
        pipe.send("done")
        for _, writer in connections:
            writer.close()

    while (job := pipe.recv()) is not None:
        asyncio.run(run(*job))


def cpu_s() -> float:
    """Return this process's processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Meter:
    """Costs of rounds, by way.

    Attributes:
        rounds: seconds, processor seconds of the process and of the loop's thread, and engine steps.
    """

    def __init__(self, loop_thread: threading.Thread) -> None:
        assert loop_thread.ident is not None, "the loop runs"
        self._loop_clock = time.pthread_getcpuclockid(loop_thread.ident)
        self.rounds: dict[str, list[NDArray[np.float64]]] = {way: [] for way in WAYS}

    def read(self, engine: Engine) -> NDArray[np.float64]:
        """Return the current counters."""
        steps = engine.stats.num_steps
        return np.array([time.perf_counter(), cpu_s(), time.clock_gettime(self._loop_clock), steps])

    def median(self, way: str) -> list[float]:
        """Return a way's median costs."""
        values: list[float] = np.median(self.rounds[way], axis=0).tolist()
        return values


def run_rounds(args: argparse.Namespace, llm: LLM, engine: Engine, meter: Meter, port: int, pipe: Connection) -> None:
    """Run all rounds; the first does not count."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": args.output_tokens, "ignore_eos": True}
    for index in range(args.rounds + 1):
        for number, way in enumerate(WAYS):
            ids = prompts(engine.arch.vocab_size, args.concurrency, args.prompt_tokens, len(WAYS) * index + number)
            used = llm.engine if way == "generate" else engine
            before = meter.read(used)
            if way == "generate":
                llm.generate(ids, SamplingParams(**sampling), use_tqdm=False)
            else:
                body = sampling | {"stream": way == "streamed"}
                pipe.send((port, [json.dumps(body | {"prompt": each}).encode() for each in ids]))
                pipe.recv()  # the connections are open
                before = meter.read(used)
                pipe.send("go")
                pipe.recv()
            if index:
                meter.rounds[way].append(meter.read(used) - before)


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
    started = threading.Event()
    with listen(config) as sock:
        app = App(engine, config)
        server = new_server(app, config, sock, lambda url: started.set())
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        started.wait()
        meter = Meter(thread)
        run_rounds(args, llm, engine, meter, sock.getsockname()[1], ours)
        num_wakes = app.service.streams.num_wakes
        server.handle_exit(15, None)
        thread.join()
    ours.send(None)
    num_tokens = args.concurrency * args.output_tokens
    seconds, _, loop, steps = ({way: meter.median(way)[column] for way in WAYS} for column in range(4))
    settings = {"concurrency": args.concurrency, "output_tokens": args.output_tokens, "rounds": args.rounds}
    result: dict[str, Any] = {f"{way}_tok_s": round(num_tokens / seconds[way], 1) for way in WAYS}
    for way in ("whole", "streamed"):
        pairs = zip(meter.rounds["generate"], meter.rounds[way], strict=True)
        result[f"{way}_ratio"] = round(statistics.median(a[0] / b[0] for a, b in pairs), 3)
        result[f"loop_us_per_{way}_token"] = round(loop[way] / num_tokens * 1e6, 1)
    pairs = zip(meter.rounds["generate"], meter.rounds["streamed"], strict=True)
    extra = statistics.median(b[1] - a[1] for a, b in pairs)
    result |= {"cpu_us_per_streamed_token": round(extra / num_tokens * 1e6, 1), "steps": steps, "wakes": num_wakes}
    print(json.dumps({"bench": "server", **settings, **result}))


if __name__ == "__main__":
    main()
