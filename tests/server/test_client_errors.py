"""Errors as the packages of OpenAI and Anthropic raise them, in the words by which programs tell them apart."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from jaxserve.assembly.engine import Engine
from tests.e2e.sizes import SIZES
from tests.server.conftest import Running, running
from tests.server.hashed_engine import hashed_engine, write_model

LIMIT = SIZES["max_model_len"]
LONG = "x " * LIMIT


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


Ask = Callable[[openai.OpenAI, dict[str, Any]], Any]
ASKS: dict[str, tuple[str, Ask]] = {
    "completions": ("prompt", lambda c, o: c.completions.create(model="tiny", prompt=LONG, **o)),
    "tokens": ("prompt", lambda c, o: c.completions.create(model="tiny", prompt=[5] * LIMIT, **o)),
    "chats": (
        "messages",
        lambda c, o: c.chat.completions.create(model="tiny", messages=[{"role": "user", "content": LONG}], **o),
    ),
    "responses": ("input", lambda c, o: c.responses.create(model="tiny", input=LONG, **o)),
}


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    """Return a server with a key."""
    with running(engine, served_model_name=["tiny"], api_key=["right"]) as server:
        yield server


def of_openai(server: Running, key: str = "right") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def of_anthropic(server: Running, key: str = "right") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def message(client: anthropic.Anthropic, text: str = "x", **options: Any) -> Any:
    given: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text}],
    } | options
    return client.messages.create(**given)


@pytest.mark.parametrize("options", [{}, {"stream": True}])
@pytest.mark.parametrize("name", ASKS)
def test_a_prompt_that_is_too_long(server: Running, name: str, options: dict[str, Any]) -> None:
    param, ask = ASKS[name]
    with of_openai(server) as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, options)
    error = caught.value
    assert (error.code, error.type, error.param) == ("context_length_exceeded", "invalid_request_error", param)
    shown = str(error)  # of the newest client it lacks the code, and LangChain looks for "prompt is too long" there
    assert f"This model's maximum context length is {LIMIT} tokens. However, your prompt is too long: it has " in shown
    assert "Please reduce the length of the input prompt" in error.message


def test_a_message_that_is_too_long(server: Running) -> None:
    with of_anthropic(server) as client:
        tokens = client.messages.count_tokens(model="tiny", messages=user(LONG)).input_tokens
        with pytest.raises(anthropic.BadRequestError) as caught:
            message(client, LONG)
    assert caught.value.type == "invalid_request_error"
    found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", caught.value.message)
    assert found is not None
    assert int(found[2]) == LIMIT - 1 < int(found[1]) <= tokens


OUTPUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": "x"}, "max_tokens"),
    "chats": ("/v1/chat/completions", {"messages": user("x")}, "max_tokens"),
    "chats by OpenAI": ("/v1/chat/completions", {"messages": user("x")}, "max_completion_tokens"),
    "responses": ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": user("x")}, "max_tokens"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_longer_than_any_can_be(server: Running, name: str) -> None:
    """One that only has no room beside its prompt is cut, as in vLLM."""
    path, body, field = OUTPUTS[name]
    headers = {"x-api-key": "right"}
    for stream in (False, True):
        refused = server.client.post(path, json=body | {field: LIMIT + 1, "stream": stream}, headers=headers)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (
            f"{field}={LIMIT + 1} cannot be greater than max_model_len={LIMIT}. Please request fewer"
            in (error["message"])
        )
        assert path == "/v1/messages" or (error["param"], error["code"]) == (field, "invalid_value")
    cut = server.client.post(path, json=body | {field: LIMIT, "ignore_eos": True}, headers=headers)
    assert cut.status_code == 200, cut.text
    counts = cut.json()["usage"]
    num_prompt, num_output = (
        counts.get(f"{kind}_tokens", counts.get(f"{other}_tokens"))
        for kind, other in (("prompt", "input"), ("completion", "output"))
    )
    assert num_prompt + counts.get("cache_read_input_tokens", 0) + num_output == LIMIT


def test_an_output_of_the_default_length_is_cut_to_the_room(tmp_path: Path) -> None:
    sizes = {"max_model_len": 8, "page_size": 4, "num_pages": 8, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    with running(hashed_engine(write_model(tmp_path), **sizes)) as server:
        body = {"prompt": [3, 4], "ignore_eos": True}
        reply = server.client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 6)
        refused = server.client.post("/v1/completions", json=body | {"max_tokens": 16})
        assert "max_tokens=16 cannot be greater than max_model_len=8" in refused.json()["error"]["message"]


def test_a_wrong_key_and_a_missing_key(server: Running) -> None:
    with of_openai(server, "wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "incorrect API key provided, as Authorization: Bearer" in caught.value.message
    missing = server.client.get("/v1/models")
    assert (missing.status_code, missing.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "must be given, as Authorization: Bearer KEY" in missing.json()["error"]["message"]
    with of_anthropic(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
        message(client)
    assert refused.value.type == "authentication_error"
    assert "x-api-key" in refused.value.message
    reply = server.client.post("/v1/messages", json={})
    assert reply.status_code == 401
    assert "must be given, as x-api-key" in reply.json()["error"]["message"]


def test_a_model_that_is_not_there(server: Running) -> None:
    with of_openai(server) as client:
        for call in (
            lambda: client.completions.create(model="other", prompt="x"),
            lambda: client.responses.create(model="other", input="x"),
            lambda: client.models.retrieve("other"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with of_anthropic(server) as client, pytest.raises(anthropic.NotFoundError) as refused:
        message(client, model="other")
    assert refused.value.type == "not_found_error"


def test_limits_of_rates(engine: Engine) -> None:
    with running(engine, served_model_name=["tiny"], api_key=["right"], requests_per_minute_per_key=1) as server:
        with of_openai(server) as client:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 60
        with of_anthropic(server) as other, pytest.raises(anthropic.RateLimitError) as refused:
            message(other)
        assert refused.value.type == "rate_limit_error"
        assert "retry-after" in refused.value.response.headers


def test_timeouts_and_a_server_that_stops(server: Running) -> None:
    with of_openai(server) as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="x", max_tokens=40, extra_body={"timeout": 1e-6})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    with of_anthropic(server) as other, pytest.raises(anthropic.APIStatusError) as late:
        message(other, max_tokens=40, extra_body={"timeout": 1e-6})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")
    server.app.service.is_draining = True
    try:
        with of_openai(server) as client, pytest.raises(openai.InternalServerError) as stopping:
            client.completions.create(model="tiny", prompt="x")
        assert stopping.value.status_code == 503
        with of_anthropic(server) as other, pytest.raises(anthropic.APIStatusError) as busy:
            message(other)
        assert (busy.value.status_code, busy.value.type) == (529, "overloaded_error")
        assert "retry-after" in busy.value.response.headers
    finally:
        server.app.service.is_draining = False
