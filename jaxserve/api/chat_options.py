"""Chat options for all requests to an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxserve.api.schema import one_of
from jaxserve.errors import ConfigError

CONTENT_FORMAT = one_of(("auto", "string", "openai"))
_JINJA_CHARS = "{}\n"  # a text without any of them is a path


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Chat template, and format of the message contents for it.

    Attributes:
        template: Jinja source of the template for all chats; None leaves the choice to the tokenizer.
        content_format: format of contents for templates, a CONTENT_FORMAT.
        special_tokens_as_text: True to encode special tokens in messages as text.

    Raises:
        ConfigError: there is no such format.
    """

    template: str | None = None
    content_format: str = "auto"
    special_tokens_as_text: bool = False

    def __post_init__(self) -> None:
        CONTENT_FORMAT.read("chat_template_content_format", self.content_format, ConfigError)


DEFAULT_CHAT_OPTIONS = ChatOptions()


def read_template(given: str | os.PathLike[str]) -> str:
    """Return a template's source: the text of a file, or the given Jinja text.

    Raises:
        ConfigError: it is neither a readable file nor Jinja.
    """
    text = os.fspath(given)
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a long text is no valid file name
        if not isinstance(given, str) or not any(char in text for char in _JINJA_CHARS):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"chat_template must be a file or the text of a template, got {text!r}: {reason}"
            ) from error
        return text
