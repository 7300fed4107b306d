"""Replies for /v1/responses, whole or streamed, from message deltas.

A whole reply is in the last event of a stream with one increment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.openai.errors import as_bad_request, shown_message
from jaxserve.openai.message_deltas import Content, MessageDelta, Reasoning, ToolArguments, ToolCall
from jaxserve.openai.replies import DONE

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.openai.replies import Reply

Event = tuple[str, "Json"]  # its type without "response.", and its fields

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_DELTA = "output_text.delta"
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseReply:
    """Reply to one request for a response.

    Args:
        chat: the chat's reply, which has message deltas and token counts.
        body: the request's body.
    """

    def __init__(self, chat: Reply, body: Json) -> None:
        self._chat = chat
        self._items = _Items(chat.response_id)
        self._num_events = 0
        self._is_cut = False  # True if the limit on tokens has ended it
        self._response = {"id": f"resp_{chat.response_id}", "created_at": chat.created_s} | _response(
            chat.request, body
        )

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply; the output has ended."""
        for increment in OutputReader(outputs[0]).read():
            for _ in self._changes(increment):
                pass
        return self._final(outputs)[1]["response"]

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply, as it is one message."""
        return self.body(outputs)

    def first_events(self) -> Iterator[bytes]:
        """Yield the events before any output."""
        for kind in ("created", "in_progress"):
            yield self._sent((kind, {"response": self._response | {"status": "in_progress"}}))

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the server-sent events for new increments.

        Args:
            number: index of the only prompt.
            output: its output.
            increments: its increments.
        """
        for increment in increments:
            for event in self._changes(increment):
                if event[0] == _TEXT_DELTA and not event[1]["logprobs"]:  # nearly always
                    yield self._sent_text(event[1]["delta"])
                else:
                    yield self._sent(event)

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the events that end a stream."""
        yield self._sent(self._final(outputs))
        yield DONE

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events that end a failed stream."""
        problem = {"code": "server_error", "message": shown_message(as_bad_request(error))}
        failed = self._response | {"status": "failed", "output": self._items.items, "error": problem}
        yield self._sent(("failed", {"response": failed}))
        yield DONE

    def _changes(self, increment: Increment) -> Iterator[Event]:
        reader = self._chat.reader(0)
        deltas = self._chat.read(0, increment)
        self._items.logprobs += (self._chat.chat_logprobs(increment) or {}).get("content", [])
        for delta in deltas:
            yield from self._items.add(delta)
        if increment.finish_reason is not None:
            reason = reader.finish_reason(increment)
            self._is_cut = reason == "length"
            # a stop string may cut off a call, though the response then ends as it was asked to
            is_cut = self._is_cut or (reason != "tool_calls" and self._items.is_call_open and not reader.has_calls)
            yield from self._items.close("incomplete" if is_cut else "completed")

    def _final(self, outputs: Sequence[RequestOutput]) -> Event:
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
        """Return the event for a text delta, faster than `_sent`."""
        name, number = f"response.{_TEXT_DELTA}", self._num_events
        self._num_events += 1
        return (
            f'event: {name}\ndata: {{"type": "{name}", "sequence_number": {number}, {self._items.text_place}, '
            f'"delta": {encode_basestring_ascii(text)}}}\n\n'
        ).encode()

    def _sent(self, event: Event) -> bytes:
        name = f"response.{event[0]}"
        text = json.dumps({"type": name, "sequence_number": self._num_events} | event[1])
        self._num_events += 1
        return f"event: {name}\ndata: {text}\n\n".encode()


class _Items:
    """Builder for a response's output items.

    Args:
        response_id: name of the reply.

    Attributes:
        items: the items so far.
        logprobs: log probabilities not sent yet.
        text_place: fields for a delta of the open text except the text, as JSON without brackets.
    """

    def __init__(self, response_id: str) -> None:
        self.items: list[Json] = []
        self.logprobs: list[Json] = []
        self.text_place = ""
        self._response_id = response_id
        self._kind = ""  # the open item's type, empty if there is none
        self._texts: list[str] = []  # its text or arguments in parts
        self._taken: list[Json] = []  # its log probabilities

    @property
    def is_call_open(self) -> bool:
        """True if the last item is a call that has not been closed."""
        return self._kind == "function_call"

    def add(self, delta: MessageDelta) -> Iterator[Event]:
        """Yield a delta's events."""
        match delta:
            case ToolCall(_, call_id, name):
                yield from self.close("completed")
                yield self._open("function_call", {"call_id": call_id, "name": name, "arguments": ""})
                return
            case ToolArguments(_, text):
                yield "function_call_arguments.delta", self._place | {"delta": text}
                self._texts.append(text)
                return
            case Content(text):
                kind = "message"
            case Reasoning(text):
                kind = "reasoning"
        if self._kind != kind:
            yield from self.close("completed")
            yield self._open(kind, {"role": "assistant"} if kind == "message" else {"summary": []}, content=[])
            yield "content_part.added", self._place | {"content_index": 0, "part": self._part("")}
        self._texts.append(text)
        yield self._text_delta(text)

    def close(self, status: str) -> Iterator[Event]:
        """Yield the events that end the open item, if there is one.

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
            yield "function_call_arguments.done", self._place | {"name": item["name"], "arguments": text}
        else:
            item["content"] = [self._part(text)]
            place = self._place | {"content_index": 0}
            logprobs = {"logprobs": self._taken} if self._kind == "message" else {}
            yield f"{_TEXTS[self._kind]}.done", place | {"text": text} | logprobs
            yield "content_part.done", place | {"part": item["content"][0]}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}
        self._kind, self._texts, self._taken = "", [], []

    def _open(self, kind: str, fields: Json, **content: list[Json]) -> Event:
        name = f"{_PREFIXES[kind]}_{self._response_id}_{len(self.items)}"
        self.items.append({"type": kind, "id": name, "status": "in_progress"} | fields | content)
        self._kind = kind
        self.text_place = json.dumps(self._place | {"content_index": 0, "logprobs": []})[1:-1]
        return "output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _text_delta(self, text: str) -> Event:
        logprobs: Json = {}
        if self._kind == "message":
            logprobs = {"logprobs": self.logprobs}
            self._taken += self.logprobs
            self.logprobs = []
        return f"{_TEXTS[self._kind]}.delta", self._place | {"content_index": 0, "delta": text} | logprobs

    def _part(self, text: str) -> Json:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._taken}

    @property
    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _raw_messages(prompt: str, output: RequestOutput) -> Json:
    """Return vLLM's fields with the model's input and output, as text and tokens."""
    (completion,) = output.outputs
    given, made = (prompt, output.prompt_token_ids), (completion.text, completion.token_ids)
    return {
        name: [{"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}]
        for name, (text, token_ids) in (("input_messages", given), ("output_messages", made))
    }


def _usage(usage: Json) -> Json:
    """Return token counts under this interface's names."""
    cached, details = usage["prompt_tokens_details"]["cached_tokens"], usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def _without_nulls(content: Json | None) -> Json:
    return {name: value for name, value in (content or {}).items() if value is not None}


def _response(request: ParsedRequest, body: Json) -> Json:
    """Return the fields that repeat the request, and empty ones for the output."""
    params = request.params

    given = {name: value for name, value in body.items() if value is not None}
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
        "text": {"format": {"type": "text"}} | _without_nulls(given.get("text")),
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": request.top_logprobs or 0,
        "truncation": given.get("truncation", "disabled"),
        "service_tier": "default",
        "store": False,
        "background": False,
    }
