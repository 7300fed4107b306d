"""Responses and messages without a server: however a stream is cut, what clients accumulate is the whole reply."""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anthropic
import anthropic.types
import httpx2
import jiter
import openai
import pydantic
import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.openai.chat_formats import chat_format
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import ParsedRequest, parse_body
from jaxserve.openai.interfaces import INTERFACES
from jaxserve.openai.message_deltas import Content, MessageDelta, Reasoning, ToolArguments, ToolCall
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES
from jaxserve.openai.partial_json import read_partial_json
from jaxserve.openai.replies import AnyReply, Reply
from jaxserve.openai.responses import RESPONSES
from jaxserve.text.loading import load_tokenizer
from tests.openai.chat_samples import TEMPLATES, Call, Message, written
from tests.random_runs import examples

with tempfile.TemporaryDirectory() as directory:
    files = tiny_tokenizers.write(Path(directory), tiny_tokenizers.byte_level(), chat_template="[bot]")
    tokenizer = load_tokenizer(files)

BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "m", "input": "x"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


PROMPT = "{% for m in messages %}{{ m.content }}{% endfor %}{# {{ tools }} #}{% if tools %}{% endif %}"
with tempfile.TemporaryDirectory() as directory:
    files = tiny_tokenizers.write(Path(directory), tiny_tokenizers.byte_level(), chat_template=PROMPT)
    tool_tokenizer = load_tokenizer(files)
TOOLS: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [{"type": "function", "name": name, "parameters": None, "strict": False} for name in "fg"],
    MESSAGES: [{"name": name, "input_schema": {"type": "object"}} for name in "fg"],
}
SAMPLE = Message("Hello, 東京 <b>", "so\n<hm>", [Call("f", {"a": '"}]\\', "é": [{}, {"x": 1}]}), Call("g", {})])


class CutReader:
    """Reader of a message whose deltas are known: each character of the text is one of theirs."""

    def __init__(self, deltas: list[MessageDelta]) -> None:
        self._parts = [
            delta if isinstance(delta, ToolCall) else delta._replace(text=char)
            for delta in deltas
            for char in ("." if isinstance(delta, ToolCall) else delta.text)
        ]
        self._num_read = 0
        self.text = "".join("." if isinstance(part, ToolCall) else part.text for part in self._parts)

    def read(self, increment: Increment) -> list[MessageDelta]:
        found: list[MessageDelta] = []
        for part in self._parts[self._num_read :][: len(increment.text)]:
            last = found[-1] if found else None
            is_more = last is not None and type(last) is type(part) and not isinstance(part, ToolCall)
            if is_more and getattr(last, "index", None) == getattr(part, "index", None):
                found[-1] = last._replace(text=last.text + part.text)
            else:
                found.append(part)
        self._num_read += len(increment.text)
        return found

    def finish_reason(self, increment: Increment) -> str | None:
        return increment.finish_reason


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[MessageDelta], str]:
    """Draw the deltas of a message, and the reason of its end."""
    texts = st.text(min_size=1, max_size=8)
    deltas: list[MessageDelta] = [Reasoning(draw(texts))] * draw(st.integers(0, 1))
    if draw(st.booleans()):
        deltas.append(Content(draw(texts)))
    for index in range(draw(st.integers(0, 3))):
        deltas += [ToolCall(index, f"call_{index}", draw(st.sampled_from("fgh")))]
        deltas += [ToolArguments(index, json.dumps(draw(OBJECTS)))] * draw(st.integers(0, 1))
        if draw(st.integers(0, 4)) == 0:
            deltas.append(Content(draw(texts)))
    reason = "stop" if not any(isinstance(delta, ToolCall) for delta in deltas) else "tool_calls"
    if deltas and not isinstance(deltas[-1], ToolCall) and draw(st.booleans()):
        last = deltas[-1]
        deltas[-1] = last._replace(text=last.text[: draw(st.integers(1, len(last.text)))])
        reason = "length"
    return deltas, reason


def read(path: str, body: dict[str, Any]) -> ParsedRequest:
    """Return the request in a body."""
    return INTERFACES[path].read(
        body,
        lambda url, chat: parse_body(url, chat, BodyContext("m", (), tokenizer, SamplingParams(), may_stream=True)),
    )


def sent(path: str, script: tuple[list[MessageDelta], str], cuts: Iterable[int]) -> tuple[bytes, dict[str, Any]]:
    """Return the stream and the whole reply of a message.

    Args:
        path: path of the interface.
        script: the message, and the reason of its end.
        cuts: numbers of characters that come at once.
    """
    deltas, reason = script
    interface, body = INTERFACES[path], BODIES[path] | {"stream": True}
    request = read(path, body)

    def new_reply() -> AnyReply:
        reader, chat = CutReader(deltas), Reply(request, None, response_id="x", created_s=1)
        chat.reader = lambda _: reader
        return interface.reply(chat, body)

    return streamed(new_reply, CutReader(deltas).text, reason, cuts)


