"""Open-loop load on a server with OpenAI's interface, any engine's, from a client that costs little.

Replies are streamed. While the load lasts, the client only notes when parts arrive, and reads what they say at the end:
client and server may share a machine, and a client that parses each token would be measured with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxserve.bench.load import LoadTrace, RequestTrace, TimedRequest
from jaxserve.errors import ConfigError, brief, install_extra

CONNECT_S = 30.0  # time that a connection may take


@dataclass(frozen=True, slots=True)
class Server:
    """Server with OpenAI's interface.

    Attributes:
        url: its URL, with or without /v1 at the end.
        model: name of the model in requests.
        api_key: key; None where none is needed.
    """

    url: str
    model: str
    api_key: str | None = None

    @classmethod
    def at(cls, url: str, model: str | None, api_key: str | None) -> Server:
        """Return the server at a URL, with its first model unless one is named; ConfigError if it is not there."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be that of a server, such as http://localhost:8000, got {url!r}")
        base = url.rstrip("/").removesuffix("/v1")
        if model is None:
            model = _first_model(f"{base}/v1/models", api_key)
        return cls(base, model, api_key)

    def request(self, body: dict[str, Any]) -> bytes:
        """Return the bytes of an HTTP request for a completion."""
        parts, content = urlsplit(self.url), json.dumps(body | {"model": self.model}).encode()
        lines = [
            f"POST {parts.path}/v1/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


def _first_model(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=CONNECT_S) as reply:
            name = json.load(reply)["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} must list the models of a server, but: {error}; name one with --model") from error
    return str(name)


def run_remote(server: Server, requests: Sequence[TimedRequest], *, max_concurrency: int | None = None) -> LoadTrace:
    """Serve each request from its due time to its last token, with greedy sampling and end of sequence ignored.

    Args:
        server: server to ask.
        requests: requests, in token ids that its model has.
        max_concurrency: limit of unfinished requests; a further request arrives when one of them has ended.

    Returns:
        Trace with the requests that were served; others are counted, with the first reason.

    Raises:
        ConfigError: no request was served, or httptools is missing.
    """
    return asyncio.run(_run(server, requests, max_concurrency or len(requests)))


async def _run(server: Server, requests: Sequence[TimedRequest], max_concurrency: int) -> LoadTrace:
    start_s = time.monotonic()
    free_since_s: asyncio.Queue[float] = asyncio.Queue()  # time since which each free place is free
    for _ in range(max_concurrency):
        free_since_s.put_nowait(0.0)
    tasks: dict[int, asyncio.Task[_Reply]] = {}
    for index in sorted(range(len(requests)), key=lambda index: requests[index].arrival_s):
        request = requests[index]
        await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
        arrival_s = max(request.arrival_s, await free_since_s.get())
        task = asyncio.create_task(_ask(server, request, arrival_s))
        task.add_done_callback(lambda _: free_since_s.put_nowait(time.monotonic() - start_s))
        tasks[index] = task
    traces, failures = [], []
    for reply in await asyncio.gather(*(tasks[index] for index in range(len(requests)))):
        try:
            traces.append(reply.trace(start_s))
        except _FailedError as error:
            failures.append(str(error))
    if not traces:
        raise ConfigError(f"{server.url} must serve the requests, but none was; the first failed with: {failures[0]}")
    elapsed_s = max(trace.token_s[-1] for trace in traces)
    return LoadTrace(traces, elapsed_s, failures=failures)


async def _ask(server: Server, request: TimedRequest, arrival_s: float) -> _Reply:
    body = {
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts, loop = urlsplit(server.url), asyncio.get_running_loop()
    assert parts.hostname is not None, "checked by `Server.at`"
    reply = _Reply(server.request(body), request, arrival_s)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            transport, _ = await loop.create_connection(lambda: reply, parts.hostname, port, ssl=secure)
    except OSError as error:  # a timeout is one
        reply.error = f"no connection: {error!r}"
        return reply
    await reply.ended.wait()
    transport.close()
    return reply


class _FailedError(Exception):
    """Failure of a request."""


class _Reply(asyncio.Protocol):
    """Reply to a request: its parts as they arrived, and when each did.

    Args:
        sent: bytes of the request.
        request: the request.
        arrival_s: time of its arrival, after the start.
    """

    def __init__(self, sent: bytes, request: TimedRequest, arrival_s: float) -> None:
        try:
            from httptools import HttpResponseParser  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"a load on a server needs httptools: {install_extra('server')}") from error
        self._parser: Any = HttpResponseParser(self)
        self._sent, self._request, self._arrival_s = sent, request, arrival_s
        self._parts: list[tuple[float, bytes]] = []
        self._now_s = 0.0
        self.ended = asyncio.Event()
        self.error: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        """Note the time, and take the HTTP apart."""
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self.error = f"no HTTP: {error!r}"
            self.ended.set()

    def on_body(self, data: bytes) -> None:
        """Take a part of the body; called by the parser."""
        self._parts.append((self._now_s, data))

    def on_message_complete(self) -> None:
        """Note the end; called by the parser."""
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, early or not."""
        self.ended.set()

    def trace(self, start_s: float) -> RequestTrace:
        """Return the times of the tokens. Of parts with several tokens, the first's alone is known to be exact."""
        if self.error is not None:
            raise _FailedError(self.error)
        if (status := self._parser.get_status_code()) != 200:
            raise _FailedError(f"status {status}: {brief(b''.join(part for _, part in self._parts).decode())}")
        arrivals, usage = _read_events(self._parts)
        num_tokens = usage.get("completion_tokens", self._request.output_len)
        if not arrivals or not num_tokens:
            raise _FailedError("the reply has no tokens")
        times = [at_s - start_s for at_s in arrivals][:num_tokens]
        times += times[-1:] * (num_tokens - len(times))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return RequestTrace(self._arrival_s, len(self._request.prompt), cached, times)


def _read_events(parts: Sequence[tuple[float, bytes]]) -> tuple[list[float], dict[str, Any]]:
    """Return the times of the events with text, and the counts of tokens."""
    ends = list(itertools.accumulate(len(part) for _, part in parts))
    content = b"".join(part for _, part in parts)
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    index = position = 0
    for line in content.splitlines(keepends=True):
        position += len(line)
        while index < len(ends) - 1 and ends[index] < position:
            index += 1
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise _FailedError(f"an event must be JSON, got {brief(data.decode(errors='replace'))}") from None
        if not isinstance(event, dict) or "error" in event:
            raise _FailedError(f"the stream has an error: {brief(data.decode(errors='replace'))}")
        if any(choice.get("text") for choice in event.get("choices") or ()):
            arrivals.append(parts[index][0])
        usage = event.get("usage") or usage
    return arrivals, usage
