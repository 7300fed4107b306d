"""BodyContext: the served model and the options with which bodies are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from jaxserve.api.pooling_params import Pooler
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.images.reader import ImageReader
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.errors import BadRequestError, Json
from jaxserve.text.tokenizer import Tokenizer


def allow_any(given: object) -> None:
    """Accept everything: the check of prompts whose length does not matter."""


def as_given(salt: str | None) -> str | None:
    """Return a body's cache salt, if callers have none of their own."""
    return salt


@dataclass(frozen=True, slots=True)
class BodyContext:
    """Served model and options with which bodies are read.

    Attributes:
        default_name: model name for requests without one.
        model_names: accepted values of `model`; if empty, any name is accepted.
        tokenizer: tokenizer of texts and chats; None if prompts are token ids.
        defaults: the checkpoint's recommended parameters, for all missing fields except the length.
        may_stream: False if nobody receives a stream, as in a batch file.
        chat_format: the model's chat format; None to detect it in the chat templates.
        check_prompt: function that raises RequestError for a text that is too long, before it is encoded.
        check_len: function that raises RequestError for a number of prompt tokens that is too large; it is called
            between the images of a chat.
        salt: function from a body's cache salt to the caller's.
        response_role: role of new messages in chats.
        takes_templates: False to refuse chat templates in bodies.
        max_model_len: maximum for `max_tokens`, see `check_output_len`; None for no limit.
        pooler: pooling of the model; None if it generates text.
        max_prompts: maximum number of scored pairs; they are counted before any is encoded.
        adapters: names of LoRA adapters, which `model` may have too; they may change while serving.
        images: reader of images in chats; None if they can have none.
    """

    default_name: str
    model_names: Sequence[str] = ()
    tokenizer: Tokenizer | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)
    _: KW_ONLY
    may_stream: bool = False
    chat_format: ChatFormat | None = None
    check_prompt: Callable[[str], None] = allow_any
    check_len: Callable[[int], None] = allow_any
    salt: Callable[[str | None], str | None] = as_given
    response_role: str = "assistant"
    takes_templates: bool = True
    max_model_len: int | None = None
    pooler: Pooler | None = None
    max_prompts: int = 1024
    adapters: Collection[str] = ()
    images: ImageReader | None = None

    def needed_tokenizer(self, name: str) -> Tokenizer:
        """Return the tokenizer; if there is none, raise BadRequestError for the field `name` that needs it."""
        if self.tokenizer is None:
            message = f"{name} needs a tokenizer, and the engine runs with skip_tokenizer_init"
            raise BadRequestError(message, name)
        return self.tokenizer

    def text_check(self, given: Json) -> Callable[[str], None]:
        """Return the function that checks the length of a body's prompts; prompts to truncate may have any length."""
        return self.check_prompt if given.get("truncate_prompt_tokens") is None else allow_any
