"""Keys, limits, health, metrics and the end of a server."""

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.engine import Engine
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.replies import Reply
from jaxserve.scheduling.wait_estimate import Wait
from jaxserve.server import serve
from jaxserve.server.call import Call
from tests.server.conftest import Running, running
from tests.waiting import until

LONG: dict[str, Any] = {"prompt": "a b", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def guarded(engine: Engine, tmp_path: Path) -> Iterator[Running]:
    file = tmp_path / "keys"
    file.write_text("# tenants\n\nacme:from-file\n")
    with running(engine, api_key=["secret"], api_key_file=file) as server:
        yield server


@pytest.mark.long
def test_what_starting_leaves_is_out_of_the_collectors_sight_while_it_serves(engine: Engine) -> None:
    before_s = sys.getswitchinterval()
    num_frozen = gc.get_freeze_count()
    with running(engine):
        assert 0 < gc.get_freeze_count() <= num_frozen, "the process has frozen its objects itself"
    assert gc.get_freeze_count()
    gc.unfreeze()
    try:
        with running(engine):
            assert gc.get_freeze_count() > 10_000
            assert len(gc.get_objects()) < gc.get_freeze_count() / 10
            assert sys.getswitchinterval() == pytest.approx(serve.SWITCH_INTERVAL_S)
        assert not gc.get_freeze_count()
        assert sys.getswitchinterval() == before_s
    finally:
        gc.freeze()


@pytest.mark.long
def test_ended_replies_are_freed_without_the_collector(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    for kind, init in ((Call, Call.__init__), (Reply, Reply.__init__)):

        def noted(self: Any, *args: Any, init: Any = init, **options: Any) -> None:
            made.append(weakref.ref(self))
            init(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", noted)
    gc.disable()
    try:
        with running(engine, served_model_name=["tiny"]) as server:
            for streams in (False, True):  # of clients that leave, Python 3.12's contexts keep a cycle of tracebacks
                body = LONG | {"prompt": [5, 6, 7], "stream": streams, "logprobs": 1}
                assert server.client.post("/v1/completions", json=body).status_code == 200
                assert len(made) == 2
                until(lambda: [each() for each in made] == [None, None])
                made.clear()
    finally:
        gc.enable()


def raw(url: str, request: bytes) -> bytes:
    """Send bytes and return the reply's first line."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(request)
        return sock.recv(4096).split(b"\r\n")[0]


def test_every_path_but_health_needs_a_key(guarded: Running) -> None:
    paths = [
        b"/v1/models",
        b"/v1/completions",
        b"/v1//models",
        b"/v1%2fmodels",
        b"/metrics",
        b"/tokenize",
        b"//",
        b"/x",
    ]
    for path in paths:
        for method in (b"GET", b"POST", b"OPTIONS"):
            for host in (b"x", b"127.0.0.1/health", b"evil/health?"):
                line = raw(guarded.url, method + b" " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
                assert line.split()[1] == b"401", (path, method, host, line)
    for path in ("/", "/health", "/ready", "/ping"):
        assert guarded.client.get(path).status_code == 200
    for headers in (
        {"Authorization": "Bearer secret"},
        {"Authorization": "bearer from-file"},
        {"x-api-key": "secret"},
    ):
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
    for key in ("x", "secre", "secret2", "acme:from-file", "acme"):
        assert guarded.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401


def test_tenants_do_not_share_cached_prompts(guarded: Running) -> None:
    body = {"prompt": "a long prompt that fills pages", "max_tokens": 2}
    counts = []
    for key in ("secret", "secret", "from-file"):
        reply = guarded.client.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
        counts.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == counts[2] == 0 < counts[1]


def test_limits(engine: Engine) -> None:
    options: dict[str, Any] = {"max_body_bytes": 1000, "max_json_depth": 8, "max_prompts": 2, "body_timeout_s": 0.3}
    with running(engine, **options) as server:
        post = server.client.post
        assert post("/v1/completions", content=b"x" * 2000).status_code == 413
        assert post("/v1/completions", content=b"[" * 900).status_code == 400
        assert post("/v1/completions", content=b'{"prompt": ' + b"[" * 20 + b"]" * 20 + b"}").status_code == 400
        assert post("/v1/completions", content=b'{"prompt": NaN}').status_code == 400
        assert post("/v1/completions", content=b"\xff\xfe").status_code == 400
        assert post("/v1/completions", json={"prompt": ["a"] * 3}).status_code == 400
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        assert raw(server.url, slow).split()[1] == b"408"
        assert post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_client_that_goes_is_cancelled(server: Running) -> None:
    for stream in (True, False):
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"n": 3, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        before = server.engine.stats.num_output_tokens
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(head + body)
            until(lambda: server.app.service.streams)
        until(lambda: not server.engine.core.has_work() and not server.app.service.streams)
        assert server.engine.stats.num_output_tokens - before < 3 * LONG["max_tokens"]


def test_a_client_that_takes_nothing_is_cut_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine, send_timeout_s=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"n": 3, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        monkeypatch.setattr(Reply, "events", lambda *_: iter([b": " + b"x" * 2**22 + b"\n"]))  # more than buffers hold
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(head + body)
            until(lambda: server.app.service.streams)
            until(lambda: not server.app.service.streams)
        assert server.client.get("/health").status_code == 200


def test_a_full_queue_says_when_to_come_again(engine: Engine) -> None:
    with running(engine, max_queued_requests=1) as server:
        replies: list[httpx.Response] = []

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                replies.append(client.post("/v1/completions", json=LONG | {"n": 4}))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = [reply.status_code for reply in replies]
        assert set(codes) == {200, 503}
        refused = next(reply for reply in replies if reply.status_code == 503)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert "admission_rejections_total" in server.client.get("/metrics").text


def test_a_key_has_its_rate(engine: Engine) -> None:
    with running(engine, requests_per_minute_per_key=2, tokens_per_minute_per_key=1000) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        replies = [server.client.post("/v1/completions", json=body) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
        assert replies[1].headers["x-ratelimit-remaining-requests"] == "0"
        assert int(replies[1].headers["x-ratelimit-remaining-tokens"]) in range(980, 1000)
        assert 10 < int(replies[2].headers["retry-after"]) <= 30
        assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"


def test_nobody_waits_for_a_late_reply(engine: Engine) -> None:
    with running(engine) as server:
        for stream in (True, False):
            body = LONG | {"stream": stream, "n": 4, "max_tokens": 40, "timeout": 0.001}
            reply = server.client.post("/v1/completions", json=body)
            assert "deadline_exceeded" in reply.text
            assert reply.status_code == (200 if stream else 504)
            assert not stream or reply.text.endswith("data: [DONE]\n\n")
            until(lambda: not server.engine.core.has_work())
        assert server.client.post("/v1/completions", json=LONG | {"timeout": 60}).status_code == 200


def test_a_request_that_would_wait_too_long_is_refused_immediately(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine, admission_ttft_ms=["1000"], degradation=["extras"]) as server:
        admission = server.app.service.admission
        waits = [Wait(5.25, 5.5)]
        monkeypatch.setattr(server.app.service.observer, "wait", lambda priority=None: waits[-1])
        for body in (LONG, LONG | {"prompt": "a" * 2000}, LONG | {"prompt": [5]}):
            began_s = time.perf_counter()
            reply = server.client.post("/v1/completions", json=body)
            assert time.perf_counter() - began_s < 1
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "overloaded"
            assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("6", "5250")
        until(lambda: admission.ladder.on)
        waits.append(Wait(0.0, 1e-5))
        refused = server.client.post("/v1/completions", json=LONG | {"n": 2})
        assert refused.status_code == 503
        assert refused.headers["x-degraded"] == "extras"
        assert 'rung="extras"} 1.0' in server.client.get("/metrics").text
        assert server.client.post("/v1/completions", json=LONG).status_code == 200


def test_an_idle_server_changes_whether_its_engine_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left that `/health` would take for a request that nobody serves."""

    def has_settled(may_draft: bool) -> bool:
        return engine.replicas[0].chooser.may_draft is may_draft and not engine.core.has_work()

    with running(engine, degradation=["speculation"]) as server:
        admission = server.app.service.admission
        for load, may_draft in ((0.5, False), (0.0, True)):
            monkeypatch.setattr(admission, "load", partial(float, load))
            until(partial(has_settled, may_draft))


def test_cancelled_requests_leave_within_a_step(engine: Engine) -> None:
    """Their pages are free for the plan that is made next."""
    groups = [engine.reader.read(f"gone-{i}", [5, 6, 7], SamplingParams(max_tokens=40)) for i in range(2)]
    for group in groups:
        engine.frontend.start(group)
    for _ in range(3):
        engine.advance()
    assert engine.occupancy.num_pages_used
    for group in groups:
        engine.frontend.cancel(group.request_id)
    engine.advance()
    assert engine.occupancy.num_pages_used == 0
    while engine.frontend.has_unfinished():
        engine.advance()


def test_health_is_progress(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine, stuck_after_s=0.6) as server:
        go_on, executor = threading.Event(), engine.replicas[0].executor
        launch = executor.launch

        def frozen(*args: Any) -> Any:
            go_on.wait(20)
            return launch(*args)

        assert server.client.get("/health").status_code == 200
        monkeypatch.setattr(executor, "launch", frozen)
        thread = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))
        thread.start()
        until(lambda: server.client.get("/health").status_code == 503)
        assert server.client.get("/ready").status_code == 503
        go_on.set()
        thread.join()
        until(lambda: server.client.get("/health").status_code == 200)


def test_a_broken_step_is_told_in_the_stream(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = server.engine.replicas[0].executor
    launch, calls = executor.launch, iter(range(1000))

    def breaks(*args: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("a device has failed, near /secret/path")
        return launch(*args)

    monkeypatch.setattr(executor, "launch", breaks)
    text = server.client.post("/v1/completions", json=LONG | {"stream": True}).text
    events = [line for line in text.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "/secret" not in text
    assert server.client.post("/v1/completions", json=LONG).status_code == 200


def test_a_first_signal_lets_streams_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine, shutdown_timeout_s=0.3) as server:
        executor = server.engine.replicas[0].executor
        launch = executor.launch
        monkeypatch.setattr(executor, "launch", lambda *args: time.sleep(0.05) or launch(*args))
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            server.stop()
            assert server.client.get("/ready").status_code == 503
            assert server.client.post("/v1/completions", json=LONG).status_code == 503
            text = [first, *(line for line in lines if line)]
    assert text[-1] == "data: [DONE]"
    assert json.loads(text[-2][6:])["error"]["code"] == "stopping"
    assert len(text) < LONG["max_tokens"]


COMMAND = """
import sys
from jaxserve.__main__ import main
status = main() or main()
print(*(name for name in sys.modules if name.split(".")[0] in ("torch", "nvidia", "triton")))
sys.exit(status)
"""


def test_signals_end_a_server_which_has_not_imported_torch(tmp_path: Path) -> None:
    """Two end it at once; one, as it serves again, lets the stream end that has begun."""
    options = ["--port", "0", "--shutdown-timeout-s", "60", "--compile-ahead", "minimal"]
    options += ["--max-num-seqs", "1", "--max-num-batched-tokens", "1", "--multi-step", "1"]  # one program
    command, pipe = [sys.executable, "-c", COMMAND, "serve", *options], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "serving at" in line).split()[-1]
        body = LONG | {"max_tokens": 900, "n": 50, "stream": True}  # one sample after the other, for a minute
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # kept, as its end would close the reply
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/ready").status_code == 503)
            process.send_signal(signal.SIGTERM)
            shown = [process.stderr.readline()]
            while "serving at" not in shown[-1]:
                shown.append(process.stderr.readline())
                assert shown[-1], shown
            url = shown[-1].split()[-1]
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            text = [line for line in lines if line]
        loaded, _ = process.communicate(timeout=30)
        assert (process.returncode, loaded.split()) == (0, [])
    assert ["signal" in shown[0], "cut off at the end: 1" in shown[1]] == [True, True], shown
    assert not [line for line in shown if "Traceback" in line or "Error" in line], shown
    assert text[-1] == "data: [DONE]"
    assert json.loads(text[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_samples_count_as_open_requests_one_by_one(engine: Engine) -> None:
    with running(engine, max_open_requests_per_key=2) as server:
        body = {"prompt": "a", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
        reply = server.client.post("/v1/completions", json=body | {"n": 3})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert not server.app.service.admission.num_open


def test_a_timeout_beyond_floats_means_no_timeout(engine: Engine) -> None:
    with running(engine) as server:
        content = b'{"prompt": "a", "max_tokens": 2, "timeout": 1' + 400 * b"0" + b"}"
        assert server.client.post("/v1/completions", content=content).status_code == 200


def test_requests_that_are_held_end_when_the_server_stops(engine: Engine) -> None:
    with running(engine) as server:
        admission, loop = server.app.service.admission, server.app.service.streams._loop
        admission.ladder.has = lambda rung: rung == "batch"  # type: ignore[method-assign]

        async def hold() -> None:
            await admission.turn(1, loop.create_future())

        held = asyncio.run_coroutine_threadsafe(hold(), loop)
        until(lambda: admission._held)
        loop.call_soon_threadsafe(admission.drain)
        with pytest.raises(BadRequestError, match="the server stops"):
            held.result(10)
        asyncio.run_coroutine_threadsafe(hold(), loop).result(10)  # nobody is held from now on
