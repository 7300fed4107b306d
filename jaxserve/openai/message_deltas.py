"""Message deltas: parts of a generated message. All interfaces make their whole and streamed replies from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxserve.api.stream_events import Increment
    from jaxserve.openai.scanner import Scanner

Json = dict[str, Any]


class Content(NamedTuple):
    """Delta with further answer text."""

    text: str


class Reasoning(NamedTuple):
    """Delta with further reasoning text, before the answer."""

    text: str


class ToolCall(NamedTuple):
    """Delta that begins a tool call.

    Attributes:
        number: index among the message's calls.
        call_id: unique id, to which the message with the result refers.
        name: called function.
    """

    number: int
    call_id: str
    name: str


class ToolArguments(NamedTuple):
    """Delta with further JSON text for the arguments of a call that has begun.

    Attributes:
        number: index among the message's calls.
        text: next part of the JSON text.
    """

    number: int
    text: str


MessageDelta = Content | Reasoning | ToolCall | ToolArguments


class DeltaReader:
    """Reader that turns one sample's increments into message deltas, which add up to the same message for any cuts.

    Args:
        scanner: scanner for the sample's text; None if all text is the answer.
        shows_reasoning: False to leave reasoning out.
        is_named: True if the request has named the function to call.
    """

    def __init__(self, scanner: Scanner | None = None, *, shows_reasoning: bool = True, is_named: bool = False) -> None:
        self._scanner, self._shows_reasoning, self._is_named = scanner, shows_reasoning, is_named

    def read(self, increment: Increment) -> list[MessageDelta]:
        """Return the deltas for the next increment's text; the last increment releases all text that was held back."""
        if self._scanner is None:
            return [Content(increment.text)] if increment.text else []
        reason = increment.finish_reason
        is_cut = reason not in (None, "stop") or isinstance(increment.completion.stop_reason, str)
        deltas = self._scanner.scan(increment.text, is_end=reason is not None, is_cut=is_cut)
        return deltas if self._shows_reasoning else [each for each in deltas if not isinstance(each, Reasoning)]

    @property
    def has_calls(self) -> bool:
        """True if the message so far has tool calls, and all are complete."""
        return self._scanner is not None and self._scanner.num_calls > 0 and not self._scanner.has_cut_call

    def finish_reason(self, increment: Increment) -> str | None:
        """Return OpenAI's finish reason, after `read` of the increment; None before the end."""
        has_calls = self.has_calls and not self._is_named
        return "tool_calls" if has_calls and increment.finish_reason == "stop" else increment.finish_reason


def delta_json(delta: MessageDelta) -> Json:
    """Return a message delta as the `delta` object in OpenAI's chat chunks."""
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


def whole_message(deltas: Iterable[MessageDelta]) -> Json:
    """Return OpenAI's `message` object; its content is null only if tool calls replace it.

    Args:
        deltas: the message's deltas.
    """
    contents: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    for delta in deltas:
        match delta:
            case Content(text):
                contents.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCall(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolArguments(number, text):
                calls[number]["function"]["arguments"] += text
    message: Json = {"role": "assistant", "refusal": None, "content": "".join(contents)}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message
