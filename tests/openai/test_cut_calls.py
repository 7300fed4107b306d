"""Calls that a stop string or a limit has cut off: whatever the position, none ends as a call that could be run."""

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import anthropic.types
import pytest
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import OutputReader
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, ParsedRequest, parse_body
from jaxserve.openai.interfaces import INTERFACES
from jaxserve.openai.messages import MESSAGES
from jaxserve.openai.replies import AnyReply
from jaxserve.openai.responses import RESPONSES
from tests import random_runs
from tests.openai.chat_samples import MARKS, Call, Message, written
from tests.openai.test_tool_calls import FORMATS, TOKENIZERS, format_of

TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": name}} for name in "fg"],
    RESPONSES: [{"type": "function", "name": name, "parameters": None, "strict": False} for name in "fg"],
    MESSAGES: [{"name": name, "input_schema": {"type": "object"}} for name in "fg"],
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
CALLS = [Call("f", {"a": '"}\\', "é": [{"x": 1}]}), Call("g", {})]
STOP = "<stop>"
BEGINNINGS = {mark[:length] for mark in MARKS for length in range(4)}  # too short to tell a mark from text


def texts_of(name: str) -> tuple[str, str]:
    """Return a text with calls, and the content before them."""
    content = "" if name == "llama3_json" else "Hello, 東京 <b>"
    return written(name, Message(content, "" if name == "llama3_json" else "so\n<hm>", CALLS)), content


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return BODIES[path] | {"model": "m", "tools": TOOLS[path], "stream": True} | fields


@functools.cache
def request_of(path: str, name: str) -> ParsedRequest:
    return read(path, name, body_of(path))


def read(path: str, name: str, body: dict[str, Any]) -> ParsedRequest:
    options: dict[str, Any] = {"may_stream": True, "chat_format": format_of(name)}
    return INTERFACES[path].read(
        body, lambda url, chat: parse_body(url, chat, BodyContext("m", (), TOKENIZERS[0], SamplingParams(), **options))
    )


def reply_to(path: str, name: str, pieces: Sequence[str], reason: str, stop: str | None) -> tuple[Any, list[Any]]:
    """Return the whole reply to a text, and the events of its stream, whose increments are the pieces."""
    request, body = request_of(path, name), body_of(path)
    completion = CompletionOutput(0)
    output = RequestOutput("0", None, [1, 2], [completion])
    reply, increments = new_reply(path, request, body), OutputReader(output)
    events: list[bytes] = []
    for number, piece in enumerate(pieces, start=1):
        completion.text += piece
        completion.token_ids.append(5)
        if number == len(pieces):
            completion.finish_reason, completion.stop_reason = reason, stop
        events += reply.events(0, output, increments.read())
    events += reply.last_events([output])
    lines = [line for line in b"".join(events).split(b"\n") if line.startswith(b"data: {")]
    return new_reply(path, request, body).body([output]), [json.loads(line.removeprefix(b"data: ")) for line in lines]


def new_reply(path: str, request: ParsedRequest, body: dict[str, Any]) -> AnyReply:
    return INTERFACES[path].new_reply(request, body, TOKENIZERS[0], response_id="x", created_s=1)


def in_pieces(text: str) -> list[str]:
    """Return a text in pieces, the last of one character."""
    cuts = [0, len(text) // 3, len(text) // 2, len(text) - 1, len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(cuts)]


def valid(calls: Sequence[tuple[str, str]]) -> list[Call]:
    """Return those of some calls whose arguments are JSON."""
    found = []
    for name, arguments in calls:
        try:
            found.append(Call(name, json.loads(arguments)))
        except ValueError:
            continue
    return found


def cuts_of(text: str, *, is_stop: bool, is_chat: bool = False) -> list[str]:
    """Return the beginnings of a text: all of them for stop strings in chats, by which the others read; else some."""
    step = 1 if is_stop and (is_chat or random_runs.are_full()) else 4
    return [text[:end] for end in range(len(text), 0, -step)]


def check(text: str, full: str, calls: Sequence[tuple[str, str]], content: str, wanted: str, *, is_run: bool) -> None:
    """Check a reply to a text that was cut.

    Args:
        text: the text.
        full: the text before it was cut.
        calls: names and arguments of the calls of the reply.
        content: its content.
        wanted: content of the whole text.
        is_run: True if the reason of the end lets clients run the calls.
    """
    assert valid(calls) == CALLS[: len(valid(calls))], "calls that can be run are those that were meant"
    if is_run:
        assert len(valid(calls)) == len(calls) > 0
    if text == full:
        assert is_run
        assert len(calls) == len(CALLS)
    if wanted or not content:
        assert any(wanted.startswith(content.removesuffix(end).strip()) for end in BEGINNINGS)
    else:  # the beginning of an object that need not be a call
        assert text.startswith(content)
        assert not calls
    assert not any(mark in content for mark in MARKS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("reason", "stop"), [("stop", STOP), ("length", None)])
def test_chats(name: str, reason: str, stop: str | None) -> None:
    full, wanted = texts_of(name)
    for text in cuts_of(full, is_stop=bool(stop), is_chat=True):
        whole, chunks = reply_to(CHAT, name, in_pieces(text), reason, stop)
        ChatCompletion.model_validate(whole)
        (choice,), streamed = whole["choices"], {}
        for chunk in chunks:
            streamed = accumulate_delta(streamed, chunk["choices"][0])
        message, delta = choice["message"], streamed["delta"]
        found, sent = (
            [(each["function"]["name"], each["function"]["arguments"]) for each in one.get("tool_calls", [])]
            for one in (message, delta)
        )
        assert (found, choice["finish_reason"]) == (sent, streamed["finish_reason"])
        assert (message["content"] or "") == (delta["content"] or "")
        assert choice["finish_reason"] in (reason, "tool_calls" if stop else reason)
        is_run = choice["finish_reason"] == "tool_calls" or (not stop and text == full)
        check(text, full, found, message["content"] or "", wanted, is_run=is_run)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("reason", "stop"), [("stop", STOP), ("length", None)])
