"""Translation of requests to OpenAI's /v1/responses into chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    ignored,
    needed,
    only,
)
from jaxserve.openai.format import CHAT_FIELDS
from jaxserve.openai.translation import CALLED_DIRECTLY, FUNCTION, SHARED_FIELDS, Translation, shared_values
from jaxserve.text.messages import content_text

RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
NAMES = {  # field names by their names in chats
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}

_SAME = ("parallel_tool_calls", "stop", "include_reasoning")
_LEFT_OUT = {  # tools that no model here can call; coding agents send them with every request
    *("web_search", "web_search_preview", "image_generation", "code_interpreter", "file_search", "mcp", "tool_search"),
    *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "custom", "namespace"),
}
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_NOT_STORED = "responses are not stored; send the earlier items in input"
_FIELDS: ObjectFields = {
    **SHARED_FIELDS,
    **{name: CHAT_FIELDS[name] for name in _SAME},
    **each(IGNORED, "user", "safety_identifier", "client_metadata"),
    "max_tool_calls": IGNORED,  # the server runs no tools
    "service_tier": ignored(only("auto", "default")),
    "store": ignored(only(False, why=_NOT_STORED)),
    "background": only(False, why=_NOT_STORED),
    **each(only(why=_NOT_STORED), "previous_response_id", "conversation"),
    "prompt": only(why="there are no stored prompts; send their text in input"),
    "metadata": replace(OBJECT, is_kept=False),  # part of the reply
    "truncation": choice("disabled", "auto"),
    "max_output_tokens": ANY,
    "enable_response_messages": SWITCH,
    "instructions": TEXT,
    "input": ANY,
    "tools": LIST,
    "tool_choice": ANY,
    "include": LIST,
    "top_logprobs": INTEGER,
    **each(OBJECT, "stream_options", "text", "reasoning"),
}
_STREAM_OPTIONS: ObjectFields = {"include_obfuscation": DROPPED}
_TEXT: ObjectFields = {"verbosity": IGNORED, "format": OBJECT}
_REASONING: ObjectFields = {
    "effort": TEXT,
    **each(IGNORED, "summary", "generate_summary"),
    "context": only("auto", "all_turns"),
    "mode": only("standard"),
}
_FORMATS: Mapping[str, ObjectFields] = {
    "text": {},
    "json_object": {},
    "json_schema": {"name": needed(TEXT), "schema": needed(OBJECT), "strict": SWITCH, "description": TEXT},
}
_TOOL = {
    "function": {
        **each(TEXT, "name", "description"),
        "parameters": OBJECT,
        **FUNCTION,
        "output_schema": DROPPED,  # the caller's function makes the output
    }
}
_NAMED = {"function": {"name": needed(TEXT)}}
_CHOICES = {**_NAMED, "allowed_tools": {"tools": needed(LIST), "mode": needed(TEXT)}}
_ITEM = each(DROPPED, "id", "status")
_ITEMS: Mapping[str, ObjectFields] = {
    "message": {
        **_ITEM,
        "phase": DROPPED,
        "role": needed(choice("user", "assistant", "system", "developer")),
        "content": ANY,
    },
    "reasoning": {
        **_ITEM,
        "content": LIST,
        "summary": LIST,
        "encrypted_content": only(why="it cannot be read here; send reasoning as reasoning_text"),
    },
    "function_call": {**_ITEM, **CALLED_DIRECTLY, **each(needed(TEXT), "name", "arguments", "call_id")},
    "function_call_output": {**_ITEM, **CALLED_DIRECTLY, "name": DROPPED, "call_id": needed(TEXT), "output": ANY},
}
_TEXT_PART: ObjectFields = {"text": needed(TEXT), **each(DROPPED, "annotations", "logprobs", "prompt_cache_breakpoint")}
_PARTS: Mapping[str, ObjectFields] = {
    "input_image": {
        "image_url": needed(TEXT),
        "detail": IGNORED,
        "file_id": only(why="there are no uploaded images; send a data: URL in image_url"),
        "prompt_cache_breakpoint": DROPPED,
    },
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), _TEXT_PART),
    "refusal": {"refusal": needed(TEXT)},
}
_TEXT_PARTS = {name: fields for name, fields in _PARTS.items() if name != "input_image"}


def response_to_chat(body: Json) -> Translation:
    """Translate a request to /v1/responses into a chat request.

    Raises:
        BadRequestError: the request asks for an unsupported feature; the error names the field.
    """
    reader = BodyReader()
    given = reader.read(body, _FIELDS)
    if options := given.get("stream_options", {}):
        reader.read(options, _STREAM_OPTIONS, "stream_options", "stream_options")
        reader.ignored.add("stream_options")
    chat = shared_values(given) | {name: given[name] for name in _SAME if name in given}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if given.get("enable_response_messages"):
        chat["return_prompt_text"] = True
    chat["messages"] = _messages(reader, given.get("instructions"), given.get("input"))
    if tools := _called_tools(given.get("tools", []), reader, "tools"):
        chat["tools"] = _chat_tools(tools, _TOOL, reader, "tools")
    if "tool_choice" in given:
        chat["tool_choice"] = _tool_choice(given["tool_choice"], reader)
    text = reader.read(given.get("text", {}), _TEXT, "text", "text", "text.")
    name, form = reader.read_variant(text.get("format", {"type": "text"}), _FORMATS, "text.format", "text")
    chat["response_format"] = {"type": name, "json_schema": form} if form else {"type": name}
    reasoning = reader.read(given.get("reasoning", {}), _REASONING, "reasoning", "reasoning", "reasoning.")
    if "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    _read_logprobs(chat, given.get("include", []), given.get("top_logprobs"), reader.ignored)
    return Translation(chat, frozenset(reader.ignored), drops_turns=given.get("truncation") == "auto")


def _read_logprobs(chat: Json, include: Sequence[Any], num_top: int | None, ignored_fields: set[str]) -> None:
    """Set a chat's `logprobs` fields from a request's `include` and `top_logprobs`; add ignored fields to the set."""
    for wanted in include:
        if wanted not in (_LOGPROBS, _ENCRYPTED):
            message = f"include must be of {[_LOGPROBS, _ENCRYPTED]}, got {brief(wanted)}"
            raise BadRequestError(message, "include", "unsupported_value")
    if _ENCRYPTED in include:  # reasoning is sent as text, which clients may send back
        ignored_fields.add("include")
    if _LOGPROBS in include or num_top:
        if chat.get("tools") and chat.get("tool_choice") != "none":
            message = f"{_LOGPROBS} cannot be had with tools, as not all tokens are of the text; use a chat"
            raise BadRequestError(message, "include", "unsupported_value")
        chat |= {"logprobs": True, "top_logprobs": num_top or 0}


def _called_tools(tools: Sequence[Any], reader: BodyReader, prefix: str) -> list[Any]:
    """Return the tools that the model can call; add the types of the others to `reader.ignored`, as `prefix.type`."""
    called = []
    for tool in tools:
        name = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(name, str) and name in _LEFT_OUT:
            reader.ignored.add(f"{prefix}.{name}")
        else:
            called.append(tool)
    return called


def _chat_tools(
    tools: Sequence[Any], variants: Mapping[str, ObjectFields], reader: BodyReader, param: str
) -> list[Json]:
    """Check a request's tools, and return them in OpenAI's chat format.

    Args:
        tools: tools that the model can call.
        variants: declared fields by tool type.
        reader: reader that checks the fields.
        param: request field that holds the tools, for error messages.
    """
    where = "a tool" if param == "tools" else f"a tool of {param}"
    read = (reader.read_variant(tool, variants, where, param)[1] for tool in tools)
    return [{"type": "function", "function": function} for function in read]


def _tool_choice(given: Any, reader: BodyReader) -> Any:
    """Return a request's `tool_choice` in OpenAI's chat format."""
    if isinstance(given, str):
        return given
    name, choice = reader.read_variant(given, _CHOICES, "tool_choice", "tool_choice")
    if name == "function":
        return {"type": "function", "function": choice}
    allowed = _called_tools(choice["tools"], reader, "tool_choice")
    if choice["tools"] and not allowed and choice["mode"] == "auto":  # no tool is left
        return "none"
    tools = _chat_tools(allowed, _NAMED, reader, "tool_choice")
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def _messages(reader: BodyReader, instructions: str | None, given: Any) -> list[Json]:
    """Return the chat messages for a request's `instructions` and its `input`, which is text or a list of items."""
    turns = _Turns(reader)
    if instructions:
        turns.add("system", instructions)
    if isinstance(given, str):
        turns.add("user", given)
    elif isinstance(given, list):
        for item in given:
            turns.add_item(*reader.read_variant(item, _ITEMS, "an item of input", "input", default="message"))
    else:
        raise BadRequestError(f"input must be text or a list of items, got {brief(given)}", "input")
    if not turns.messages:
        raise BadRequestError("input must have at least one item", "input")
    return turns.messages


