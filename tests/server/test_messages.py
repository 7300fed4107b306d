"""/v1/messages as Anthropic's own client sees it."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from jaxserve.assembly.engine import Engine
from tests.server.conftest import Running, running

ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 12,
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the client has no such argument


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


IMAGE = {"type": "base64", "media_type": "image/png", "data": "x"}


def test_message_equals_chat(client: anthropic.Anthropic, server: Running) -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        "max_tokens": 12,
        "temperature": 0,
    }
    expected = server.client.post("/v1/chat/completions", json=chat).json()
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    message = client.messages.create(**ASKED | {"messages": messages}, system="be", **GREEDY)
    assert "".join(block.text for block in message.content) == expected["choices"][0]["message"]["content"]
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected["choices"][0]["finish_reason"]]
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system="be")
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [{}, {"stop_sequences": True}, {"extra_body": {"top_k": 3, "seed": 3}}])
def test_accumulated_stream_equals_whole(client: anthropic.Anthropic, options: dict[str, Any]) -> None:
    asked = ASKED | GREEDY | options
    if "stop_sequences" in options:  # a character of the greedy reply
        asked["stop_sequences"] = [client.messages.create(**ASKED, **GREEDY).content[0].text[4]]
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    common = {"content", "model", "role", "stop_reason", "stop_sequence", "type"}
    assert final.model_dump(include=common) == whole.model_dump(include=common)
    for counts in ("output_tokens", "cache_creation_input_tokens"):
        assert getattr(final.usage, counts) == getattr(whole.usage, counts)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    if "stop_sequences" in options:
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", asked["stop_sequences"][0])


def test_cached_tokens_are_no_input_tokens(client: anthropic.Anthropic) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "a prompt that comes twice"}]}
    client.messages.create(**asked)
    usage = client.messages.create(**asked).usage
    assert usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="tiny", messages=asked["messages"])
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_fields_are_honoured_named_or_refused(server: Running) -> None:
    def post(body: dict[str, Any]) -> Any:
        return server.client.post("/v1/messages", json=ASKED | body)

    cached: Any = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # Claude Code sends it with every request
    agents: dict[str, Any] = {"metadata": {"user_id": "me"}, "context_management": kept, "mcp_servers": []}
    reply = post({"system": [cached], "request_id": "mine", "watermarking": False} | agents)
    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"] == "context_management"
    assert reply.json()["id"] == "msg_mine"
    body = {name: value for name, value in ASKED.items() if name != "max_tokens"} | {"chat_template_kwargs": {"x": 1}}
    counted = server.client.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["error"]["message"].startswith("chat_template_kwargs must be variables of the chat template")
    for field, value, said in [
        ("max_tokens", None, "must be given"),
        ("max_tokens", -1, "max_tokens"),
        ("messages", None, "must be given"),
        ("messages", [{"role": "assistant", "content": ""}], "last message"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "source of an image"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": IMAGE}]}], "'image_url'"),
        ("tools", [{"type": "bash_20250124", "name": "bash"}], "bash_20250124"),
        ("container", "x", "container"),
        ("temperature", "hot", "temperature"),
        ("n", 2, "'n'"),
    ]:
        reply = post({field: value})
        assert reply.status_code == 400, field
        content = reply.json()
        assert content["type"] == "error"
        assert content["error"]["type"] == "invalid_request_error"
        assert said in content["error"]["message"]


def test_errors_are_those_of_the_client(engine: Engine) -> None:
    with running(engine, api_key=["secret"], served_model_name=["tiny"]) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            assert client.messages.create(**ASKED).content
            with pytest.raises(anthropic.NotFoundError) as missing:
                client.messages.create(**ASKED | {"model": "other"})
            with pytest.raises(anthropic.BadRequestError):
                client.messages.create(**ASKED | {"max_tokens": 0})
            server.app.service.is_draining = True
            with pytest.raises(anthropic.InternalServerError) as stopping:
                client.messages.create(**ASKED)
            server.app.service.is_draining = False
        assert missing.value.type == "not_found_error"
        assert stopping.value.type == "overloaded_error"
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**ASKED)


def test_a_broken_step_ends_the_stream_with_an_error(
    client: anthropic.Anthropic, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = server.engine.replicas[0].executor
    launch, calls = executor.launch, iter(range(1000))

    def breaks(*args: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("a device has failed, near /secret/path")
        return launch(*args)

    monkeypatch.setattr(executor, "launch", breaks)
    with pytest.raises(anthropic.APIStatusError) as error:
        for _ in client.messages.create(**ASKED, stream=True, extra_body={"ignore_eos": True}):
            pass
    assert error.value.type == "api_error"
    assert "/secret" not in str(error.value)
