"""Tools over HTTP, by OpenAI's client, whose accumulator of streams is the oracle of whole replies."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from jaxserve.openai.chat_formats import TOOL_CALL_FORMATS
from tests.server.conftest import Running

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.fixture
def client(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    assert server.engine.tokenizer is not None
    monkeypatch.setitem(
        server.engine.tokenizer.chat_template,
        "default",
        "{{ messages[0].content }}{# {{ tools }} #}{% if tools %}{% endif %}",
    )
    service = server.app.service
    context = replace(service.context, chat_format=TOOL_CALL_FORMATS["llama3_json"])  # the shortest
    monkeypatch.setattr(service, "context", context)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_the_same_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "model": "tiny", "tools": TOOLS, "n": 4}
    body |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 7, "temperature": 1}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion()
    ended = [each for each in whole.choices if each.finish_reason != "length"]
    assert ended
    for first, second in zip(whole.choices, streamed.choices, strict=True):
        assert first.finish_reason == second.finish_reason
        assert (first.message.content or "") == (second.message.content or "")
        calls = [(each.function.name, each.function.arguments) for each in first.message.tool_calls or []]
        assert calls == [(each.function.name, each.function.arguments) for each in second.message.tool_calls or []]
    for each in ended:
        assert each.finish_reason == ("stop" if choice is NAMED else "tool_calls")
        (call,) = each.message.tool_calls or []
        assert call.function.name in ("g" if choice is NAMED else "fg")
        assert json.loads(call.function.arguments) == {}
