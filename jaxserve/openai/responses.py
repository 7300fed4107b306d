"""Requests to /v1/responses as chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.translation import SAMPLING, Fields, Json, Translation, by_type
from jaxserve.text.messages import content_text

RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
NAMES = {  # names of a chat's fields in a response's request
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}

_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "cache_salt", "priority")
_SAMPLING = ("stop", "top_k", "chat_template_kwargs", "include_reasoning", *SAMPLING)
_LABELS = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    "client_metadata",
)
_LEFT_OUT = {  # tools that a model here cannot call, which coding agents send with every request
    *("web_search", "web_search_preview", "image_generation", "code_interpreter", "file_search", "mcp", "tool_search"),
    *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "custom", "namespace"),
}
_NOT_STORED = "responses are not stored; send the earlier items in input"
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def chat_of_response(body: Json) -> Translation:
    """Return the chat that a request to /v1/responses asks for.

    Raises:
        BadRequestError: the request asks for something that there is not here; it names the field.
    """
    fields = Fields(body, "the body", None)
    ignored = set(fields.skip(*_LABELS, "max_tool_calls"))  # it limits tools that the server runs, and there are none
    fields.take("metadata", dict)  # part of the reply
    fields.any("timeout")  # the server has read it
    options = Fields(fields.take("stream_options", dict, {}), "stream_options", "stream_options")
    ignored |= {"stream_options"} if options.skip("include_obfuscation") else set()
    options.end()
    fields.demand("store", False, why=_NOT_STORED)
    ignored |= {"store"} & body.keys() if body.get("store") is not None else set()
    fields.demand("service_tier", "auto", "default")
    ignored |= {"service_tier"} if body.get("service_tier") is not None else set()
    fields.demand("previous_response_id", why=_NOT_STORED)
    fields.demand("conversation", why=_NOT_STORED)
    fields.demand("background", False, why=_NOT_STORED)
    truncation = fields.choose("truncation", "disabled", "auto")
    fields.demand("prompt", why="there are no stored prompts; send their text in input")
    chat = fields.of_chats(*_SAME, *_SAMPLING)
    if (limit := fields.any("max_output_tokens")) is not None:
        chat["max_tokens"] = limit
    if fields.take("enable_response_messages", bool):
        chat["return_prompt_text"] = True
    instructions = fields.take("instructions", str)
    chat["messages"] = _messages(instructions, fields.any("input"))
    given = fields.take("tools", list, [])
    ignored |= {f"tools.{kind}" for tool in given if (kind := _left_out(tool)) is not None}
    if tools := [tool for tool in given if _left_out(tool) is None]:
        chat["tools"] = [by_type(tool, {"function": _tool}, "a tool", "tools") for tool in tools]
    if (choice := fields.any("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice, ignored)
    _read_text(chat, Fields(fields.take("text", dict, {}), "text", "text"), ignored)
    _read_reasoning(chat, Fields(fields.take("reasoning", dict, {}), "reasoning", "reasoning"), ignored)
    _read_logprobs(chat, fields.take("include", list, []), fields.take("top_logprobs", int), ignored)
    fields.end()
    return Translation(chat, frozenset(ignored), drops_turns=truncation == "auto")


def _read_logprobs(chat: Json, include: Sequence[Any], num_top: int | None, ignored: set[str]) -> None:
    for wanted in include:
        if wanted not in (_LOGPROBS, _ENCRYPTED):
            message = f"include must be of {[_LOGPROBS, _ENCRYPTED]}, got {brief(wanted)}"
            raise BadRequestError(message, "include", "unsupported_value")
    if _ENCRYPTED in include:  # thoughts are sent as text, which clients may send back
        ignored.add("include")
    if _LOGPROBS in include or num_top:
        if chat.get("tools") and chat.get("tool_choice") != "none":
            message = f"{_LOGPROBS} cannot be had with tools, as not all tokens are of the text; use a chat"
            raise BadRequestError(message, "include", "unsupported_value")
        chat |= {"logprobs": True, "top_logprobs": num_top or 0}


def _read_text(chat: Json, text: Fields, ignored: set[str]) -> None:
    if text.skip("verbosity"):
        ignored.add("text.verbosity")
    form = text.take("format", dict, {"type": "text"})
    text.end()
    chat["response_format"] = by_type(
        form,
        {
            "text": lambda _: {"type": "text"},
            "json_object": lambda _: {"type": "json_object"},
            "json_schema": _json_schema,
        },
        "text.format",
        "text",
    )


def _json_schema(fields: Fields) -> Json:
    described = {"name": fields.need("name", str), "schema": fields.need("schema", dict)}
    if (strict := fields.take("strict", bool)) is not None:
        described["strict"] = strict
    if (description := fields.take("description", str)) is not None:
        described["description"] = description
    return {"type": "json_schema", "json_schema": described}


def _read_reasoning(chat: Json, reasoning: Fields, ignored: set[str]) -> None:
    if (effort := reasoning.take("effort", str)) is not None:
        chat["reasoning_effort"] = effort
    ignored |= {f"reasoning.{name}" for name in reasoning.skip("summary", "generate_summary")}
    reasoning.demand("context", "auto", "all_turns")
    reasoning.demand("mode", "standard")
    reasoning.end()


def _left_out(tool: Any) -> str | None:
    """Return the type of a tool that the model is not told of; None for others."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind in _LEFT_OUT else None


