"""Tests of loads on servers: a scripted one on a socket, whose replies and times are known."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.load import TimedRequest
from jaxserve.tools.bench.remote import Server, run_remote

GAP_S = 0.02
MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}


class ScriptedServer:
    """HTTP server that answers a prompt as its first token id says.

    Attributes:
        bodies: bodies of the completions that were asked for.
        most_open: most connections at a time.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most_open = self._num_open = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))  # connections end
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        if head.startswith("GET /v1/models "):
            await self._reply(writer, "200 OK", json.dumps(MODELS).encode())
        else:
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            await self._complete(writer, body)
        writer.close()
        self._num_open -= 1

    async def _reply(self, writer: asyncio.StreamWriter, status: str, content: bytes) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        kind, count = body["prompt"][0], body["max_tokens"]
        if kind == 99:
            await self._reply(writer, "429 Too Many Requests", b'{"error": {"message": "slow down"}}')
            return
        events = [{"choices": [{"index": 0, "text": f"w{index} "}]} for index in range(count)]
        if kind == 50:  # two tokens to an event, of which the server tells the sum
            events = events[::2]
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        events.append({"choices": [], "usage": usage})
        if kind == 77:
            events[1:] = [{"error": {"message": "broken"}}]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            data = f": comment\n\ndata: {json.dumps(event)}\n\n".encode()
            for part in (data[:7], data[7:]):  # cut where no event ends
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(GAP_S)
        if kind != 66:  # the connection goes before the end
            done = b"data: [DONE]\n\n"
            writer.write(f"{len(done):x}\r\n".encode() + done + b"\r\n0\r\n\r\n")


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def test_requests_arrive_when_due_and_tokens_when_they_come(scripted: ScriptedServer) -> None:
    server = Server.at(scripted.url + "/v1/", None, "key")
    assert server.model == "first"
    trace = run_remote(server, [TimedRequest([11, 12], 6, 0.2), TimedRequest([50, 13], 4, 0.0)])
    late, early = trace.requests
    assert (late.num_prompt_tokens, len(late.token_s), late.num_cached_tokens) == (2, 6, 2)
    assert (late.arrival_s, early.arrival_s) == (0.2, 0.0)
    assert late.token_s[0] >= 0.2
    assert len(late.itls_s) == 5, "each event is an arrival of its own"
    assert late.token_s[-1] - late.token_s[0] >= 4 * GAP_S
    assert (len(early.token_s), len(early.itls_s)) == (4, 1), "two events of two tokens"
    assert trace.elapsed_s == max(late.token_s[-1], early.token_s[-1])
    assert all("Authorization: Bearer key" in head for head in scripted.headers)
    assert scripted.bodies[0]["ignore_eos"] is True
    assert scripted.bodies[0]["temperature"] == 0


def test_requests_that_fail_are_counted_and_the_others_kept(scripted: ScriptedServer) -> None:
    requests = [TimedRequest([first], 2) for first in (11, 99, 77, 12)]
    trace = run_remote(Server(scripted.url, "m"), requests)
    assert [len(each.token_s) for each in trace.requests] == [2, 2]
    refused, broken = trace.failures
    assert refused.startswith("status 429: ")
    assert "slow down" in refused
    assert "broken" in broken


def test_a_limit_on_concurrency_holds_requests_back(scripted: ScriptedServer) -> None:
    trace = run_remote(Server(scripted.url, "m"), [TimedRequest([11], 3)] * 4, max_concurrency=1)
    assert scripted.most_open == 1
    starts = [each.arrival_s for each in trace.requests]
    assert starts[0] == 0.0
    assert all(later > earlier + 2 * GAP_S for earlier, later in itertools.pairwise(starts))


def test_a_run_without_a_served_request_reports_the_reason(scripted: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match="must serve the requests, but none was; the first failed with: status 429"):
        run_remote(Server(scripted.url, "m"), [TimedRequest([99], 1)])
    with pytest.raises(ConfigError, match="the first failed with: no connection"):
        run_remote(Server("http://127.0.0.1:9", "m"), [TimedRequest([11], 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:1"], "url must be a server's address, such as http://localhost:8000, got 'localhost:1'"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models must list the models of a server, but: "),
        (["--url", "http://127.0.0.1:9", "--page-size", "8"], "a server has its own engine: leave out ['page_size']"),
        (["--url", "http://127.0.0.1:9", "--vocab-size", "9"], "vocab_size must be an integer of 11 or more, got 9"),
        (["--vocab-size", "100"], "vocab_size needs a server; give its --url"),
    ],
)
def test_wrong_flags_are_one_line_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"jaxserve: error: {message}")
    assert shown.count("\n") == 1


def test_the_command_prints_a_table_and_writes_figures(
    scripted: ScriptedServer, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "two.json"
    requests = [{"prompt_len": 3, "output_len": 2}, {"prompt_len": 5, "output_len": 3}]
    workload.write_text(json.dumps({"name": "two", "seed": 1, "requests": requests}))
    flags = ["--workload", str(workload), "--rates", "inf,100", "--slo-ttft-ms", "5000", "--vocab-size", "40"]
    started_s = time.monotonic()
    report_path, plots = tmp_path / "report.json", tmp_path / "plots"
    outputs = ["--json", str(report_path), "--plots", str(plots)]
    assert cli.main(["bench", "serve", "--url", scripted.url, "--model", "second", *flags, *outputs]) == 0
    report = json.loads(report_path.read_text())
    assert report["server"] == {"url": scripted.url, "model": "second"}
    assert [run["num_requests"] for run in report["runs"]] == [2, 2]
    assert all(0 < run["elapsed_s"] < time.monotonic() - started_s for run in report["runs"])
    assert report["runs"][0]["goodput"]["share"] == 1
    assert "TTFT ms p50/p90/p99" in capsys.readouterr().out
    assert (plots / "throughput_latency.png").stat().st_size > 1000
    assert {body["model"] for body in scripted.bodies} == {"second"}
    assert all(10 <= token < 40 for body in scripted.bodies for token in body["prompt"])
