"""Deltas of a chat's message: what whole and streamed replies of every interface are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxserve.api.stream_events import Increment
    from jaxserve.openai.scanner import Scanner

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
        scanner: scanner of its text; None if the text is the message.
        shows_reasoning: False to leave thoughts out.
        is_named: True if the request has named the function to call.
    """

    def __init__(self, scanner: Scanner | None = None, *, shows_reasoning: bool = True, is_named: bool = False) -> None:
        self._scanner, self._shows_reasoning, self._is_named = scanner, shows_reasoning, is_named

    def read(self, increment: Increment) -> list[Delta]:
        """Return the deltas of what is new; with the last increment, all that was held back."""
        if self._scanner is None:
            return [Content(increment.text)] if increment.text else []
        reason = increment.finish_reason
        is_cut = reason not in (None, "stop") or isinstance(increment.completion.stop_reason, str)
        deltas = self._scanner.scan(increment.text, is_end=reason is not None, is_cut=is_cut)
        return deltas if self._shows_reasoning else [each for each in deltas if not isinstance(each, Reasoning)]

    @property
    def has_calls(self) -> bool:
        """True if there are calls, all of them complete."""
        return self._scanner is not None and self._scanner.num_calls > 0 and not self._scanner.has_cut_call

    def finish_reason(self, increment: Increment) -> str | None:
        """Return the reason of the end in OpenAI's terms, after `read` of the increment; None before the end."""
        has_calls = self.has_calls and not self._is_named
        return "tool_calls" if has_calls and increment.finish_reason == "stop" else increment.finish_reason


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
