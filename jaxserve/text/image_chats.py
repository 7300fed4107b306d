"""Chats with images: messages without them for a template, and the rendered chat as an expanded prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxserve.errors import RequestError, brief, did_you_mean
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.prepared import EncodedPrompt, ExpandedPrompt
from jaxserve.images.reader import ImageReader
from jaxserve.text.chat_template import RenderedChat
from jaxserve.text.messages import ImagePart, Message
from jaxserve.text.tokenizer import Tokenizer

# Fields of a part that have its image, by its type: transformers', OpenAI's and vLLM's
_TYPES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "url"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
}
_OTHERS = {"type", "uuid", "detail", "cache_control"}
_URL_FIELDS = {"url", "detail"}


class SplitChat(NamedTuple):
    """Chat whose images are apart.

    Attributes:
        messages: messages with a stand-in for each image.
        inputs: the images in order.
        ignored: fields of images that have no effect.
    """

    messages: list[Message]
    inputs: ImageInputs
    ignored: set[str]


def is_image(part: object) -> bool:
    """Return whether a content part stands for an image, or claims to."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _TYPES


def split_images(
    messages: Sequence[Message], reader: ImageReader | None, adjusted: Mapping[str, Any] | None = None
) -> SplitChat:
    """Return messages with a stand-in for each image, and the images in order.

    Args:
        messages: dicts with role and content; other values stay, for the check of messages to refuse.
        reader: the model's image reader; None if it takes no images, whose parts then stay, too.
        adjusted: `mm_processor_kwargs`.

    Raises:
        RequestError: a part for an image has none, or several, or other fields that are unknown.
    """
    if reader is None:
        return SplitChat(list(messages), ImageInputs(), set())
    written, found = reader.placeholders.written, _FoundImages()

    def split(message: Message) -> Message:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str | bytes):
            return message
        return {**message, "content": [ImagePart(written) if found.takes(part) else part for part in content]}

    without = [split(message) for message in messages]
    return SplitChat(without, ImageInputs(found.images, found.names, adjusted or {}), found.ignored)


@dataclass
class _FoundImages:
    """Images in the content parts of a chat.

    Attributes:
        images: images so far, as `ImageInputs` has them.
        names: their names, likewise.
        ignored: fields without effect.
    """

    images: list[Any] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)

    def takes(self, part: Any) -> bool:
        """Add the image of a part, and return True; False if it is a part of another type."""
        if not is_image(part):
            return False
        given = {name: value for name, value in part.items() if value is not None}
        fields = _TYPES[part["type"]]
        _check_known(given, {*fields, *_OTHERS}, "a content part with an image")
        images = [given[name] for name in fields if name in given]
        if len(images) == 1 and isinstance(images[0], Mapping):
            _check_known(images[0], _URL_FIELDS, "image_url of a content part")
            given = {**given, **images[0]}
            images = [images[0]["url"]] if images[0].get("url") is not None else []
        name = given.get("uuid")
        if name is not None and not isinstance(name, str):
            raise RequestError(f"uuid of a content part must be a string, got {brief(name)}")
        if len(images) > 1 or not (images or name):
            raise RequestError(
                'content parts with an image must be {"type": "image_url", "image_url": {"url": str}}, or have the '
                f"image itself in image_pil, or only the uuid of one that was sent before, got {brief(part)}"
            )
        self.images.append(images[0] if images else None)
        self.names.append(name)
        if given.get("detail") not in (None, "auto"):
            self.ignored.add("detail")
        return True


def _check_known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise RequestError if an object has unknown fields."""
    if unknown := sorted(str(name) for name in given.keys() - known):
        raise RequestError(
            f"unsupported fields {brief(unknown)} in {where}{did_you_mean(unknown, known)}; supported are "
            f"{sorted(known)}"
        )


def encode_placeholders(
    tokenizer: Tokenizer,
    chat: RenderedChat,
    reader: ImageReader | None,
    inputs: ImageInputs,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return a rendered chat's token ids, with one placeholder per image; arguments as for `encode_chat`."""
    if reader is not None and inputs.images:
        in_text = reader.placeholders.in_text

        def encode(counts: Sequence[int] = ()) -> list[int]:
            given = RenderedChat(in_text(chat.text, counts, chat.marked), in_text(chat.marked, counts))
            return tokenizer.encode_chat(given, add_special_tokens)

        return EncodedPrompt(encode(), encode)
    return tokenizer.encode_chat(chat, add_special_tokens)


def encode_chat(
    tokenizer: Tokenizer,
    chat: RenderedChat,
    reader: ImageReader | None,
    inputs: ImageInputs,
    namespace: str = "",
    check_len: Callable[[int], None] = lambda num_tokens: None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return a rendered chat's token ids, expanded for its images.

    Args:
        tokenizer: the model's tokenizer.
        chat: rendered messages, from `split_images`.
        reader: the model's image reader; None if it takes no images.
        inputs: images in order.
        namespace: see `ImageReader.expand`.
        check_len: see `ImageReader.expand`.
        add_special_tokens: True to add the model's special tokens around the chat.

    Raises:
        RequestError: an image cannot be read, or the template has not written one placeholder per image.
    """
    token_ids = encode_placeholders(tokenizer, chat, reader, inputs, add_special_tokens=add_special_tokens)
    if reader is None:
        return token_ids
    return ExpandedPrompt(*reader.expand(token_ids, inputs, namespace, check_len))
