"""/v1/responses as OpenAI's own client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response

from tests.server.conftest import Running

ASKED: dict[str, Any] = {"model": "tiny", "input": "tell me", "temperature": 0, "max_output_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def comparable(response: Response) -> dict[str, Any]:
    """Return what two replies to one request must have in common: all but names, times and hits in the cache."""
    content = response.model_dump()
    del content["usage"]["input_tokens_details"]
    for item in content["output"]:
        del item["id"]
        for part in item.get("content", ()):
            part.pop("parsed", None)  # added by the client's accumulator
    return {name: content[name] for name in content if name not in ("id", "created_at", "completed_at")}


def test_response_equals_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "be\n\nk"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c\nd"},
        ],
        temperature=0,
        max_tokens=12,
    )
    items: Any = [
        {"role": "developer", "content": "k"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    response = client.responses.create(**ASKED | {"input": items}, instructions="be", store=False)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert (response.status == "incomplete") == (chat.choices[0].finish_reason == "length")
    counted = client.responses.input_tokens.count(model="tiny", input=items, instructions="be")
    assert counted.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"metadata": {"k": "v"}, "instructions": "be"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"extra_body": {"ignore_eos": True, "stop": ["e"]}},
    ],
)
def test_accumulated_stream_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.responses.create(**ASKED | options)
    with client.responses.stream(**ASKED | options) as stream:
        events = list(stream)
        if whole.status == "completed":
            assert comparable(stream.get_final_response()) == comparable(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    assert events[-1].type == f"response.{whole.status}"
    assert comparable(events[-1].response) == comparable(whole)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    if "include" in options:
        assert len(whole.output[0].content[0].logprobs) == whole.usage.output_tokens


def test_outputs_follow_their_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "pair", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(**ASKED | {"temperature": 1, "max_output_tokens": 40}, text=form)
    if response.status == "completed":
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.output_text.lstrip().startswith("{")


def test_fields_are_honoured_named_or_refused(server: Running) -> None:
    def post(body: dict[str, Any]) -> Any:
        return server.client.post("/v1/responses", json=ASKED | body)

    codex = {  # fields that coding agents send with every request
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "store": False,
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "client_metadata": {"a": "b"},
        "tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "description": "d", "tools": []}],
    }
    vllms: dict[str, Any] = {"include_reasoning": False, "request_id": "mine", "session_id": "s", "vllm_xargs": {}}
    reply = post(codex | vllms)
    assert reply.status_code == 200
    named = "client_metadata,include,reasoning.summary,store,text.verbosity"
    assert reply.headers["x-ignored-params"] == f"{named},tools.namespace,tools.web_search"
    assert reply.json()["tools"] == []
    assert reply.json()["id"] == "resp_mine"
    raw = post({"enable_response_messages": True}).json()
    (given,), (made,) = raw["input_messages"], raw["output_messages"]
    assert made["message"] == raw["output"][0]["content"][0]["text"]
    assert len(made["tokens"]) == raw["usage"]["output_tokens"]
    chat = {"messages": [{"role": "user", "content": ASKED["input"]}], "return_token_ids": True}
    whole = server.client.post("/v1/chat/completions", json=chat | {"return_prompt_text": True}).json()
    assert (given["message"], given["tokens"]) == (whole["prompt_text"], whole["prompt_token_ids"])
    for field, value, said in [
        ("previous_response_id", "resp_1", "not stored"),
        ("store", True, "not stored"),
        ("background", True, "not stored"),
        ("truncation", "some", "disabled"),
        ("include", ["web_search_call.results"], "include"),
        ("tools", [{"type": "telepathy"}], "function"),
        ("tool_choice", {"type": "web_search"}, "allowed_tools"),
        ("max_output_tokens", -1, "max_output_tokens"),
        ("temperature", "hot", "temperature"),
        ("text", {"format": {"type": "xml"}}, "json_schema"),
        ("input", [], "at least one"),
        ("input", [{"type": "item_reference", "id": "x"}], "item_reference"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "'image_url'"),
        ("input", ["x"], "object"),
        ("input", "x" * 4000, "reduce the length"),
        ("messages", [], "input"),
        ("n", 2, "input"),
    ]:
        reply = post({field: value})
        assert reply.status_code == 400, field
        error = reply.json()["error"]
        assert error["param"] == field, error
        assert said in error["message"]
    assert post({"model": "other"}).status_code == 404
    for method, path in [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel")]:
        reply = server.client.request(method, f"/v1/responses/{path}")
        assert reply.status_code == 404
        assert "not stored" in reply.json()["error"]["message"]


def test_a_broken_step_fails_the_response(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = server.engine.replicas[0].executor
    launch, calls = executor.launch, iter(range(1000))

    def breaks(*args: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("a device has failed, near /secret/path")
        return launch(*args)

    monkeypatch.setattr(executor, "launch", breaks)
    events = list(client.responses.create(**ASKED, stream=True, extra_body={"ignore_eos": True}))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert "/secret" not in events[-1].response.error.message
