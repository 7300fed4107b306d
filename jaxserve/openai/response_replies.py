"""Replies for OpenAI's /v1/responses, whole or streamed, built from message deltas.

A whole reply is the content of the last event of a stream with one increment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.openai.errors import as_bad_request, shown_message
from jaxserve.openai.message_deltas import Content, MessageDelta, Reasoning, ToolArguments, ToolCall
from jaxserve.openai.replies import DONE, AnyReply

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.openai.replies import Reply

Event = tuple[str, "Json"]  # an event's type without the prefix "response.", and its fields

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_DELTA = "output_text.delta"
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseReply(AnyReply):
    """Reply to one request to /v1/responses.

    Args:
        chat: OpenAI's chat reply to the same request, which has message deltas and token counts.
        body: body of the request, which the reply repeats in part.
    """

    def __init__(self, chat: Reply, body: Json) -> None:
        self._chat = chat
        self._items = _Items(chat.response_id)
        self._is_cut = False  # True if `max_output_tokens` has ended it
        head = {"id": f"resp_{chat.response_id}", "created_at": chat.created_s}
        self._response = head | _repeated_fields(chat.request, body)

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole response as a JSON object; the only output has ended."""
        for increment in OutputReader(outputs[0]).read():
            for _ in self._changes(increment):
                pass
        return self._final(outputs)[1]["response"]

    def first_events(self) -> Iterator[bytes]:
        """Yield the encoded events that begin a stream, before any output."""
        for kind in ("created", "in_progress"):
            yield self._sent((kind, {"response": self._response | {"status": "in_progress"}}))

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the encoded server-sent events for new increments of the only output."""
        for increment in increments:
            for event in self._changes(increment):
                if event[0] == _TEXT_DELTA and not event[1]["logprobs"]:  # nearly always
                    yield self._sent_text(event[1]["delta"])
                else:
                    yield self._sent(event)

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the encoded events that end the stream; one has the whole response."""
        yield self._sent(self._final(outputs))
        yield DONE

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the encoded events that end a failed stream."""
        problem = {"code": "server_error", "message": shown_message(as_bad_request(error))}
        failed = self._response | {"status": "failed", "output": self._items.items, "error": problem}
        yield self._sent(("failed", {"response": failed}))
        yield DONE

    def _changes(self, increment: Increment) -> Iterator[Event]:
        """Add an increment to the response; yield the events for it."""
        reader = self._chat.reader(0)
        deltas = self._chat.read(0, increment)
        self._items.logprobs += (self._chat.logprobs.chat(increment) or {}).get("content", [])
        for delta in deltas:
            yield from self._items.add(delta)
        if increment.finish_reason is not None:
            reason = reader.finish_reason(increment)
            self._is_cut = reason == "length"
            # a stop string may cut off a call, though the response then ends as it was asked to
            is_cut = self._is_cut or (reason != "tool_calls" and self._items.is_call_open and not reader.has_calls)
            yield from self._items.close("incomplete" if is_cut else "completed")

    def _final(self, outputs: Sequence[RequestOutput]) -> Event:
        """Return the event that ends a stream, which has the whole response."""
        status = "incomplete" if self._is_cut else "completed"
        total_s = outputs[0].outputs[0].metrics.total_s
        return status, {
            "response": self._response
            | {
                "status": status,
                "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
                "completed_at": None if self._is_cut or total_s is None else self._chat.created_s + round(total_s),
                "output": self._items.items,
                "usage": _usage(self._chat.usage(outputs)),
            }
            | ({} if (prompt := self._chat.request.prompt_text) is None else _raw_messages(prompt, outputs[0]))
        }

    def _sent_text(self, text: str) -> bytes:
        """Encode and number the event for a text delta without log probabilities, faster than `_sent`."""
        name, number = f"response.{_TEXT_DELTA}", self.num_events
        self.num_events += 1
        return (
            f'event: {name}\ndata: {{"type": "{name}", "sequence_number": {number}, {self._items.text_position}, '
            f'"delta": {encode_basestring_ascii(text)}}}\n\n'
        ).encode()

    def _sent(self, event: Event) -> bytes:
        """Encode and number a server-sent event."""
        name = f"response.{event[0]}"
        text = json.dumps({"type": name, "sequence_number": self.num_events} | event[1])
        self.num_events += 1
        return f"event: {name}\ndata: {text}\n\n".encode()


class _Items:
    """Builder for a response's output items, each with the events that announce it.

    Args:
        response_id: name of the reply, part of the items' ids.

    Attributes:
        items: output items so far, in the interface's format; the last one is incomplete until `close`.
        logprobs: log probabilities of tokens whose text has not been added yet.
        text_position: JSON members of each text delta in the open item except the text, without braces.
    """

    def __init__(self, response_id: str) -> None:
        self.items: list[Json] = []
        self.logprobs: list[Json] = []
        self.text_position = ""
        self._response_id = response_id
        self._kind = ""  # the open item's type, empty if there is none
        self._texts: list[str] = []  # its text or arguments in parts
        self._taken: list[Json] = []  # its log probabilities

    @property
    def is_call_open(self) -> bool:
        """True if the last item is a call that has not been closed."""
        return self._kind == "function_call"

    def add(self, delta: MessageDelta) -> Iterator[Event]:
        """Append a delta to the open item, or to a new one; yield the events for it."""
        match delta:
            case ToolCall(_, call_id, name):
                yield from self._open("function_call", {"call_id": call_id, "name": name, "arguments": ""})
                return
            case ToolArguments(_, text):
                yield "function_call_arguments.delta", self._position | {"delta": text}
            case Content(text):
                if self._kind != "message":
                    yield from self._open("message", {"role": "assistant", "content": []})
                yield self._text_delta(text)
            case Reasoning(text):
                if self._kind != "reasoning":
                    yield from self._open("reasoning", {"summary": [], "content": []})
                yield self._text_delta(text)
        self._texts.append(text)

    def close(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one; yield the events for it.

        Args:
            status: "completed" or "incomplete".
        """
        if not self._kind:
            return
        if self._kind == "message" and self.logprobs:  # tokens after the last text
            yield self._text_delta("")
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if self._kind == "function_call":
            item["arguments"] = text
            yield "function_call_arguments.done", self._position | {"name": item["name"], "arguments": text}
        else:
            item["content"] = [self._part(text)]
            position = self._position | {"content_index": 0}
            logprobs = {"logprobs": self._taken} if self._kind == "message" else {}
            yield f"{_TEXTS[self._kind]}.done", position | {"text": text} | logprobs
            yield "content_part.done", position | {"part": item["content"][0]}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}
        self._kind, self._texts, self._taken = "", [], []

    def _open(self, kind: str, fields: Json) -> Iterator[Event]:
        """Close the open item, and begin one of the type `kind` with these fields; yield the events for both."""
        yield from self.close("completed")
        name = f"{_PREFIXES[kind]}_{self._response_id}_{len(self.items)}"
        self.items.append({"type": kind, "id": name, "status": "in_progress"} | fields)
        self._kind = kind
        self.text_position = json.dumps(self._position | {"content_index": 0, "logprobs": []})[1:-1]
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        if kind in _TEXTS:
            yield "content_part.added", self._position | {"content_index": 0, "part": self._part("")}

    def _text_delta(self, text: str) -> Event:
        """Return the event for more text in the open item, with the log probabilities that came with it."""
        logprobs: Json = {}
        if self._kind == "message":
            logprobs = {"logprobs": self.logprobs}
            self._taken += self.logprobs
            self.logprobs = []
        return f"{_TEXTS[self._kind]}.delta", self._position | {"content_index": 0, "delta": text} | logprobs

    def _part(self, text: str) -> Json:
        """Return the open item's only content part, with this text."""
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._taken}

    @property
    def _position(self) -> Json:
        """Fields of an event that identify the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _raw_messages(prompt: str, output: RequestOutput) -> Json:
    """Return vLLM's fields `input_messages` and `output_messages`: prompt and output, both as text and tokens."""
    (completion,) = output.outputs
    given, made = (prompt, output.prompt_token_ids), (completion.text, completion.token_ids)
    return {
        name: [{"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}]
        for name, (text, token_ids) in (("input_messages", given), ("output_messages", made))
    }


def _usage(usage: Json) -> Json:
    """Return the `usage` object of /v1/responses for a chat's `usage` object."""
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def _without_nulls(content: Json) -> Json:
    """Return an object without its null members."""
    return {name: value for name, value in content.items() if value is not None}


def _repeated_fields(request: ParsedRequest, body: Json) -> Json:
    """Return a response's fields that repeat its request, and empty ones for the output."""
    given, params = _without_nulls(body), request.params
    unset = {"description": None, "parameters": None, "strict": None}
    names = ("instructions", "max_output_tokens", "max_tool_calls", "user", "safety_identifier", "prompt_cache_key")
    return {
        "object": "response",
        "model": request.model,
        "output": [],
        **dict.fromkeys(("error", "incomplete_details", "completed_at", "usage", "previous_response_id")),
        **{name: given.get(name) for name in names},
        "metadata": given.get("metadata", {}),
        "tools": [unset | tool for tool in given.get("tools", ()) if tool.get("type") == "function"],
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "text": {"format": {"type": "text"}} | _without_nulls(given.get("text", {})),
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
        **{name: getattr(params, name) for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")},
        "top_logprobs": request.top_logprobs or 0,
        "truncation": given.get("truncation", "disabled"),
        "service_tier": "default",
        **dict.fromkeys(("store", "background"), False),
    }
