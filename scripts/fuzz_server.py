"""Malformed, huge, slow and aborted requests against a server, while a healthy stream runs.

    python scripts/fuzz_server.py --requests 10000
    python scripts/fuzz_server.py --requests 2000 --schemathesis /tmp/schemathesis/bin/schemathesis

The server runs here, with the embedded model, the attackers in a separate process that writes bytes to sockets. Half of
the bodies are valid ones with some values replaced; the rest are no JSON, too long, too deep, sent in pieces, or
incomplete; replies are read to their end, in part or not at all. Meanwhile a client repeats the same greedy stream,
whose tokens must equal the engine's when it was idle.

With `--schemathesis` that command then sends requests derived from OpenAI's and Anthropic's types, as an OpenAPI
document, for `--examples` cases per path.

Prints one JSON line, and ends with status 1 if a reply had a status of 500 or above, a healthy stream differed, a
request or page was left over, or memory grew by more than `--max-growth-mib` in the second half of the requests.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import new_server
from jaxserve.server.sockets import listen

PARTS = 10
HEALTHY: dict[str, Any] = {
    "prompt": "class Queue:\n    def ",
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a b", "max_tokens": 3, "logprobs": 2, "n": 2, "seed": 1}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "stop": ["x"]}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{3}"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 3}, "bad_words": ["q"], "top_k": 3}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "top_logprobs": 2, "logprobs": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 4, "stream": True}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/messages", CHAT | {"system": "s", "stop_sequences": ["x"], "stream": True}),
    ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("/v1/embeddings", {"input": "a", "model": "m"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]
STRANGE: list[Any] = [
    *(None, True, 0, -1, 1e308, 2**70, "", "x" * 5000, "\x00\ud800", [], [[]], {}, {"a": {}}, ["a"] * 300),
    *([2**31], [-1], [1.5], {"type": "x"}, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
    *({"$ref": "#"}, {"not": {}}, "(" * 50, "(a{1,999}){1,999}", [None], {"": None}, "東😀", [True], float(2**53)),
]
FIELDS = (
    *("n", "stop", "temperature", "top_p", "top_k", "logprobs", "max_tokens", "seed", "stream", "tools", "tool_choice"),
    *("response_format", "structured_outputs", "cache_salt", "priority", "metadata", "echo", "best_of", "user"),
    *("min_tokens", "prompt_logprobs", "stream_options", "allowed_token_ids", "truncate_prompt_tokens", "reasoning"),
    *("thinking", "guided_json", "chat_template", "input", "instructions", "text", "model", "timeout"),
)


def mutated(rng: random.Random, value: Any) -> Any:
    """Return a value with some parts replaced by strange ones."""
    if rng.random() < 0.15:
        return rng.choice(STRANGE)
    if isinstance(value, dict):
        found = {name: mutated(rng, each) for name, each in value.items() if rng.random() > 0.05}
        if rng.random() < 0.3:
            found[rng.choice(FIELDS)] = rng.choice(STRANGE)
        return found
    if isinstance(value, list):
        return [mutated(rng, each) for each in value * rng.choice([1, 1, 1, 2])]
    return value


def body(rng: random.Random, valid: dict[str, Any]) -> bytes:
    """Return a body: mutated, malformed, huge or valid."""
    kind = rng.random()
    if kind < 0.5:
        return json.dumps(mutated(rng, valid)).encode()
    data = json.dumps(valid).encode()
    if kind < 0.6:  # changed bytes
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind < 0.7:
        return data[: rng.randrange(len(data))]
    if kind < 0.73:
        return b"[" * 100_000
    if kind < 0.76:
        return json.dumps(valid | {"prompt": "a " * rng.randrange(10**6)}).encode()
    if kind < 0.79:
        return json.dumps(valid | {"prompt": [5] * rng.randrange(10**6)}).encode()
    if kind < 0.8:
        return rng.randbytes(rng.randrange(10**5))
    return data


async def attack(port: int, rng: random.Random) -> tuple[int, bytes]:
    """Send one request; return the status and the beginning of the reply, 0 if the reply was not awaited."""
    path, valid = rng.choice(VALID)
    data = body(rng, valid)
    length = str(len(data)) if rng.random() < 0.95 else rng.choice(["-1", "x", str(2**70), "0", str(len(data) + 50)])
    method = "POST" if rng.random() < 0.95 else rng.choice(["GET", "PUT", "DELETE", "x", ""])
    if rng.random() < 0.03:
        path = rng.choice(["/", "/metrics", "/v1/models/%2f", "/" + "a" * 5000, "//", "/v1/../health", "*", "\xff"])
    head = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {length}"]
    if rng.random() < 0.05:
        head += [f"x-{index}: {'y' * rng.randrange(300)}" for index in range(rng.randrange(400))]
    if rng.random() < 0.05:
        head.append(rng.choice(["Transfer-Encoding: chunked", "x-litellm-timeout: nan", "Expect: 100-continue", "bad"]))
    message = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + data
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        manner = rng.random()
        if manner < 0.05:  # slow
            for _ in range(5):
                cut = rng.randrange(len(message))
                writer.write(message[:cut])
                message = message[cut:]
                await asyncio.sleep(rng.random() * 0.1)
        if manner < 0.12:  # incomplete
            writer.write(message[: rng.randrange(len(message))])
            await asyncio.sleep(rng.random() * 0.05)
            return 0, b""
        writer.write(message)
        if manner < 0.25:  # read in part
            await asyncio.wait_for(reader.read(rng.choice([1, 50, 400])), 20)
            return 0, b""
        reply = b""
        while part := await asyncio.wait_for(reader.read(2**16), 30):
            reply = (reply + part)[:3000]
        return int(reply.split()[1]) if reply.startswith(b"HTTP/1.1 ") else 0, reply
    except (ConnectionError, OSError):
        return 0, b""
    except TimeoutError:  # the body is shorter than its declared length: the server waits for the rest
        return -1, b""
    finally:
        writer.transport.abort()


def attackers(pipe: Connection) -> None:
    """Run attacks received through the pipe; their own errors return through it."""
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(asyncio.run(attacks(*job)))
        except Exception as error:
            pipe.send(error)


async def attacks(port: int, count: int, concurrency: int, seed: str) -> tuple[Counter[int], list[str]]:
    """Send requests, `concurrency` at a time; return status counts, and replies that are failures."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []

    async def attacker(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in range(count // concurrency):
            status, reply = await attack(port, rng)
            statuses[status] += 1
            if status >= 500 or b'"server_error"' in reply:
                failures.append(reply.decode("utf-8", "replace"))

    await asyncio.gather(*(attacker(number) for number in range(concurrency)))
    return statuses, failures[:20]


class Healthy:
    """Client that repeats the same stream."""

    def __init__(self, url: str) -> None:
        self.num_streams = self.num_wrong = 0
        self._url, self._is_over = f"{url}/v1/completions", threading.Event()
        self.expected = self.ask()
        self._thread = threading.Thread(target=self._run)

    def ask(self) -> list[int]:
        """Return the tokens of one stream."""
        tokens: list[int] = []
        with httpx.stream("POST", self._url, json=HEALTHY, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
        return tokens

    def __enter__(self) -> "Healthy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.num_wrong += self.ask() != self.expected
            except (httpx.HTTPError, ValueError):
                self.num_wrong += 1
            self.num_streams += 1


def document() -> dict[str, Any]:
    """Return an OpenAPI document from the clients' body types."""
    import anthropic.types  # noqa: PLC0415 - of the extra test
    import openai.types.chat.completion_create_params as chats  # noqa: PLC0415
    import openai.types.completion_create_params as completions  # noqa: PLC0415
    import openai.types.responses.response_create_params as responses  # noqa: PLC0415
    import pydantic  # noqa: PLC0415

    types: dict[str, Any] = {
        "/v1/completions": completions.CompletionCreateParamsNonStreaming,
        "/v1/chat/completions": chats.CompletionCreateParamsNonStreaming,
        "/v1/responses": responses.ResponseCreateParamsNonStreaming,
        "/v1/messages": anthropic.types.MessageCreateParams,
    }
    paths: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for path, kind in types.items():
        schema = pydantic.TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        components |= schema.pop("$defs", {})
        content = {"application/json": {"schema": schema}}
        replies = {"default": {"description": "reply"}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": replies}}
    paths["/v1/models"] = {"get": {"responses": {"200": {"description": "names"}}}}
    parts = {"openapi": "3.1.0", "info": {"title": "server", "version": "1"}}
    return parts | {"paths": paths, "components": {"schemas": components}}


def schemathesis(command: str, url: str, examples: int, seed: int) -> dict[str, Any]:
    """Run schemathesis on the server; return its exit status and the end of its output."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "openapi.json"
        path.write_text(json.dumps(document()))
        options = ["--url", url, "--checks", "not_a_server_error", "--max-examples", str(examples)]
        options += ["--seed", str(seed), "--request-timeout", "60", "--phases", "fuzzing", "--no-color"]
        done = subprocess.run(
            [command, "run", str(path), *options], capture_output=True, text=True, cwd=directory, check=False
        )
    print(done.stdout[-3000:], done.stderr[-1000:], file=sys.stderr)
    return {"status": done.returncode, "said": [line for line in done.stdout.splitlines() if line.strip()][-8:]}


def drained(engine: Engine) -> bool:
    """Wait until no request is left; return whether that succeeded."""
    for _ in range(600):
        if not engine.core.has_work() and not engine.frontend.has_unfinished():
            return True
        time.sleep(0.1)
    return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemathesis", help="command of schemathesis, to run it too")
    parser.add_argument("--examples", type=int, default=100, help="cases of schemathesis for each path")
    parser.add_argument("--max-growth-mib", type=float, default=300)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=attackers, args=(theirs,), daemon=True)
    process.start()
    engine = Engine(EngineConfig(args.model, max_num_seqs=16, max_model_len=512, compile_ahead="minimal"))
    engine.wait_until_warm()
    config = ServerConfig(port=0, body_timeout_s=5, degradation=["none"])
    urls: list[str] = []
    started = threading.Event()

    def on_start(url: str) -> None:
        urls.append(url)
        started.set()

    result: dict[str, Any] = {"bench": "fuzz", "requests": args.requests, "seed": args.seed}
    began_s = time.monotonic()
    with listen(config) as sock:
        app = App(engine, config)
        server = new_server(app, config, sock, on_start)
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        started.wait()
        with Healthy(urls[0]) as healthy:
            statuses: Counter[int] = Counter()
            failures: list[str] = []
            rss_mib = []
            for part in range(PARTS):
                job = (sock.getsockname()[1], args.requests // PARTS, args.concurrency, f"{args.seed} {part}")
                ours.send(job)
                found = ours.recv()
                if isinstance(found, Exception):
                    raise found
                statuses += found[0]
                failures += found[1]
                rss_mib.append(round(psutil.Process().memory_info().rss / 2**20))
                print(f"part {part + 1} of {PARTS}: {rss_mib[-1]} MiB, {healthy.num_streams} streams", file=sys.stderr)
            growth = rss_mib[-1] - rss_mib[PARTS // 2 - 1]  # everything loaded once is loaded in the first half
            if args.schemathesis:
                result["schemathesis"] = schemathesis(args.schemathesis, urls[0], args.examples, args.seed)
        is_drained = drained(engine)
        result["open_requests"] = len(app.service.streams)
        server.handle_exit(15, None)
        thread.join()
    engine.check_integrity()
    ours.send(None)
    result |= {
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "failures": failures,
        "healthy_streams": healthy.num_streams,
        "wrong_streams": healthy.num_wrong,
        "is_drained": is_drained,
        "rss_mib": rss_mib,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(result))
    is_well = not result["failures"] and not healthy.num_wrong and is_drained and growth < args.max_growth_mib
    is_well = is_well and not result["open_requests"] and result.get("schemathesis", {"status": 0})["status"] == 0
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
