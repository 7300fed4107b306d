"""Requests to Anthropic's /v1/messages and /v1/messages/count_tokens as chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.translation import SAMPLING, Fields, Json, Translation, by_type
from jaxserve.text.messages import content_text

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
NAMES = {  # names of a chat's fields in a request for a message
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt", "priority", "chat_template_kwargs")
_LABELS = (  # context_management leaves out earlier turns, or thoughts in them: what is kept here is only longer
    *("metadata", "service_tier", "cache_control", "user_profile_id", "workspace_id", "inference_geo", "diagnostics"),
    *("context_management", "betas"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_message(body: Json) -> Translation:
    """Return the chat that a request to /v1/messages asks for.

    Raises:
        BadRequestError: the request asks for something that there is not here; it names the field.
    """
    return _translated(body, has_output=True)


def chat_of_count(body: Json) -> Translation:
    """Return the chat whose prompt's tokens a request to /v1/messages/count_tokens asks for.

    Raises:
        BadRequestError: the request asks for something that there is not here; it names the field.
    """
    return _translated(body, has_output=False)


def _translated(body: Json, *, has_output: bool) -> Translation:
    fields = Fields(body, "the body", None)
    ignored = set(fields.skip(*_LABELS))
    fields.demand("mcp_servers", [], why="there are no tools here that the server runs")
    fields.demand("speed", "standard")
    fields.demand("container", why="there are no containers here")
    chat = fields.of_chats(*_SAME)
    if has_output:
        fields.any("timeout")  # the server has read it
        chat |= fields.of_chats(*SAMPLING)
        chat["max_tokens"] = fields.need("max_tokens", int)
        if (stop := fields.take("stop_sequences", list)) is not None:
            chat["stop"] = stop
    blocks = _Blocks(ignored)
    if (system := fields.any("system")) is not None and (content := blocks.content(system, "system")):
        blocks.messages.append({"role": "system", "content": content})
    names = {"continue_final_message": "messages"}
    if _read_messages(fields.need("messages", list), blocks) == "assistant":  # the reply begins with its text
        chat["continue_final_message"] = True
    chat["messages"] = blocks.messages
    if tools := fields.take("tools", list, []):
        reader = {"custom": lambda tool: _tool(tool, ignored)}
        chat["tools"] = [by_type(tool, reader, "a tool", "tools", default="custom") for tool in tools]
    if (choice := fields.take("tool_choice", dict)) is not None:
        _read_tool_choice(chat, choice)
    config = Fields(fields.take("output_config", dict, {}), "output_config", "output_config")
    if (effort := config.take("effort", str)) is not None:
        chat["reasoning_effort"] = effort
    if (form := config.take("format", dict)) is not None:
        chat["response_format"] = by_type(form, {"json_schema": _schema}, "output_config.format", "output_config")
    config.end()
    if (thinking := fields.take("thinking", dict)) is not None and _is_disabled(thinking, ignored):
        chat |= {"reasoning_effort": "none", "include_reasoning": False}
        names["reasoning_effort"] = "thinking"
    fields.end()
    return Translation(chat, frozenset(ignored), names)


def _read_messages(messages: list[Any], blocks: _Blocks) -> str:
    """Read all messages; return the role of the last one."""
    role = ""
    for message in messages:
        fields = Fields(message, "a message", "messages")
        role = fields.need("role", str)
        if role not in ("user", "assistant", "system"):
            raise BadRequestError(f"role must be user, assistant or system, got {brief(role)}", "messages")
        blocks.add(role, fields.any("content"))
        fields.end()
    if role == "assistant" and (blocks.messages[-1].get("tool_calls") or not blocks.messages[-1]["content"]):
        message = "a last message of the assistant must have text, with which the reply begins, and no calls of tools"
        raise BadRequestError(message, "messages", "unsupported_value")
    return role


def _tool(fields: Fields, ignored: set[str]) -> Json:
    function = {"name": fields.need("name", str), "parameters": fields.need("input_schema", dict)}
    for name, kind in (("description", str), ("strict", bool)):
        if (value := fields.take(name, kind)) is not None:
            function[name] = value
    ignored |= {f"tools.{name}" for name in fields.skip("cache_control", "eager_input_streaming", "input_examples")}
    fields.demand("defer_loading", False)
    fields.demand("allowed_callers", ["direct"])
    return {"type": "function", "function": function}


def _read_tool_choice(chat: Json, choice: Json) -> None:
    fields = Fields(choice, "tool_choice", "tool_choice")
    kind = fields.need("type", str)
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": fields.need("name", str)}}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        message = f"tool_choice.type must be auto, any, tool or none, got {brief(kind)}"
        raise BadRequestError(message, "tool_choice", "unsupported_value")
    if kind != "none" and fields.take("disable_parallel_tool_use", bool):
        chat["parallel_tool_calls"] = False
    fields.end()


def _is_disabled(thinking: Json, ignored: set[str]) -> bool:
    """Return whether thoughts are unwanted. That they are wanted changes nothing: models think if they can."""
    fields = Fields(thinking, "thinking", "thinking")
    kind = fields.need("type", str)
    if kind not in ("enabled", "adaptive", "disabled"):
        message = f"thinking.type must be enabled, adaptive or disabled, got {brief(kind)}"
        raise BadRequestError(message, "thinking", "unsupported_value")
    ignored |= {f"thinking.{name}" for name in fields.skip("budget_tokens", "display")}
    fields.end()
    return bool(kind == "disabled")


def _schema(fields: Fields) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": fields.need("schema", dict)}}


def _as_parts(content: str | list[Json]) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


class _Blocks:
    """Messages of a chat, from messages of content blocks.

    Args:
        ignored: fields of the request without effect, to which those of blocks are added.

    Attributes:
        messages: the messages.
    """

    def __init__(self, ignored: set[str]) -> None:
        self.messages: list[Json] = []
        self._ignored = ignored
        self._readers: dict[str, dict[str, Callable[[Fields], None]]] = {
            "user": {"text": partial(self._text, "user"), "tool_result": self._tool_result},
            "assistant": {
                "text": partial(self._text, "assistant"),
                "tool_use": self._tool_use,
                "thinking": self._thinking,
            },
            "system": {"text": partial(self._text, "system")},
        }

    def content(self, content: Any, param: str) -> str | list[Json]:
        """Return a content, which is text or a list of text blocks, as a chat has it."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            message = f"{param} must have text or a list of blocks as its content, got {brief(content)}"
            raise BadRequestError(message, param)
        reader = {"text": self._part}
        return [by_type(block, reader, f"a block of {param}", param) for block in content]

    def add(self, role: str, content: Any) -> None:
        """Add what a message says; messages of one role are one turn."""
        if not isinstance(content, str | list):
            message = f"a message must have text or a list of blocks as its content, got {brief(content)}"
            raise BadRequestError(message, "messages")
        is_first = not self.messages or self.messages[-1]["role"] != "assistant"
        if role == "assistant" and is_first:
            self.messages.append({"role": role, "content": ""})
        if isinstance(content, str):
            self._append(role, content)
            return
        before = len(content)
        for block in content:
            by_type(block, self._readers[role], f"a block of the role {role}", "messages")
        if role != "assistant" and not before:
            raise BadRequestError("a message must have at least one block", "messages")

    def _part(self, block: Fields) -> Json:
        text: str = block.need("text", str)
        self._ignored |= block.skip("cache_control", "citations")
        return {"type": "text", "text": text}

    def _append(self, role: str, new: str | Json) -> None:
        """Add text, or a part, to the last message if it is of the same role."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        message = self.messages[-1]
        content = message["content"]
        if not content and isinstance(new, str):
            message["content"] = new
        else:
            message["content"] = [*_as_parts(content), *_as_parts([new] if isinstance(new, dict) else new)]

    def _text(self, role: str, block: Fields) -> None:
        self._append(role, self._part(block))

    def _tool_result(self, block: Fields) -> None:
        text = content_text(self.content(block.any("content") or "", "messages"))  # few templates read parts of results
        if block.take("is_error", bool):  # results of chats have no such mark
            text = f"Error: {text}"
        self.messages.append({"role": "tool", "tool_call_id": block.need("tool_use_id", str), "content": text})
        self._ignored |= block.skip("cache_control")

    def _tool_use(self, block: Fields) -> None:
        function = {"name": block.need("name", str), "arguments": json.dumps(block.need("input", dict))}
        call = {"id": block.need("id", str), "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        block.demand("caller", {"type": "direct"})
        self._ignored |= block.skip("cache_control")

    def _thinking(self, block: Fields) -> None:
        message = self.messages[-1]
        message["reasoning"] = message.get("reasoning", "") + block.need("thinking", str)
        block.skip("signature")  # nothing is signed here
