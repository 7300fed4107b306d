"""Translation of requests to Anthropic's /v1/messages and /v1/messages/count_tokens to chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError, Json
from jaxserve.openai.fields import (
    ANY,
    DROPPED,
    IGNORED,
    INTEGER,
    LIST,
    OBJECT,
    SWITCH,
    TEXT,
    BodyReader,
    ObjectFields,
    choice,
    each,
    needed,
    only,
)
from jaxserve.openai.reuse_hints import CACHE_CONTROL, cache_options
from jaxserve.openai.translation import CALLED_DIRECTLY, FUNCTION, SHARED_FIELDS, Translation, shared_values
from jaxserve.text.messages import content_text

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
NAMES = {  # field names by their names in chats
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt", "priority", "chat_template_kwargs")
_COUNTED: ObjectFields = {
    **{name: SHARED_FIELDS[name] for name in _SAME},
    # context_management leaves out earlier turns, or reasoning in them; the chat here is only longer
    **each(IGNORED, "service_tier", "user_profile_id", "workspace_id"),
    "metadata": OBJECT,
    "cache_control": CACHE_CONTROL,
    **each(IGNORED, "inference_geo", "diagnostics", "context_management", "betas"),
    "mcp_servers": only([], why="the server runs no tools"),
    "speed": only("standard"),
    "container": only(why="there are no containers"),
    "system": ANY,
    "messages": needed(LIST),
    "tools": LIST,
    "tool_choice": OBJECT,
    "output_config": OBJECT,
    "thinking": OBJECT,
}
_FIELDS: ObjectFields = {**SHARED_FIELDS, **_COUNTED, "max_tokens": needed(INTEGER), "stop_sequences": LIST}
_CACHED: ObjectFields = {"cache_control": CACHE_CONTROL}
_METADATA: ObjectFields = {"user_id": TEXT}
_TOOL: ObjectFields = {
    **FUNCTION,
    **_CACHED,
    **each(IGNORED, "eager_input_streaming", "input_examples"),
    "input_schema": needed(OBJECT),
}
_TOOL_CHOICES: Mapping[str, ObjectFields] = {
    **{key: {"disable_parallel_tool_use": SWITCH} for key in ("auto", "any")},
    "tool": {"name": needed(TEXT), "disable_parallel_tool_use": SWITCH},
    "none": {},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OUTPUT_CONFIG: ObjectFields = {"effort": TEXT, "format": OBJECT}
_FORMATS = {"json_schema": {"schema": needed(OBJECT)}}
_THINKING = dict.fromkeys(("enabled", "adaptive", "disabled"), dict.fromkeys(("budget_tokens", "display"), IGNORED))
_TEXT_BLOCK: ObjectFields = {"text": needed(TEXT), "citations": IGNORED, **_CACHED}
_IMAGE_BLOCK: ObjectFields = {"source": needed(OBJECT), **_CACHED}
_SOURCES: Mapping[str, ObjectFields] = {
    "base64": {"media_type": needed(TEXT), "data": needed(TEXT)},
    "url": {"url": needed(TEXT)},
}
_BLOCKS: Mapping[str, Mapping[str, ObjectFields]] = {  # keys are roles
    "user": {
        "text": _TEXT_BLOCK,
        "image": _IMAGE_BLOCK,
        "tool_result": {"content": ANY, "is_error": SWITCH, "tool_use_id": needed(TEXT), **_CACHED},
    },
    "assistant": {
        "text": _TEXT_BLOCK,
        "tool_use": {"id": needed(TEXT), "name": needed(TEXT), "input": needed(OBJECT), **CALLED_DIRECTLY, **_CACHED},
        "thinking": {"thinking": needed(TEXT), "signature": DROPPED},  # nothing is signed here
    },
    "system": {"text": _TEXT_BLOCK},
}
_MESSAGE: ObjectFields = {"role": needed(choice(*_BLOCKS)), "content": ANY}


def message_to_chat(body: Json, *, has_output: bool = True) -> Translation:
    """Translate a request to /v1/messages to a chat.

    Args:
        body: body of the request.
        has_output: False for a request to /v1/messages/count_tokens.

    Raises:
        BadRequestError: the request asks for an unsupported feature; it names the field.
    """
    reader = BodyReader()
    given = reader.read(body, _FIELDS if has_output else _COUNTED)
    chat = cache_options(body, reader) | shared_values(given)
    if user_id := reader.read(given.get("metadata", {}), _METADATA, "metadata", "metadata").get("user_id"):
        chat.setdefault("session_id", user_id)  # coding agents put the session's name there
    if has_output:
        chat["max_tokens"] = given["max_tokens"]
        if "stop_sequences" in given:
            chat["stop"] = given["stop_sequences"]
    turns = _Turns(reader)
    if "system" in given and (content := turns.content(given["system"], "system")):
        turns.messages.append({"role": "system", "content": content})
    if _read_messages(given["messages"], turns, reader) == "assistant":  # the reply begins with its text
        chat["continue_final_message"] = True
    chat["messages"] = turns.messages
    if tools := given.get("tools"):
        chat["tools"] = [_tool(tool, reader) for tool in tools]
    if "tool_choice" in given:
        name, choice = reader.read_variant(given["tool_choice"], _TOOL_CHOICES, "tool_choice", "tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _CHOICES.get(name, named)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    names = {"continue_final_message": "messages"}
    config = reader.read(given.get("output_config", {}), _OUTPUT_CONFIG, "output_config", "output_config")
    if "effort" in config:
        chat["reasoning_effort"] = config["effort"]
    if "format" in config:
        _, form = reader.read_variant(config["format"], _FORMATS, "output_config.format", "output_config")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", **form}}
    # Reasoning that is wanted changes nothing: models reason if they can.
    if "thinking" in given and (
        reader.read_variant(given["thinking"], _THINKING, "thinking", "thinking", prefix="thinking.")[0] == "disabled"
    ):
        chat |= {"reasoning_effort": "none", "include_reasoning": False}
        names["reasoning_effort"] = "thinking"
    return Translation(chat, frozenset(reader.ignored), names)


def _read_messages(messages: list[Any], turns: _Turns, reader: BodyReader) -> str:
    """Add a request's `messages` to `turns`; return the last one's role."""
    role = ""
    for message in messages:
        given = reader.read(message, _MESSAGE, "a message", "messages")
        role = given["role"]
        turns.add(role, given.get("content"))
    if role == "assistant" and (turns.messages[-1].get("tool_calls") or not turns.messages[-1]["content"]):
        message = "a last message of the assistant must have text, with which the reply begins, and no tool calls"
        raise BadRequestError(message, "messages", "unsupported_value")
    return role


def _tool(tool: Any, reader: BodyReader) -> Json:
    """Return an Anthropic tool in OpenAI's chat format."""
    _, function = reader.read_variant(tool, {"custom": _TOOL}, "a tool", "tools", default="custom", prefix="tools.")
    first = {"name": function.pop("name"), "parameters": function.pop("input_schema")}
    return {"type": "function", "function": first | function}