def _tool(fields: Fields) -> Json:
    function = {"name": fields.need("name", str)}
    for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if (value := fields.take(name, kind)) is not None:
            function[name] = value
    fields.skip("output_schema")  # the caller's function generates it
    fields.demand("defer_loading", False)
    fields.demand("allowed_callers", ["direct"])
    return {"type": "function", "function": function}


def _tool_choice(choice: Any, ignored: set[str]) -> Any:
    if isinstance(choice, str):
        return choice
    readers: dict[str, Callable[[Fields], Any]] = {
        "function": _named,
        "allowed_tools": partial(_allowed, ignored=ignored),
    }
    return by_type(choice, readers, "tool_choice", "tool_choice")


def _named(fields: Fields) -> Json:
    return {"type": "function", "function": {"name": fields.need("name", str)}}


def _allowed(fields: Fields, ignored: set[str]) -> Any:
    given, mode, where = fields.need("tools", list), fields.need("mode", str), "a tool of tool_choice"
    ignored |= {f"tool_choice.{kind}" for tool in given if (kind := _left_out(tool)) is not None}
    tools = [by_type(tool, {"function": _named}, where, "tool_choice") for tool in given if _left_out(tool) is None]
    if given and not tools and mode == "auto":  # the model may call none of those that it is told of
        return "none"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _messages(instructions: str | None, given: Any) -> list[Json]:
    turns = _Turns()
    if instructions:
        turns.add("system", instructions)
    if isinstance(given, str):
        turns.add("user", given)
    elif isinstance(given, list):
        for item in given:
            by_type(item, turns.readers, "an item of input", "input", default="message")
    else:
        raise BadRequestError(f"input must be text or a list of items, got {brief(given)}", "input")
    if not turns.messages:
        raise BadRequestError("input must have at least one item", "input")
    return turns.messages


class _Turns:
    """Messages of a chat, from items. Thoughts, text and calls of one turn of the model are one message.

    Attributes:
        messages: the messages.
        readers: reader of items of each type.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.readers: dict[str, Callable[[Fields], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._call_output,
        }

    def add(self, role: str, content: str | list[Json]) -> None:
        """Add a message; instructions at the beginning are one message, as templates want it."""
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            both = self.messages[0]["content"], content
            self.messages[0]["content"] = "\n\n".join(map(content_text, both))
        else:
            self.messages.append({"role": role, "content": content})

    def _turn(self, *later: str) -> Json:
        """Return the open message of the model; a new one if there is none or if it has a part that comes `later`."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or (later and self._has(*later)):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _has(self, *parts: str) -> bool:
        return any(self.messages[-1].get(part) for part in parts)

    def _message(self, item: Fields) -> None:
        item.skip("id", "status", "phase")
        role = item.need("role", str)
        content = _content(item.any("content"))
        if role == "assistant":
            self._turn("content", "tool_calls")["content"] = content
        elif role in ("user", "system", "developer"):
            self.add("user" if role == "user" else "system", content)
        else:
            message = f"role must be user, assistant, system or developer, got {brief(role)}"
            raise BadRequestError(message, "input", "unsupported_value")

    def _reasoning(self, item: Fields) -> None:
        item.skip("id", "status")
        parts = item.take("content", list) or item.take("summary", list, [])
        item.skip("summary")
        item.demand("encrypted_content", why="it cannot be read here; send thoughts as reasoning_text")
        if text := content_text(_content(parts)):
            self._turn("reasoning", "content", "tool_calls").update({"reasoning": text, "content": ""})

    def _call(self, item: Fields) -> None:
        item.skip("id", "status")
        item.demand("caller", {"type": "direct"})
        function = {"name": item.need("name", str), "arguments": item.need("arguments", str)}
        turn = self._turn()
        turn.setdefault("content", None)
        turn.setdefault("tool_calls", []).append(
            {"id": item.need("call_id", str), "type": "function", "function": function}
        )

    def _call_output(self, item: Fields) -> None:
        item.skip("id", "status", "name")
        item.demand("caller", {"type": "direct"})
        call_id = item.need("call_id", str)
        text = content_text(_content(item.any("output")))  # few templates read parts of results
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _content(content: Any) -> str | list[Json]:
    """Return a content, which is text or a list of parts, as a chat has it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"a content must be text or a list of parts, got {brief(content)}", "input")
    texts = (by_type(part, _PARTS, "a part of a content", "input") for part in content)
    return [{"type": "text", "text": text} for text in texts]


def _plain(part: Fields) -> str:
    part.skip("annotations", "logprobs", "prompt_cache_breakpoint")
    return str(part.need("text", str))


_PARTS: dict[str, Callable[[Fields], str]] = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), _plain),
    "refusal": lambda part: str(part.need("refusal", str)),
}