def test_messages(name: str, reason: str, stop: str | None) -> None:
    full, wanted = texts_of(name)
    for text in cuts_of(full, is_stop=bool(stop)):
        whole, events = reply_to(MESSAGES, name, in_pieces(text), reason, stop)
        anthropic.types.Message.model_validate(whole)
        (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
        assert end == {each: whole[each] for each in ("stop_reason", "stop_sequence")}
        calls: list[tuple[str, str]] = []
        for event in events:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls.append((event["content_block"]["name"], ""))
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                calls[-1] = (calls[-1][0], calls[-1][1] + event["delta"]["partial_json"])
        assert [each["name"] for each in whole["content"] if each["type"] == "tool_use"] == [each for each, _ in calls]
        if whole["stop_reason"] != "tool_use":
            assert end == {"stop_reason": "stop_sequence" if stop else "max_tokens", "stop_sequence": stop}
        is_run = whole["stop_reason"] == "tool_use" or (not stop and text == full)
        content = "".join(each["text"] for each in whole["content"] if each["type"] == "text")
        check(text, full, calls, content, wanted, is_run=is_run)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("reason", "stop"), [("stop", STOP), ("length", None)])
def test_responses(name: str, reason: str, stop: str | None) -> None:
    full, wanted = texts_of(name)
    for text in cuts_of(full, is_stop=bool(stop)):
        whole, events = reply_to(RESPONSES, name, in_pieces(text), reason, stop)
        Response.model_validate(whole)
        assert [each["item"] for each in events if each["type"].endswith("item.done")] == whole["output"]
        assert (
            events[-1]["type"] == f"response.{whole['status']}" == f"response.{'completed' if stop else 'incomplete'}"
        )
        calls = [each for each in whole["output"] if each["type"] == "function_call"]
        found = [(each["name"], each["arguments"]) for each in calls]
        assert all(each["status"] == "completed" for each in calls[:-1])
        is_run = bool(calls) and (calls[-1]["status"] == "completed" or (not stop and text == full))
        texts = [each["content"][0]["text"] for each in whole["output"] if each["type"] == "message"]
        check(text, full, found, "".join(texts), wanted, is_run=is_run)


@pytest.mark.parametrize("name", FORMATS)
def test_an_end_by_the_model_keeps_its_words(name: str) -> None:
    """What the model itself ends is not cut: it is no call, but what it says stays."""
    for text in ("well {", 'a "b', "1 < 2 <t", "[TOO"):
        whole, _ = reply_to(CHAT, name, [written(name, Message(text))], "stop", None)
        assert whole["choices"][0]["message"]["content"].strip() == text


def test_a_named_function_ends_as_a_call_of_messages() -> None:
    body = body_of(MESSAGES, tool_choice={"type": "tool", "name": "g"})
    request = read(MESSAGES, "hermes", body)
    for text, reason in (
        (written("hermes", Message(calls=[CALLS[1]])), "tool_use"),
        ('<tool_call>{"na', "end_turn"),
    ):
        completion = CompletionOutput(0, text, [5], finish_reason="stop")
        output = RequestOutput("0", None, [1], [completion])
        assert new_reply(MESSAGES, request, body).body([output])["stop_reason"] == reason


@pytest.mark.parametrize("arguments", ['"text"', '["x"]', '{"a": }', '{"a" 1, "b": 2}', '"{\\"a\\": 1"', "5"])
def test_arguments_that_are_no_object_are_no_input_to_run(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    whole, events = reply_to(MESSAGES, "hermes", in_pieces(text), "stop", None)
    anthropic.types.Message.model_validate(whole)
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "end_turn"
