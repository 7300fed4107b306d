"""Chats with images: messages without them for a template, and the rendered chat as an expanded prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError, brief
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.prepared import ExpandedPrompt
from jaxserve.images.reader import ImageReader
from jaxserve.text.chat_template import RenderedChat
from jaxserve.text.messages import ImagePart, Message
from jaxserve.text.tokenizer import Tokenizer

_TYPES = ("image", "image_url", "input_image", "image_pil")
_FIELDS = ("image_url", "image_pil", "image", "url")


def is_image(part: object) -> bool:
    """Return whether a content part stands for an image, or claims to."""
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def split_images(messages: Sequence[Message], reader: ImageReader) -> tuple[list[Message], list[Any]]:
    """Return messages with a stand-in for each image, and the images in order.

    Args:
        messages: dicts with role and content; other values stay, for the check of messages to refuse.
        reader: the model's image reader.

    Raises:
        RequestError: a part for an image has none, or several.
    """
    images: list[Any] = []

    def stand_in(part: Any) -> Any:
        if not is_image(part):
            return part
        images.append(_image(part))
        return ImagePart(reader.placeholders.written)

    def split(message: Message) -> Message:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str | bytes):
            return message
        return {**message, "content": [stand_in(part) for part in content]}

    return [split(message) for message in messages], images


def _image(part: Mapping[str, Any]) -> Any:
    """Return the image in a part: a URL or an image itself; RequestError unless it has exactly one."""
    given = [part[name] for name in _FIELDS if part.get(name) is not None]
    image = given[0].get("url") if len(given) == 1 and isinstance(given[0], Mapping) else (given or [None])[0]
    if len(given) != 1 or image is None:
        raise RequestError(
            'content parts with an image must be {"type": "image_url", "image_url": {"url": str}}, or have the image '
            f"itself in image_pil, got {brief(part)}"
        )
    return image


def encode_chat(
    tokenizer: Tokenizer,
    chat: RenderedChat,
    reader: ImageReader | None,
    images: Sequence[Any],
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return a rendered chat's token ids, expanded for its images.

    Args:
        tokenizer: the model's tokenizer.
        chat: rendered messages, from `split_images`.
        reader: the model's image reader; None if it takes no images.
        images: images in order.
        add_special_tokens: True to add the model's special tokens around the chat.

    Raises:
        RequestError: an image cannot be read, or the template has not written one placeholder per image.
    """
    if reader is None:
        return tokenizer.encode_chat(chat, add_special_tokens)
    if images:
        in_text = reader.placeholders.in_text
        chat = RenderedChat(in_text(chat.text, chat.marked), in_text(chat.marked))
    token_ids = tokenizer.encode_chat(chat, add_special_tokens)
    return ExpandedPrompt(*reader.expand(token_ids, ImageInputs(images, [None] * len(images))))
