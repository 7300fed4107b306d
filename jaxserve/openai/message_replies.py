"""Replies and errors for Anthropic's /v1/messages, whole or streamed, built from message deltas.

A whole reply has the content blocks that a stream with one increment builds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.openai.errors import as_bad_request, shown_message
from jaxserve.openai.message_deltas import Content, MessageDelta, Reasoning, ToolArguments, ToolCall
from jaxserve.openai.partial_json import read_partial_json
from jaxserve.openai.replies import AnyReply

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.openai.replies import Reply

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageReply(AnyReply):
    """Reply to one request to /v1/messages.

    Args:
        chat: OpenAI's reply to the same request, which has message deltas and token counts.
    """

    def __init__(self, chat: Reply, _body: Json) -> None:
        self._chat = chat
        self._message: Json = {
            "id": f"msg_{chat.response_id}",
            "type": "message",
            "role": "assistant",
            "model": chat.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks = _Blocks()
        self._is_begun = False
        self._end: Json = {}

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole message as Anthropic's JSON object; the only output has ended."""
        for increment in OutputReader(outputs[0]).read():
            for _ in self._changes(increment):
                pass
        return self._message | {"content": self._blocks.blocks} | self._end | {"usage": self._usage(outputs)}

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the encoded server-sent events for new increments of the only output."""
        if not self._is_begun:  # not in `first_events`, when the number of cached tokens is not known yet
            self._is_begun = True
            usage = self._usage([output]) | {"output_tokens": 0}
            yield _event({"type": "message_start", "message": self._message | {"usage": usage}})
            yield _event({"type": "ping"})
        for increment in increments:
            yield from map(_event, self._changes(increment))

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the encoded events that end the stream: stop reason and token counts."""
        yield _event({"type": "message_delta", "delta": self._end, "usage": self._usage(outputs)})
        yield _event({"type": "message_stop"})

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the encoded event that ends a failed stream."""
        yield _event(message_error_body(error))

    def _changes(self, increment: Increment) -> Iterator[Json]:
        """Add an increment to the message; yield the content of each event for it."""
        reader = self._chat.reader(0)
        for delta in self._chat.read(0, increment):
            yield from self._blocks.add(delta)
        reason = reader.finish_reason(increment)
        if reason is None:
            return
        yield from self._blocks.close()
        stop = increment.completion.stop_reason
        self._end = {"stop_reason": "end_turn", "stop_sequence": None}
        if reason == "length":
            self._end["stop_reason"] = "max_tokens"
        elif self._blocks.has_calls and (reason == "tool_calls" or reader.has_calls):  # the latter for a named function
            self._end["stop_reason"] = "tool_use"
        elif isinstance(stop, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": stop}

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return Anthropic's `usage` object for outputs; its input tokens exclude cached tokens."""
        usage = self._chat.usage(outputs)
        cached, details = usage["prompt_tokens_details"], usage.get("completion_tokens_details", {})
        num_cached = cached["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }
        if "cached_tokens_by_tier" in cached:  # no field of Anthropic's
            counts["cached_tokens_by_tier"] = cached["cached_tokens_by_tier"]
        if "reasoning_tokens" in details:
            counts["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return counts


class _Blocks:
    """Builder for a message's content blocks, each with the events that announce it.

    Attributes:
        blocks: content blocks so far, in Anthropic's format; the last one is incomplete until `close`.
    """

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._kind = ""  # the open block's type, empty if there is none
        self._texts: list[str] = []  # its text or input in parts
        self._has_invalid_input = False

    @property
    def has_calls(self) -> bool:
        """True if there are tool calls, and all arguments are JSON objects: nothing else can be an `input`."""
        return any(block["type"] == "tool_use" for block in self.blocks) and not self._has_invalid_input

    def add(self, delta: MessageDelta) -> Iterator[Json]:
        """Append a delta to the open block, or to a new one; yield the content of each event for it."""
        match delta:
            case ToolCall(_, call_id, name):
                yield from self._open("tool_use", {"id": call_id, "name": name, "input": {}})
                return
            case ToolArguments(_, text):
                if text:
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
            case Content(text):
                if self._kind != "text":
                    yield from self._open("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                if self._kind != "thinking":
                    yield from self._open("thinking", {"thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
        self._texts.append(text)

    def close(self) -> Iterator[Json]:
        """Complete the open block, if there is one; yield the content of its last event."""
        if not self._kind:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if self._kind == "tool_use":
            block["input"], is_valid = _read_input(text)
            self._has_invalid_input |= not is_valid
        else:
            block[self._kind] = text  # the field has the type's name
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}
        self._kind, self._texts = "", []

    def _open(self, kind: str, fields: Json) -> Iterator[Json]:
        """Close the open block, and begin one of the type `kind` with these fields; yield the content of each event."""
        yield from self.close()
        self.blocks.append({"type": kind} | fields)
        self._kind = kind
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}

    def _delta(self, delta: Json) -> Json:
        """Return the content of the event for more text in the open block."""
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _read_input(arguments: str) -> tuple[Json, bool]:
    """Return a tool call's JSON arguments as an object, and whether they are complete: they may have been cut off."""
    with suppress(ValueError):
        if isinstance(value := json.loads(arguments), dict):
            return value, True
    with suppress(ValueError):
        if isinstance(value := read_partial_json(arguments), dict):
            return value, False
    return {}, False


def _event(content: Json) -> bytes:
    """Encode a server-sent event, whose type is in its content."""
    if content["type"] == "content_block_delta" and content["delta"]["type"] == "text_delta":  # nearly always
        return (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {content["index"]}, '
            f'"delta": {{"type": "text_delta", "text": {encode_basestring_ascii(content["delta"]["text"])}}}}}\n\n'
        ).encode()
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


def message_error_body(error: RequestError) -> Json:
    """Return an error as Anthropic's JSON object."""
    known = as_bad_request(error)
    if known.too_long is not None:  # Anthropic's clients look for these words
        num_tokens, max_tokens = known.too_long
        message = f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum. {known.message}"
        known = replace(known, message=message)
    kind = _ERRORS.get(known.status_code, "invalid_request_error" if known.status_code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": shown_message(known)}}
