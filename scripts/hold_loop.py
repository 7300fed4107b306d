"""Measure how long a server keeps /health and a stream waiting while it serves the largest accepted requests.

    jaxserve serve --port 8399 --max-num-seqs 8 &
    python scripts/hold_loop.py http://127.0.0.1:8399

It prints a line per request type, and fails if /health has taken longer than `--limit-ms`. The requests are sent from a
separate process, so that creating them does not delay the measurement. The last column is the machine's largest delay
in waking an idle process meanwhile: no server on that machine can respond faster.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

PROBE_S = 0.01
TEXT = "hello world, this is text; "


def attacks(max_len: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and body for each request type."""
    ids = [3 + index % 200 for index in range(min(1000, max_len // 2))]
    text = TEXT * (7 * 2**20 // len(TEXT))
    chat = [{"role": "user", "content": "a"}]
    schema = {"allOf": [{"type": "string", "pattern": f"a{{1,{index + 3}}}b"} for index in range(60)]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {
        "echoes of 100 prompts": (
            "/v1/completions",
            {"prompt": [ids] * 100, "echo": True, "logprobs": 20, "max_tokens": 1},
        ),
        "the same, streamed": (
            "/v1/completions",
            {"prompt": [ids] * 20, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True},
        ),
        "1,000 prompts": ("/v1/completions", {"prompt": ["a"] * 1000, "max_tokens": 1}),
        "/tokenize of 2 MB": ("/tokenize", {"prompt": text[: 2**21]}),
        "/tokenize of 7 MB": ("/tokenize", {"prompt": text}),
        "/detokenize of 700,000 ids": ("/detokenize", {"tokens": ids * (700_000 // len(ids))}),
        "prompt of 7 MB": ("/v1/completions", {"prompt": text}),
        "message of 7 MB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "bad words of 2 MB": (
            "/v1/completions",
            {"prompt": "a", "bad_words": [f"{i}{text[:32_000]}" for i in range(64)]},
        ),
        "quoted field of 7 MB": ("/v1/completions", {"prompt": "a", text: 1}),
        "200,000 fields": ("/v1/completions", {"prompt": "a"} | {f"field {index}": index for index in range(200_000)}),
        "endless grammar": ("/v1/chat/completions", {"messages": chat, "response_format": form, "max_tokens": 4}),
    }


def send(url: str, key: str, path: str, body: dict[str, Any], results: Any) -> None:
    """Send one request, and put its status and reply size into a queue."""
    content = json.dumps(body).encode()
    connection = _connect(url, 300)
    connection.request("POST", path, content, _headers(key))
    reply = connection.getresponse()
    results.put((reply.status, len(reply.read())))


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


def _headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def oversleep(longest_s: Any) -> None:
    """Keep the largest delay of short sleeps in a shared value."""
    while True:
        due_s = time.perf_counter() + PROBE_S
        time.sleep(PROBE_S)
        longest_s.value = max(longest_s.value, time.perf_counter() - due_s)


class Stream:
    """Stream in the background, and the longest time between two of its events."""

    def __init__(self, url: str, key: str) -> None:
        self.longest_s, self.is_over = 0.0, False
        self._url, self._key = url, key
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not self.is_over:
            connection = _connect(self._url, 60)
            connection.request("POST", "/v1/completions", json.dumps(body), _headers(self._key))
            reply, before_s = connection.getresponse(), None
            while reply.readline() and not self.is_over:
                now_s = time.perf_counter()
                if before_s is not None:
                    self.longest_s = max(self.longest_s, now_s - before_s)
                before_s = now_s
            connection.close()

    def end(self) -> None:
        """Stop streaming."""
        self.is_over = True
        self._thread.join()


def measure(url: str, key: str, path: str, body: dict[str, Any] | None) -> tuple[int, int, float, float, float]:
    """Return status, bytes and seconds for one request, and the longest times of /health and between two events."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=send, args=(url, key, path, body, results)) if body is not None else None
    stream, health, longest_s = Stream(url, key), _connect(url, 60), 0.0
    began_s = time.perf_counter()
    if process is not None:
        process.start()
    status = num_bytes = 0
    while time.perf_counter() < began_s + 2 if process is None else process.is_alive() or results.empty():
        asked_s = time.perf_counter()
        health.request("GET", "/health")
        health.getresponse().read()
        longest_s = max(longest_s, time.perf_counter() - asked_s)
        time.sleep(PROBE_S)
        if not results.empty():
            break
    elapsed_s = time.perf_counter() - began_s
    if process is not None:
        status, num_bytes = results.get()
        process.join()
    stream.end()
    return status, num_bytes, elapsed_s, longest_s, stream.longest_s


def main() -> None:
    """Measure all request types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key", default="", help="API key of the server")
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--only", default="", help="part of the names of the kinds to run")
    args = parser.parse_args()
    connection = _connect(args.url, 60)
    connection.request("GET", "/v1/models", headers=_headers(args.key))
    max_len = json.loads(connection.getresponse().read())["data"][0]["max_model_len"]
    print(f"{'request':28} {'status':>6} {'MB':>8} {'s':>7} {'/health ms':>11} {'event ms':>9} {'machine ms':>11}")
    worst_ms = 0.0
    late_s = multiprocessing.get_context("spawn").Value("d", 0.0)
    multiprocessing.get_context("spawn").Process(target=oversleep, args=(late_s,), daemon=True).start()
    kinds: dict[str, tuple[str, dict[str, Any] | None]] = {"none": ("", None)}
    for name, (path, body) in (kinds | attacks(max_len)).items():
        if args.only in name:
            late_s.value = 0.0
            status, num_bytes, elapsed_s, health_s, event_s = measure(args.url, args.key, path, body)
            times = f"{health_s * 1e3:11.0f} {event_s * 1e3:9.0f} {late_s.value * 1e3:11.0f}"
            sizes = f"{num_bytes / 1e6:8.2f} {elapsed_s:7.1f} {times}"
            print(f"{name:28} {status or '':>6} {sizes}", flush=True)
            worst_ms = max(worst_ms, health_s * 1e3)
    if worst_ms > args.limit_ms:
        sys.exit(f"/health must answer within {args.limit_ms:g} ms, took {worst_ms:.0f} ms")


if __name__ == "__main__":
    main()
