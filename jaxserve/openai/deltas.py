"""Deltas of a chat's message: what whole and streamed replies of every interface are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxserve.increments import Increment

Json = dict[str, Any]


class Content(NamedTuple):
    """More text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """More text of the thoughts before the answer."""

    text: str


class ToolCall(NamedTuple):
    """Start of a call of a tool, once for each.

    Attributes:
        number: place of the call in its message, from 0.
        call_id: name of the call, by which the message with its result refers to it.
        name: name of the function.
    """

    number: int
    call_id: str
    name: str


class ToolArguments(NamedTuple):
    """More text of the JSON of a call's arguments. The call has begun.

    Attributes:
        number: place of the call in its message, from 0.
        text: raw text, which need not be whole JSON.
    """

    number: int
    text: str


Delta = Content | Reasoning | ToolCall | ToolArguments


class DeltaReader:
    """Reader of one sample of a chat. However its text is cut, the deltas add up to the same message.

    Args:
        name: name of the sample, unique among all; the ids of its calls follow from it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, increment: Increment) -> list[Delta]:
        """Return the deltas of what is new; with the last increment, all that was held back."""
        return [Content(increment.text)] if increment.text else []

    def finish_reason(self, increment: Increment) -> str | None:
        """Return the reason of the end in OpenAI's terms, after `read` of the increment; None before the end."""
        return increment.finish_reason

    def _call_id(self, number: int) -> str:
        return f"call_{hashlib.blake2b(f'{self._name}-{number}'.encode(), digest_size=12).hexdigest()}"


def delta_json(delta: Delta) -> Json:
    """Return the `delta` of a chunk of a chat."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text}
        case ToolCall(number, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": number, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def whole_message(deltas: Iterable[Delta]) -> Json:
    """Return the message of a whole chat: its text is null only if there are calls in its place."""
    contents: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for delta in deltas:
        match delta:
            case Content(text):
                contents.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case ToolCall(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolArguments(number, text):
                calls[number]["function"]["arguments"] += text
    message: Json = {"role": "assistant", "refusal": None, "content": "".join(contents)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message
