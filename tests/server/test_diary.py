"""The server's log of itself, and the options that say where and how it serves."""

import logging
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.assembly.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.server import diary
from jaxserve.server.config import ServerConfig
from jaxserve.server.sockets import is_reachable, listen
from tests.server.conftest import running

BODY = {"prompt": "Once", "max_tokens": 3, "temperature": 0}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("jaxserve.server")]


def test_start_refusals_and_end_are_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server")
    with running(engine, served_model_name=["tiny", "other"]) as server:
        for _ in range(3):
            server.client.post("/v1/completions", json=BODY | {"temperature": -1})
        assert server.client.post("/v1/completions", json=BODY).is_success
        assert server.client.get("/nothing").status_code == 404
    start, stop, refused, end = said(caplog)
    assert f"({engine.arch.architecture}) as tiny, other at {server.url}: max_model_len" in start
    assert refused.endswith(" s: 4 (3 with 400 invalid_request, 1 with 404 not_found)")
    assert stop == "stopping after a signal; open requests: 0, with 0.5 s to end"
    assert end == "stopped; requests: 5, cut off at the end: 0"


def test_refusals_are_counted_at_intervals(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server")
    own = diary.Diary(logs_access=False)
    for _ in range(80):
        own.note_refusal(503, "queue_full")
    own.note_refusal(401, "invalid_api_key")
    own.log_refusals()
    assert said(caplog) == [], "each would be a line of its own"
    monkeypatch.setattr(diary, "REFUSALS_INTERVAL_S", 0.0)
    own.log_refusals()
    own.log_refusals()
    assert said(caplog) == ["requests refused in 0 s: 81 (80 with 503 queue_full, 1 with 401 invalid_api_key)"]


@pytest.mark.parametrize("access_log", [False, True])
def test_requests_are_logged_if_asked_for(engine: Engine, caplog: pytest.LogCaptureFixture, access_log: bool) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server.access")
    with running(engine, access_log=access_log) as server:
        server.client.post("/v1/completions", json=BODY)
        server.client.get("/a%0Ab")
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxserve.server.access"]
    assert len(lines) == (2 if access_log else 0)
    if access_log:
        assert lines[0].startswith("127.0.0.1:")
        assert '"POST /v1/completions" 200 ' in lines[0]
        assert '"GET /a%0Ab" 404 ' in lines[1]


def test_a_path_of_a_proxy_may_be_there_or_not(engine: Engine) -> None:
    with running(engine, root_path="/llm/") as server:
        for path in ("/llm/v1/models", "/v1/models", "/llm/health", "/llm", "/llm/"):
            assert server.client.get(path).is_success, path
        for path in ("/llmv1/models", "/other/v1/models"):
            assert server.client.get(path).status_code == 404, path


def test_a_unix_socket_takes_the_place_of_host_and_port(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(path))
    with running(engine, uds=str(path)) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_ISSOCK(path.stat().st_mode)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/health").is_success
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(ConfigError, match=r"the server must get the Unix socket .*/socket, but: .*; choose"):
            listen(ServerConfig(uds=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        listen(ServerConfig(uds="/no/such/socket"))


def test_replies_have_usage_times_and_ids_for_tokens_if_the_server_says_so(engine: Engine) -> None:
    options: dict[str, Any] = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    options["enable_per_request_metrics"] = True
    with running(engine, **options) as server:
        streamed = server.client.post("/v1/completions", json=BODY | {"stream": True, "logprobs": 1}).text
        whole = server.client.post("/v1/completions", json=BODY | {"logprobs": 1}).json()
        several = server.client.post("/v1/completions", json=BODY | {"n": 2}).json()
    assert '"choices": [], "usage": {"prompt_tokens"' in streamed
    assert '"usage": null' not in streamed
    assert '"metrics": {"time_to_first_token_ms": ' in streamed.splitlines()[-4]
    names = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
    assert all(whole["metrics"][name] >= 0 for name in names)
    assert several["metrics"] is None
    assert "token_id:" in streamed
    assert all(token.startswith("token_id:") for token in whole["choices"][0]["logprobs"]["tokens"])


def test_open_streams_are_counted_when_a_signal_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server")
    own = diary.Diary(logs_access=False)
    own.note_stop(3, 30.0)
    own.note_end(2)
    assert said(caplog) == [
        "stopping after a signal; open requests: 3, with 30 s to end",
        "stopped; requests: 0, cut off at the end: 2",
    ]


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_sockets_that_other_machines_reach(host: str, expected: bool) -> None:
    with listen(ServerConfig(host=host, port=0)) as sock:
        assert is_reachable(sock) == expected


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_before_a_model_is_loaded(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be"):
        ServerConfig(**{option: "hermess"})