def streamed(
    new_reply: Callable[[], AnyReply], text: str, reason: str, cuts: Iterable[int]
) -> tuple[bytes, dict[str, Any]]:
    """Return the stream and the whole reply of a text."""
    reply = new_reply()
    completion = CompletionOutput(0)
    output = RequestOutput("0", "p", [7, 8], [completion])
    increments = OutputReader(output)
    events = list(reply.first_events())
    for cut in cuts:
        completion.text = text[: len(completion.text) + cut]
        completion.token_ids.append(5)
        events += reply.events(0, output, increments.read())
    completion.text = text
    completion.token_ids.append(5)
    completion.finish_reason = reason
    events += reply.events(0, output, increments.read())
    events += reply.last_events([output])
    return b"".join(events), new_reply().body([output])


STREAM: list[bytes] = []  # the last is what servers answer
TRANSPORT = httpx2.MockTransport(
    lambda _: httpx2.Response(200, content=STREAM[-1], headers={"content-type": "text/event-stream"})
)
ANTHROPIC = anthropic.Anthropic(api_key="k", http_client=httpx2.Client(transport=TRANSPORT))
OPENAI = openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=TRANSPORT))
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


CUTS = st.lists(st.integers(0, 5), max_size=12)


@settings(max_examples=examples(20), deadline=None)
@given(scripts(), CUTS)
def test_messages_add_up(script: tuple[list[MessageDelta], str], cuts: list[int]) -> None:
    stream, whole = sent(MESSAGES, script, cuts)
    anthropic.types.Message.model_validate(whole)
    STREAM[:] = [stream]
    with ANTHROPIC.messages.stream(**BODIES[MESSAGES]) as events:
        final = events.get_final_message().to_dict()
    for block in final["content"]:
        block.pop("parsed_output", None)
    assert {name: final[name] for name in whole if name != "usage"} == {
        name: value for name, value in whole.items() if name != "usage"
    }
    assert final["usage"] == whole["usage"]


@settings(max_examples=examples(20), deadline=None)
@given(scripts(), CUTS)
def test_responses_add_up(script: tuple[list[MessageDelta], str], cuts: list[int]) -> None:
    stream, whole = sent(RESPONSES, script, cuts)
    Response.model_validate(whole)
    STREAM[:] = [stream]
    with OPENAI.responses.stream(**BODIES[RESPONSES]) as parsed:
        events = list(parsed)
    assert stream.endswith(b"data: [DONE]\n\n")
    last = events[-1]
    assert last.type == f"response.{whole['status']}"
    texts: dict[int, str] = {}
    done: dict[int, Any] = {}
    for event, line in zip(events, [line for line in stream.split(b"\n") if line.startswith(b"data: {")], strict=True):
        content = json.loads(line.removeprefix(b"data: "))
        EVENT.validate_python(content)  # the event itself: the client repairs it
        assert event.sequence_number == content["sequence_number"]
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        elif event.type == "response.output_item.done":
            done[event.output_index] = content["item"]
    accumulated: Any = last.response.to_dict()["output"]
    for item in accumulated:
        item.pop("parsed_arguments", None)  # added by the client
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert list(done.values()) == whole["output"] == accumulated
    for index, item in enumerate(whole["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == text
    kinds = [event.type.removeprefix("response.") for event in events]
    for added, ended in [("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")]:
        assert kinds.count(added) == kinds.count(ended)
    assert kinds.count("output_item.done") == sum(
        kinds.count(f"{kind}.done") for kind in ("output_text", "reasoning_text", "function_call_arguments")
    )
    assert whole["status"] == ("incomplete" if script[1] == "length" else "completed")


@settings(max_examples=examples(80), deadline=None)
@given(OBJECTS, st.integers(0, 60), st.booleans(), st.sampled_from([None, 1]))
def test_json_that_was_cut_off(value: dict[str, Any], num_lost: int, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    text = text[: max(1, len(text) - num_lost)]
    assert read_partial_json(text) == jiter.from_json(text.encode(), partial_mode=True)


def test_turns_of_a_response() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    translated = INTERFACES[RESPONSES].translate
    assert translated is not None
    chat = translated(
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "message", "role": "assistant", "content": "b"},
                call,
                call | {"call_id": "d"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
        }
    ).chat
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "cd"]
    assert chat["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "t", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
    ]
    described = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": described}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_images_in_results_of_functions_are_refused() -> None:
    translated = INTERFACES[RESPONSES].translate
    assert translated is not None
    output = [{"type": "input_image", "image_url": "data:image/png;base64,"}]
    with pytest.raises(BadRequestError, match="input_image"):
        translated({"input": [{"type": "function_call_output", "call_id": "c", "output": output}]})


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_turns_of_a_message() -> None:
    translated = INTERFACES[MESSAGES].translate
    assert translated is not None
    body = BODIES[MESSAGES] | {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True},
                    {"type": "text", "text": "d"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    chat = translated(body).chat
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert chat["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [text_part("b")], "reasoning": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Error: no"},
        {"role": "user", "content": [text_part("d")]},
    ]
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)