def _as_parts(content: str | list[Json]) -> list[Json]:
    """Return a chat message's content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


class _Turns:
    """Builder of a chat's messages from Anthropic's messages with content blocks.

    Args:
        reader: reader that checks the blocks.

    Attributes:
        messages: the chat's messages so far.
    """

    def __init__(self, reader: BodyReader) -> None:
        self.messages: list[Json] = []
        self._reader = reader

    def content(self, content: Any, param: str) -> str | list[Json]:
        """Return text, or a list of text blocks in the field `param`, as a chat message's content."""
        if isinstance(content, str):
            return content
        return [
            {"type": "text", "text": block["text"]}
            for _, block in self._blocks(content, _BLOCKS["system"], f"a block of {param}", param)
        ]

    def _blocks(
        self, content: Any, variants: Mapping[str, ObjectFields], where: str, param: str
    ) -> Iterator[tuple[str, Json]]:
        """Yield the type and the fields of each block in a content; arguments as in `BodyReader.read_variant`."""
        if not isinstance(content, list):
            message = f"{param} must have text or a list of blocks as its content, got {brief(content)}"
            raise BadRequestError(message, param)
        return (self._reader.read_variant(block, variants, where, param) for block in content)

    def add(self, role: str, content: Any) -> None:
        """Add an Anthropic message; adjacent messages with the same role become one chat message."""
        if role == "assistant" and (not self.messages or self.messages[-1]["role"] != "assistant"):
            self.messages.append({"role": role, "content": ""})
        if isinstance(content, str):
            self._append(role, content)
            return
        for name, block in self._blocks(content, _BLOCKS[role], f"a block of the role {role}", "messages"):
            self._add_block(role, name, block)
        if role != "assistant" and not content:
            raise BadRequestError("a message must have at least one block", "messages")

    def _add_block(self, role: str, name: str, block: Json) -> None:
        """Add a content block with the type `name`: tool results as a new message, others to the last one."""
        turn = self.messages[-1] if self.messages else {}
        match name:
            case "text":
                self._append(role, {"type": "text", "text": block["text"]})
            case "image":
                self._append(role, {"type": "image_url", "image_url": {"url": self._url(block["source"])}})
            case "tool_result":
                text = content_text(self.content(block.get("content", ""), "messages"))  # few templates read parts
                if block.get("is_error"):  # chats have no such field
                    text = f"Error: {text}"
                self.messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
            case "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                call = {"id": block["id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "thinking":
                turn["reasoning"] = turn.get("reasoning", "") + block["thinking"]

    def _url(self, source: Json) -> str:
        """Return the URL of an image block's source."""
        name, given = self._reader.read_variant(source, _SOURCES, "the source of an image", "messages")
        return str(given["url"] if name == "url" else f"data:{given['media_type']};base64,{given['data']}")

    def _append(self, role: str, new: str | Json) -> None:
        """Add text or a content part to the last message, or to a new one if the last has another role."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        message = self.messages[-1]
        content = message["content"]
        if not content and isinstance(new, str):
            message["content"] = new
        else:
            message["content"] = [*_as_parts(content), *_as_parts([new] if isinstance(new, dict) else new)]
