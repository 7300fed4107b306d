"""Bad words as token ids, by vLLM's rule that adds those after a space."""

from collections.abc import Callable

import pytest

from jaxserve.errors import RequestError
from jaxserve.text.bad_words import encode_bad_words

Encode = Callable[[str], list[int]]


def letters(*merged: str) -> Encode:
    """Encode one token per character, with larger ids for merged ones."""

    def encode(text: str) -> list[int]:
        ids = []
        while text:
            word = next((i for i, m in enumerate(merged) if text.startswith(m)), None)
            ids.append(ord(text[0]) if word is None else 256 + word)
            text = text[1 if word is None else len(merged[word]) :]
        return ids

    return encode


def test_bad_word_gets_one_sequence_if_the_space_is_a_token() -> None:
    assert encode_bad_words(["ab", "c"], letters()) == ((97, 98), (99,))


def test_bad_word_gets_a_second_sequence_with_a_leading_space() -> None:
    assert encode_bad_words(["ab", " ab", "c"], letters(" a")) == ((97, 98), (256, 98), (99,))


def test_bad_word_with_fewer_tokens_after_a_space_keeps_one_sequence() -> None:
    assert encode_bad_words(["ab"], letters(" ab")) == ((97, 98),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["123456789"], "a bad word must be 1 to 8 tokens, got '123456789' of 9"),
        ([" "], "must be 1 to 8 tokens, got ' ' of 0"),
        (["a" + chr(i) for i in range(33, 66)], "at most 64 sequences of tokens, got 66 from 33 words"),
    ],
)
def test_too_long_or_too_many_bad_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_bad_words(words, letters(" a"))