class _Turns:
    """Builder of a chat's messages from input items; reasoning, text and tool calls in one turn are one message.

    Args:
        reader: reader that checks content parts.

    Attributes:
        messages: the chat's messages so far.
    """

    def __init__(self, reader: BodyReader) -> None:
        self.messages: list[Json] = []
        self._reader = reader

    def add(self, role: str, content: str | list[Json]) -> None:
        """Add a message; join system messages at the beginning, since chat templates accept only one."""
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            both = self.messages[0]["content"], content
            self.messages[0]["content"] = "\n\n".join(map(content_text, both))
        else:
            self.messages.append({"role": role, "content": content})

    def add_item(self, name: str, item: Json) -> None:
        """Add an input item of the type `name`; all its fields are checked except its content parts."""
        match name:
            case "message" if item["role"] == "assistant":
                self._turn("content", "tool_calls")["content"] = self._content(item.get("content"))
            case "message":
                self.add("user" if item["role"] == "user" else "system", self._content(item.get("content")))
            case "reasoning":
                if text := self._text(item.get("content") or item.get("summary", [])):
                    self._turn("reasoning", "content", "tool_calls").update({"reasoning": text, "content": ""})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                turn = self._turn()
                turn.setdefault("content", None)
                call = {"id": item["call_id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = self._text(item.get("output"))  # few templates read parts of results
                self.messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})

    def _turn(self, *later: str) -> Json:
        """Return the last message if it is the assistant's and has none of the fields `later`, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(part) for part in later):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _text(self, content: Any) -> str:
        """Return the content of an input item as text; BadRequestError if it has images."""
        return content_text(self._content(content, _TEXT_PARTS))

    def _content(self, content: Any, parts: Mapping[str, ObjectFields] = _PARTS) -> str | list[Json]:
        """Return the content of an input item, text or a list of some `parts`, as the content of a chat message."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise BadRequestError(f"a content must be text or a list of parts, got {brief(content)}", "input")
        read = (self._reader.read_variant(part, parts, "a part of a content", "input") for part in content)
        return [_chat_part(kind, value) for kind, part in read for value in part.values()]


def _chat_part(kind: str, value: str) -> Json:
    """Return a content part of the type `kind`, whose text or URL is `value`, as a part of a chat message."""
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": value}}
    return {"type": "text", "text": value}
