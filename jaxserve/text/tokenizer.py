"""Tokenizer: text and chats to token ids, and back."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, overload

from jaxserve.api.chat_options import CONTENT_FORMAT, DEFAULT_CHAT_OPTIONS, ChatOptions
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.chat_template import ChatTemplate, RenderedChat
from jaxserve.text.literal_text import LiteralText
from jaxserve.text.messages import Message
from jaxserve.text.token_bound import TokenBound
from jaxserve.text.token_stream import ByteTable

MAX_COMPILED_TEMPLATES = 32


@dataclass(eq=False)
class Tokenizer:
    """A model's tokenizer, with its chat template and special tokens.

    Attributes:
        encode_valid: function from a valid text, and whether to add special tokens, to its token ids.
        decode_ids: function from token ids, and whether to skip special tokens, to their text.
        vocab_size: number of ids, including added tokens; the model's embedding may have more rows.
        special_tokens: name ("bos_token", ...) -> text; chat template variables.
        special_ids: ids that `decode` leaves out when it skips special tokens.
        bos_token_id: first token in a sequence, if the model has one.
        eos_token_ids: ids that end a sequence: from the tokenizer, then from `generation_config.json`.
        chat_template: template name -> Jinja source; "default" is the one for plain chats.
        piece: function from a token id to its vocabulary entry; None for unknown ids.
        encode_pair: function from two texts to the token ids of one prompt.
        chat_options: chat options; a template among them replaces all others.
        literal: chat encoder that keeps special tokens in contents as text; None if they become special tokens.
        byte_table: bytes by token id; None if the decoder does more than concatenate them.
        vocabulary: function that returns the ids by token.
        json_text: function that returns the text of `tokenizer.json`; None if the tokenizer has no such representation.
        new_bound: function that returns the lower bound on the number of tokens in a text.
        find_spans: function for `spans`; None to compute them from the tokens' texts.
        token_text: token id -> its text in isolation, including special tokens; decodes each id once.
    """

    encode_valid: Callable[[str, bool], TokenIds]
    decode_ids: Callable[[Sequence[int], bool], str]
    _: KW_ONLY
    vocab_size: int
    special_tokens: dict[str, str]
    special_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: dict[str, str]
    piece: Callable[[int], str | None]
    encode_pair: Callable[[str, str], TokenIds]
    chat_options: ChatOptions = DEFAULT_CHAT_OPTIONS
    literal: LiteralText | None = None
    byte_table: ByteTable | None = None
    vocabulary: Callable[[], dict[str, int]] = dict
    json_text: Callable[[], str] | None = None
    new_bound: Callable[[], TokenBound] = TokenBound
    find_spans: Callable[[str], tuple[TokenIds, list[tuple[int, int]]]] | None = None
    token_text: Callable[[int], str] = field(init=False)

    def __post_init__(self) -> None:
        self.token_text = _TokenTexts(self.decode_ids).__getitem__
        self._compiled: dict[str, ChatTemplate] = {}
        if (given := self.chat_options.template) is not None:
            self.chat_template = {"default": given}
            try:
                self._template(given)
            except RequestError as error:
                raise ConfigError(str(error)) from error

    @functools.cached_property
    def bound(self) -> TokenBound:
        """Lower bound on the number of tokens in a text."""
        return self.new_bound()

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None, *, keeps_first: bool = False
    ) -> TokenIds:
        """Return the token ids of `text`, at most `max_tokens` of them.

        Args:
            text: text to tokenise.
            add_special_tokens: True to add the model's special tokens around a prompt, usually a BOS.
            max_tokens: maximum number of tokens, including special ones; a longer text keeps its last tokens.
            keeps_first: True if a longer text keeps its first tokens instead.

        Raises:
            RequestError: `text` is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a prompt must be valid Unicode, got a lone surrogate at index {error.start}") from None
        token_ids = self.encode_valid(text, add_special_tokens)
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        plain = self.encode_valid(text, False) if add_special_tokens else token_ids
        first, last = kept_parts(token_ids, plain, max_tokens, keeps_first=keeps_first)
        return token_ids[first] + token_ids[last]

    def spans(self, text: str) -> tuple[TokenIds, list[tuple[int, int]]]:
        """Return the token ids of `text`, including special ones, and the (begin, end) of each token's characters."""
        if self.find_spans is not None:
            return self.find_spans(text)
        token_ids = self.encode(text)
        lengths = [0 if i in self.special_ids else len(self.token_text(i)) for i in token_ids]
        ends = [min(end, len(text)) for end in itertools.accumulate(lengths)]
        return token_ids, list(zip([0, *ends[:-1]], ends, strict=True))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are ignored."""
        return self.decode_ids(token_ids, skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False] = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[True],
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> TokenIds: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | TokenIds:
        """Render a chat with the model's template; return text, as `transformers` does with `tokenize=False`.

        Args:
            messages: dicts with a "role" and usually "content", a string or a list of {"type": "text"} parts; they
                become lines in one text unless the template reads lists.
            add_generation_prompt: True to end with the header of the assistant's turn.
            tokenize: True to return the token ids instead.
            chat_template: Jinja source, or the name of one of the tokenizer's templates.
            tools: JSON schemas for functions that the model may call.
            continue_final_message: True to end with the last message's content, so that the model continues it; not
                with `add_generation_prompt`.
            variables: further template variables, such as `enable_thinking`.

        Raises:
            RequestError: there is no template, it refuses the messages, or it has no such variable.
        """
        given = variables | ({"tools": tools} if tools else {}) | {"add_generation_prompt": add_generation_prompt}
        chat = self.render_chat(messages, given, chat_template, continue_final_message=continue_final_message)
        return self.encode_chat(chat) if tokenize else chat.text

    def render_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        chat_template: str | None = None,
        *,
        content_format: str | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Render a chat's messages with a template; RenderedChat has the prompt as text.

        Template variables are a mapping, since their names may come from a request.

        Args:
            messages: messages as in `apply_chat_template`.
            variables: template variables, `tools` and `add_generation_prompt` (True by default, unless the last message
                is continued) among them.
            chat_template: Jinja source, or the name of one of the tokenizer's templates.
            content_format: content format as in `ChatOptions`; None for the tokenizer's.
            continue_final_message: the same as in `apply_chat_template`.

        Raises:
            RequestError: there is no template, it refuses the messages, or it has no such variable.
        """
        template = self._template(self._template_source(chat_template, bool(variables.get("tools"))))
        if unknown := sorted(variables.keys() - template.variables - {"add_generation_prompt"}, key=str):
            raise RequestError(f"the chat template has no variables {unknown}; it has {sorted(template.variables)}")
        content_format = self.chat_options.content_format if content_format is None else content_format
        CONTENT_FORMAT.read("chat_template_content_format", content_format, RequestError)
        given = {"add_generation_prompt": not continue_final_message} | dict(variables)

        def render(values: Sequence[Any]) -> str:
            messages, given = values
            return template.render_chat(messages, given, content_format, continue_final_message=continue_final_message)

        text = render((messages, given))
        if self.literal is None:
            return RenderedChat(text, text)
        return RenderedChat(text, self.literal.mark(text, (messages, given), template.sought, render))

    def encode_chat(self, chat: RenderedChat, add_special_tokens: bool = False) -> TokenIds:
        """Return the token ids of a rendered chat; its template has usually written the BOS."""
        if self.literal is None or chat.marked == chat.text:
            return self.encode(chat.text, add_special_tokens=add_special_tokens)
        return self.literal.encode(chat.text, chat.marked, add_special_tokens)

    def chat_variables(self, chat_template: str | None = None, *, has_tools: bool) -> frozenset[str]:
        """Return the variables that a chat template reads; arguments as in `_template_source`."""
        return self._template(self._template_source(chat_template, has_tools)).variables

    def _template_source(self, chat_template: str | None, has_tools: bool) -> str:
        """Return the Jinja source of a chat template.

        Args:
            chat_template: source, or the name of one of the tokenizer's templates; None for the default.
            has_tools: True if the default is for chats with tools.

        Raises:
            RequestError: the tokenizer has no template.
        """
        if chat_template is not None:
            return self.chat_template.get(chat_template, chat_template)
        name = "tool_use" if has_tools and "tool_use" in self.chat_template else "default"
        if name not in self.chat_template:
            raise RequestError(
                "chat needs a chat template, and this tokenizer has none (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass chat_template=, or send the finished prompt as a completion"
            )
        return self.chat_template[name]

    def _template(self, source: str) -> ChatTemplate:
        """Return the compiled template for a Jinja source; the last ones are cached."""
        if source not in self._compiled:
            if len(self._compiled) >= MAX_COMPILED_TEMPLATES:  # requests may have their own
                self._compiled.clear()
            defaults = {"tools": None, "documents": None} | self.special_tokens
            self._compiled[source] = ChatTemplate(source, defaults)
        return self._compiled[source]


def kept_parts(
    token_ids: Sequence[int], plain: Sequence[int], max_tokens: int, *, keeps_first: bool
) -> tuple[slice, slice]:
    """Return the two slices of a prompt that truncation keeps, before and after the dropped tokens.

    Args:
        token_ids: prompt tokens, more than `max_tokens`.
        plain: `token_ids` without the special tokens at both ends, which are kept if they fit.
        max_tokens: number of tokens to keep.
        keeps_first: True to keep the text's first tokens instead of its last ones.
    """
    num_cut = len(token_ids) - max_tokens
    starts = range(len(token_ids) - len(plain) + 1)
    start = next((i for i in starts if list(token_ids[i : i + len(plain)]) == list(plain)), 0)
    begin = start + len(plain) - num_cut if keeps_first else start
    if num_cut >= len(plain):  # no text fits between the special tokens
        begin = max_tokens if keeps_first else 0
    return slice(begin), slice(begin + num_cut, None)


class _TokenTexts(dict[int, str]):
    """Dict from token id to its text, including special tokens; decodes missing ids on first look-up."""

    def __init__(self, decode: Callable[[Sequence[int], bool], str]) -> None:
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode([token_id], False)
        return text
