"""Chat messages: checks, and conversion of contents to the strings or lists that a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError, brief

Message = Mapping[str, Any]

_ROLE = re.compile(r"[\w.-]{1,64}")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ImagePart(dict[str, Any]):
    """Content part that stands for an image in a template's messages.

    Args:
        written: text that stands for it where a template reads no parts.

    Attributes:
        written: the same.
    """

    def __init__(self, written: str) -> None:
        super().__init__(type="image")
        self.written = written


class Parts(list[dict[str, Any]]):
    """List of a message's content parts that behaves like its text if a template treats it as text.

    Templates that read parts in some messages often print other contents directly, which would show Python's list
    notation to the model.
    """

    def __str__(self) -> str:
        return joined_text(self)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else list.__add__(self, other)

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        """Return a string method, such as `strip`."""
        return getattr(str(self), name)


def joined_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts in content parts as separate lines, like vLLM."""
    texts = (
        part.written if isinstance(part, ImagePart) else part.get("text") or part.get("thinking") or part.get("refusal")
        for part in parts
    )
    return "\n".join(text for text in texts if text)


def content_text(content: object) -> str:
    """Return the text in a valid message content, which is a string or a list of parts; empty for None."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return joined_text([part for part in content if isinstance(part, Mapping)])
    return content if isinstance(content, str) else ""


def plain_messages(
    messages: Sequence[Message], *, lists: bool = False, strings: bool = True, thinking: bool = False
) -> list[dict[str, Any]]:
    """Check messages, and return copies for a template, without None values, which it would print.

    Args:
        messages: dicts with role and content.
        lists: True to keep lists of parts; otherwise they become text.
        strings: False to turn a string content into a list.
        thinking: True to keep "thinking" parts; otherwise they become text parts.

    Raises:
        RequestError: not a list of dicts, a message without role or content, or a content that is not text.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(f"messages must be a non-empty list of dicts with role and content, got {brief(messages)}")
    plain = [_plain(message, thinking=thinking) for message in messages]
    for message in plain:
        content = message.get("content")
        if isinstance(content, Parts) and not lists:
            message["content"] = str(content)
        elif isinstance(content, str) and not strings:
            message["content"] = Parts([{"type": "text", "text": content}])
    return plain


def _plain(message: Message, *, thinking: bool) -> dict[str, Any]:
    """Check a message, and return a copy without None values, whose content is a string or `Parts`."""
    given = {name: value for name, value in message.items() if value is not None}
    role, name = given.get("role"), given.get("name")
    if not isinstance(role, str):
        raise RequestError(f"a message must have a role, which is a string, got {brief(dict(message))}")
    if not _ROLE.fullmatch(role):
        raise RequestError(
            f"the role of a message must be a word of at most 64 letters, digits, dots and dashes, got {brief(role)}"
        )
    if isinstance(name, str) and not name.isprintable():
        raise RequestError(f"the name in a message must have no line breaks and control characters, got {brief(name)}")
    if "content" in given:
        content = given["content"]
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise RequestError(f"a message's content must be a string or a list of text parts, got {brief(content)}")
        if not isinstance(content, str):
            given["content"] = Parts(_part(part, role, thinking=thinking) for part in content)
    elif role != "assistant" or not given.keys() - {"role", "name"}:  # an assistant may have called tools
        raise RequestError(f"a message must have content, a string or a list of text parts, got {brief(dict(message))}")
    return given


def _part(part: object, role: str, *, thinking: bool) -> dict[str, Any]:
    """Check a content part of a message with this role, and return it as a text part, or as "thinking" if kept."""
    if isinstance(part, ImagePart):
        return part
    if isinstance(part, str):
        return {"type": "text", "text": part}
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = given.get("type")
    if kind == "thinking" and role == "assistant" and isinstance(given.get("thinking"), str):
        return given if thinking else {"type": "text", "text": given["thinking"]}
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if kind == "refusal" and role != "assistant":
        raise RequestError(f"content parts of the type refusal must be of the assistant, got one of the role {role!r}")
    if field is None and isinstance(kind, str) and kind not in ("thinking", ""):
        raise RequestError(
            f'content parts must be {{"type": "text", "text": str}}, or images if the model takes them, got one of the '
            f"unsupported type {kind!r}; leave out images, audio and files"
        )
    if field is None or not isinstance(given.get(field), str):
        raise RequestError(
            'content parts must be {"type": "text", "text": str}, or images if the model takes them, got '
            f"{brief(part)}; leave out images, audio and files"
        )
    return given if kind == "text" else {**given, "type": "text", "text": given[field]}