def test_unwanted_thoughts_are_named_as_the_client_names_them() -> None:
    """The template here knows no such switch."""
    body = BODIES[MESSAGES] | {"thinking": {"type": "disabled"}}
    assert read(MESSAGES, body).ignored == ("thinking",)
    body = BODIES[MESSAGES] | {"output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 9}}
    assert read(MESSAGES, body).ignored == ("output_config", "thinking.budget_tokens")
    assert read(RESPONSES, BODIES[RESPONSES] | {"reasoning": {"effort": "low"}}).ignored == ("reasoning",)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (RESPONSES, openai.types.responses.ResponseCreateParams),
        (MESSAGES, anthropic.types.MessageCreateParams),
        (COUNT_TOKENS, anthropic.types.MessageCountTokensParams),
    ],
)
def test_no_field_is_dropped(path: str, params: Any) -> None:
    """Every field that the client knows is translated, named as ignored, or refused by its name."""
    translate = INTERFACES[path].translate
    assert translate is not None
    body = {
        name: value
        for name, value in BODIES.get(path, BODIES[MESSAGES]).items()
        if path != COUNT_TOKENS or name != "max_tokens"
    }
    plain = translate(body)
    variants = getattr(params, "__args__", (params,))
    fields = {name for variant in variants for name in variant.__annotations__} - {"metadata"}  # part of the reply
    for name in sorted(fields):
        value = {"strange": 1}
        try:
            found = translate(body | {name: value})
        except BadRequestError as error:
            assert error.param == name  # noqa: PT017 - all else is looked at below
            continue
        assert found.chat != plain.chat or name in found.ignored, name


@pytest.mark.parametrize(
    ("path", "schema", "order"),
    [
        (RESPONSES, "parameters", ["name", "description", "parameters", "strict"]),
        (MESSAGES, "input_schema", ["name", "parameters", "description", "strict"]),
    ],
)
def test_prompts_do_not_depend_on_the_order_of_a_tools_fields(path: str, schema: str, order: list[str]) -> None:
    """Templates print tools as JSON: one order of their fields lets prompts share cached pages."""
    tool = {"name": "f", "description": "d", schema: {}, "strict": True}
    kind = {"type": "function"} if path == RESPONSES else {}
    translate = INTERFACES[path].translate
    assert translate is not None
    for names in itertools.permutations(tool):
        given = kind | {name: tool[name] for name in names}
        (found,) = translate(BODIES[path] | {"tools": [given]}).chat["tools"]
        assert list(found["function"]) == order


@pytest.mark.parametrize("name", ["hermes", "openai", "deepseek_v31"])
@settings(max_examples=examples(4), deadline=None)
@given(cuts=st.lists(st.integers(0, 30), max_size=12), num_lost=st.just(0) | st.integers(0, 60))
def test_calls_and_thoughts_arrive(name: str, cuts: list[int], num_lost: int) -> None:
    """The text of a model, as its scanner reads it, is the same message for the clients of both interfaces."""
    text, form = written(name, SAMPLE), chat_format([TEMPLATES[name]])
    text = text[: len(text) - num_lost]
    reason = "length" if num_lost else "stop"

    def new_reply(path: str) -> AnyReply:
        body = BODIES[path] | {"stream": True, "tools": TOOLS[path]}
        defaults = SamplingParams()
        request = INTERFACES[path].read(
            body,
            lambda url, chat: parse_body(
                url, chat, BodyContext("m", (), tool_tokenizer, defaults, may_stream=True, chat_format=form)
            ),
        )
        return INTERFACES[path].new_reply(request, body, None, response_id="x", created_s=1)

    stream, whole = streamed(lambda: new_reply(MESSAGES), text, reason, cuts)
    STREAM[:] = [stream]
    with ANTHROPIC.messages.stream(**BODIES[MESSAGES]) as events:
        message: Any = events.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in message.content] == [
        (block["type"], block.get("input")) for block in whole["content"]
    ]
    assert message.stop_reason == whole["stop_reason"] == ("max_tokens" if num_lost else "tool_use")
    stream, response = streamed(lambda: new_reply(RESPONSES), text, reason, cuts)
    STREAM[:] = [stream]
    with OPENAI.responses.stream(**BODIES[RESPONSES]) as parsed:
        done = [event.item for event in parsed if event.type == "response.output_item.done"]
    Response.model_validate(response)
    assert [item.id for item in done] == [item["id"] for item in response["output"]]
    if num_lost:
        return
    thought, answer, *calls = whole["content"]
    assert (thought["thinking"].strip(), answer["text"].strip()) == (SAMPLE.reasoning, SAMPLE.content)
    assert [(call["name"], call["input"]) for call in calls] == [(call.name, call.arguments) for call in SAMPLE.calls]
    thought, answer, *calls = response["output"]
    assert thought["content"][0]["text"].strip() == SAMPLE.reasoning
    assert answer["content"][0]["text"].strip() == SAMPLE.content
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        (call.name, call.arguments) for call in SAMPLE.calls
    ]
    assert all(call["call_id"].startswith("call_") for call in calls)
