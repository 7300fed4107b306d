"""Encoding of special tokens in chat contents as text; only the chat template writes special tokens.

A chat is rendered twice: unchanged, and with a stand-in for one character in every special token that the client may
have written. The second text shows which special tokens come from the template. If the texts differ in more than the
stand-ins, the template itself reads special tokens; then strings that it searches for stay unchanged, and a chat that
still differs is refused. So client text never becomes a special token, and other text is encoded as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tokenizers

from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import RequestError
from jaxserve.text.encoding import encode_freely
from jaxserve.text.messages import ImagePart

_FIRST_STAND_IN, _LAST_STAND_IN = 0xF0000, 0xFFFFD  # private-use plane
_EDGE = "\U0010fffe"  # noncharacter, absent from tokenizers
_COMPARED, _WORD = {"role", "type"}, re.compile(r"[\w.-]*")  # templates compare these fields


class LiteralText:
    """Encoder of chats that keeps special tokens in message contents as text.

    Args:
        backend: the model's tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._added = _any_of(token.content for token in added.values())
        self._chars = _characters_of_all(self._special)
        self._words = _any_of(token for token in self._special if not set(token) & set(self._chars))
        # The twin has no special tokens. Unguessable names replace the template's special tokens.
        key = secrets.token_hex(16)
        self._twin = _without_special(backend, self._special, key)
        self._names = {token: f"{_EDGE}{key}{number}{_EDGE}" for number, token in enumerate(sorted(self._special))}
        options = ("normalized", "lstrip", "rstrip", "single_word")
        named = [
            tokenizers.AddedToken(
                self._names[token.content], special=False, **{name: getattr(token, name) for name in options}
            )
            for token in added.values()
            if token.special
        ]
        self._twin.add_tokens(named)  # in one call, as each call rebuilds the search for all added tokens
        names = ((self._names.get(token.content, token.content), token_id) for token_id, token in added.items())
        self._ids = {self._twin.token_to_id(name): token_id for name, token_id in names}

    def mark(
        self, text: str, values: Sequence[Any], sought: Iterable[str], render: Callable[[Sequence[Any]], str]
    ) -> str:
        """Return a rendered chat with stand-ins for characters in special tokens that the client may have written.

        Args:
            text: rendered chat.
            values: the client's messages and variables, from which it was rendered.
            sought: strings that the template may search for in them.
            render: function from such values to the rendered chat.

        Raises:
            RequestError: the text depends on special tokens in the values.
        """
        if not any(map(self._may_have_special, values)):
            return text
        stand_ins = self._stand_ins(text)
        back = {ord(stand_in): char for char, stand_in in stand_ins.items()}
        for kept in ((), tuple(filter(self._is_harmless, sought))):
            replacement = _Replacement(stand_ins, self._chars, self._words, _any_of(kept))
            with suppress(RequestError):  # the template examines special tokens
                marked = render([replacement.apply(value) for value in values])
                if marked.translate(back) == text:
                    return marked
        raise RequestError(
            "special tokens in messages must be text with special_tokens_as_text, and the chat template reads them "
            "itself; leave them out"
        )

    def encode(self, text: str, marked: str, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of a rendered chat, with special tokens only where `marked` has them too.

        Args:
            text: rendered chat.
            marked: result of `mark` for it.
            add_special_tokens: True to add the model's special tokens around the chat.
        """
        pieces, end = [], 0
        for match in self._added.finditer(marked):
            if name := self._names.get(match[0]):
                pieces += [text[end : match.start()], name]
                end = match.end()
        named = "".join([*pieces, text[end:]])
        ids = encode_freely(self._twin, named, len(named), add_special_tokens=add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _may_have_special(self, value: Any) -> bool:
        """Return whether a string in a value may contain a special token; exact only for tokens without punctuation."""
        return any(set(self._chars) & set(string) or self._words.search(string) for string in _strings(value))

    def _stand_ins(self, text: str) -> dict[str, str]:
        """Return a private-use character that is not in the text for each character to be replaced."""
        free = (chr(code) for code in range(_FIRST_STAND_IN, _LAST_STAND_IN) if chr(code) not in text)
        first = {token[0] for token in self._special if not set(token) & set(self._chars)}
        return dict(zip([*self._chars, *sorted(first - set(self._chars))], free, strict=False))

    def _is_harmless(self, sought: str) -> bool:
        """Return whether a string has no part in common with a special token: it may stay as it is."""
        cuts = range(1, len(sought) + 1)
        return not any(
            token in sought
            or sought in token
            or any(token.startswith(sought[-cut:]) or token.endswith(sought[:cut]) for cut in cuts)
            for token in self._special
        )


class _Replacement:
    """Replacement of characters in the strings of messages and variables.

    Args:
        stand_ins: character -> stand-in.
        chars: characters that are replaced everywhere.
        words: special tokens whose first character is replaced.
        kept: strings that stay unchanged.
    """

    def __init__(self, stand_ins: Mapping[str, str], chars: str, words: re.Pattern[str], kept: re.Pattern[str]) -> None:
        self._words, self._kept, self._stand_ins = words, kept, stand_ins
        self._table = {ord(char): stand_ins[char] for char in chars}

    def apply(self, value: Any, name: str = "") -> Any:
        """Return a copy of a JSON value with stand-ins in all its strings and keys; `name` is its key in an object."""
        if isinstance(value, str):
            return value if name in _COMPARED and _WORD.fullmatch(value) else self._replace(value)
        if isinstance(value, ImagePart):  # not the client's text
            return value
        if isinstance(value, Mapping):
            return {
                self._replace(key) if isinstance(key, str) else key: self.apply(each, str(key))
                for key, each in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.apply(each) for each in value]
        return value

    def _replace(self, text: str) -> str:
        """Return a string with characters in special tokens replaced by stand-ins, except in the kept strings."""
        parts, end = [], 0
        for match in self._kept.finditer(text):
            parts += [self._replace_all(text[end : match.start()]), match[0]]
            end = match.end()
        return "".join([*parts, self._replace_all(text[end:])])

    def _replace_all(self, text: str) -> str:
        """Return a string with stand-ins for the first character of each `words` match, and for all of `chars`."""
        with_words = self._words.sub(lambda match: self._stand_ins[match[0][0]] + match[0][1:], text)
        return with_words.translate(self._table)


def _without_special(backend: tokenizers.Tokenizer, special: set[str], key: str) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer that finds no special token in a text, even if its vocabulary has the text.

    Args:
        backend: tokenizer.
        special: texts of the special tokens.
        key: text that hides them in the vocabulary, as their prefix.
    """
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    model = content["model"]
    hidden = special - {model.get("unk_token")}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {f"{key}{token}" if token in hidden else token: i for token, i in model["vocab"].items()}
    else:
        is_hidden = [token in hidden and i != model.get("unk_id") for i, (token, _) in enumerate(model["vocab"])]
        pairs = zip(is_hidden, model["vocab"], strict=True)
        model["vocab"] = [[f"{key}{token}" if hides else token, score] for hides, (token, score) in pairs]
    if "merges" in model:
        merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [merge for merge in merges if not hidden & {*merge, "".join(merge)}]
    twin = tokenizers.Tokenizer.from_str(json.dumps(content))
    twin.no_truncation()
    twin.no_padding()
    return twin


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest matching string; without strings it matches nothing."""
    longest_first = sorted({string for string in strings if string}, key=lambda string: (-len(string), string))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _characters_of_all(tokens: Iterable[str]) -> str:
    """Return a set of characters that hits all tokens with punctuation: each of them contains one."""
    chosen: list[str] = []
    for token in sorted(tokens):
        if not set(token) & set(chosen):
            chosen += [char for char in token if not char.isalnum() and not char.isspace() and char not in "_-."][:1]
    return "".join(chosen)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for each in value:
            yield from _strings(each)
