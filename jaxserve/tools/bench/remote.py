"""Open-loop load on a server with OpenAI's interface, any engine's, from a client that costs little.

Replies are streamed. During the load the client only notes when parts arrive, and parses them at the end: client and
server may share a machine, and the time to parse each token would count as the server's. For the same reason the
client is aiohttp: a part costs 22 us of CPU time, with httpx 88 us.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError, brief, install_extra
from jaxserve.tools.bench.load import LoadTrace, RequestTrace, TimedRequest

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECT_S = 30.0  # timeout of a connection


@dataclass(frozen=True, slots=True)
class Server:
    """Server with OpenAI's interface.

    Attributes:
        url: its URL, without /v1 at the end.
        model: name of the model in requests.
        api_key: key; None if the server needs none.
    """

    url: str
    model: str
    api_key: str | None = None

    @classmethod
    def at(cls, url: str, model: str | None, api_key: str | None) -> Server:
        """Return the server at a URL, by default with its first model; ConfigError if it does not answer."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be a server's address, such as http://localhost:8000, got {url!r}")
        base = url.rstrip("/").removesuffix("/v1")
        if model is None:
            model = _first_model(f"{base}/v1/models", _headers(api_key))
        return cls(base, model, api_key)


def _headers(api_key: str | None) -> dict[str, str]:
    """Return the HTTP headers for a key; none without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _first_model(url: str, headers: dict[str, str]) -> str:
    """Return the first model name that a server lists at a URL; ConfigError if it lists none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=CONNECT_S) as reply:
            name = json.load(reply)["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} must list the models of a server, but: {error}; name one with --model") from error
    return str(name)


def run_remote(server: Server, requests: Sequence[TimedRequest], *, max_concurrency: int | None = None) -> LoadTrace:
    """Serve each request from its due time to its last token; sampling is greedy, end-of-sequence tokens are ignored.

    Args:
        server: the server.
        requests: requests with token ids that its model has.
        max_concurrency: maximum number of unfinished requests; the next one then arrives when one of them ends.

    Returns:
        Trace with the served requests and the reason for each failure.

    Raises:
        ConfigError: no request was served, or aiohttp is missing.
    """
    return asyncio.run(_run(server, requests, max_concurrency or len(requests)))


async def _run(server: Server, requests: Sequence[TimedRequest], max_concurrency: int) -> LoadTrace:
    """Send each request when it is due, and return the trace; see `run_remote`."""
    try:
        import aiohttp  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(f"a load on a server needs aiohttp: {install_extra('bench')}") from error
    start_s = time.monotonic()
    free_since_s: asyncio.Queue[float] = asyncio.Queue()  # start of idleness of each free client
    for _ in range(max_concurrency):
        free_since_s.put_nowait(0.0)
    tasks: dict[int, asyncio.Task[_Reply]] = {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers=_headers(server.api_key),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
    ) as session:

        async def serve(index: int) -> _Reply:
            """Send a request when it is due, which a later turn of a session is after its pause."""
            request = requests[index]
            due_s = request.arrival_s
            if request.after is not None:
                await tasks[request.after]
                due_s += time.monotonic() - start_s
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            arrival_s = max(due_s, await free_since_s.get())
            try:
                return await _ask(session, server, request, arrival_s)
            finally:
                free_since_s.put_nowait(time.monotonic() - start_s)

        for index in sorted(range(len(requests)), key=lambda index: requests[index].arrival_s):
            tasks[index] = asyncio.create_task(serve(index))
        replies = await asyncio.gather(*(tasks[index] for index in range(len(requests))))
    traces, failures = [], []
    for reply in replies:
        try:
            traces.append(reply.trace(start_s))
        except _FailedError as error:
            failures.append(str(error))
    if not traces:
        raise ConfigError(f"{server.url} must serve the requests, but none was; the first failed with: {failures[0]}")
    elapsed_s = max(trace.token_s[-1] for trace in traces)
    return LoadTrace(traces, elapsed_s, failures=failures)


async def _ask(session: ClientSession, server: Server, request: TimedRequest, arrival_s: float) -> _Reply:
    """Send a request, which arrived `arrival_s` seconds after the start, and return its reply unparsed."""
    body = {
        "model": server.model,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"session_id": request.session} if request.session else {}),
    }
    reply = _Reply(request, arrival_s)
    try:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            reply.status = response.status
            async for data in response.content.iter_any():
                reply.parts.append((time.monotonic(), data))
    except Exception as error:  # aiohttp's and the socket's errors
        reply.error = f"{'connection lost' if reply.status else 'no connection'}: {error!r}"
    return reply


class _FailedError(Exception):
    """A request that failed."""


@dataclass(slots=True)
class _Reply:
    """Reply to a request, or the reason why there is none.

    Attributes:
        request: the request.
        arrival_s: time of its arrival, after the start.
        parts: arrival time and content of each body part.
        status: HTTP status; 0 before it is known.
        error: reason why the connection failed; None if it did not.
    """

    request: TimedRequest
    arrival_s: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    error: str | None = None

    def trace(self, start_s: float) -> RequestTrace:
        """Return the times of the tokens. In a part with several tokens, only the first one's time is exact."""
        if self.error is not None:
            raise _FailedError(self.error)
        if self.status != 200:
            raise _FailedError(f"status {self.status}: {brief(b''.join(part for _, part in self.parts).decode())}")
        arrivals, usage = _read_events(self.parts)
        num_tokens = usage.get("completion_tokens", self.request.output_len)
        if not arrivals or not num_tokens:
            raise _FailedError("the reply has no tokens")
        times = [at_s - start_s for at_s in arrivals][:num_tokens]
        times += times[-1:] * (num_tokens - len(times))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return RequestTrace(self.arrival_s, self.request.num_tokens, cached, times)


def _read_events(parts: Sequence[tuple[float, bytes]]) -> tuple[list[float], dict[str, Any]]:
    """Parse a stream of server-sent events, given the arrival time and content of each part.

    Returns:
        Arrival time of each event with text, and the token counts that the last event has.
    """
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
