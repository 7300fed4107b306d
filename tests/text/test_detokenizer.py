"""Text from tokens one by one: only grows, is the decoded text, and ends at stop strings."""

from pathlib import Path

import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.random_runs import examples


def incremental(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[str, str | None]:
    """Return the final text and stop string, having checked that the visible text only grows."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    shown = ""
    for token_id in ids:
        detokenizer.push([token_id])
        assert str(detokenizer.visible).startswith(shown)
        shown = str(detokenizer.visible)
    stop = detokenizer.finish()
    assert str(detokenizer.visible).startswith(shown)
    return str(detokenizer.visible), stop


@settings(max_examples=examples(100))
@given(ids=st.lists(st.integers(0, 325), max_size=40), skip=st.booleans())
def test_byte_level_increments_are_the_decoded_text(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    """Random tokens are mostly not UTF-8; ids from 320 on are outside the vocabulary."""
    assert incremental(byte_level, ids, skip_special_tokens=skip)[0] == byte_level.decode(ids, skip)


@settings(max_examples=examples(60))
@given(text=st.text(max_size=60), skip=st.booleans())
def test_increments_of_any_family_are_the_decoded_text(family: Tokenizer, text: str, skip: bool) -> None:
    ids = family.encode(text)
    assert incremental(family, ids, skip_special_tokens=skip)[0] == family.decode(ids, skip)


@settings(max_examples=examples(100))
@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_any_tokens_of_any_family_give_growing_text(family: Tokenizer, ids: list[int]) -> None:
    incremental(family, ids)


@settings(max_examples=examples(60))
@given(prompt=st.text("ab é", max_size=6), text=st.text("ab é東", max_size=20))
def test_text_continues_the_prompt(family: Tokenizer, prompt: str, text: str) -> None:
    whole = family.encode(prompt + " " + text)
    for split in range(len(whole) + 1):
        detokenizer = Detokenizer(family, SamplingParams(), whole[:split])
        detokenizer.push(whole[split:])
        detokenizer.finish()
        before = family.decode(whole[:split])
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):  # else the prompt ends within a character
            assert before + str(detokenizer.visible) == family.decode(whole)


def test_invalid_fallback_bytes_leave_valid_ones_visible(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_fallback()))
    euro_and_wrong = [3 + byte for byte in (*"€".encode(), 0xFF, *"é".encode())]
    assert incremental(tokenizer, euro_and_wrong)[0] == "€\N{REPLACEMENT CHARACTER}é"


def test_incomplete_characters_are_held_back(byte_level: Tokenizer) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel
    detokenizer = Detokenizer(byte_level, SamplingParams())
    backend = tiny_tokenizers.byte_level()
    texts = []
    for byte in "a😀é".encode():
        token = next(c for c in alphabet.alphabet() if byte_level.byte_table[backend.token_to_id(c)] == bytes([byte]))
        detokenizer.push([backend.token_to_id(token)])
        texts.append(str(detokenizer.visible))
    assert texts == ["a", "a", "a", "a", "a😀", "a😀", "a😀é"]


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Return the stop string by definition: the first to be complete, the longest of several."""
    for end in range(len(text) + 1):
        if hits := [s for s in stops if text[:end].endswith(s)]:
            longest = max(hits, key=len)
            return end - len(longest), end, longest
    return None


@settings(max_examples=examples(120))
@given(
    data=st.data(),
    stops=st.lists(st.text("ab \N{REPLACEMENT CHARACTER}", min_size=1, max_size=4), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_stop_strings_end_the_text_across_token_boundaries(
    byte_level: Tokenizer, data: st.DataObject, stops: list[str], keep: bool
) -> None:
    wanted = [*byte_level.encode("ab", False), *byte_level.encode("a b", False), *byte_level.encode(" é", False)]
    ids = data.draw(st.lists(st.sampled_from(wanted), max_size=20))
    whole = byte_level.decode(ids)
    text, stop = incremental(byte_level, ids, stop=stops, include_stop_str_in_output=keep)
    hit = first_stop(whole, stops)
    if hit is None:
        assert (text, stop) == (whole, None)
    else:
        start, end, expected = hit
        assert (text, stop) == (whole[: end if keep else start], expected)
    at_once = Detokenizer(byte_level, SamplingParams(stop=stops, include_stop_str_in_output=keep))
    at_once.push(ids)
    at_once.finish()
    assert str(at_once.visible) == text


def test_no_part_of_a_stop_string_is_ever_shown(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(stop=["stop!"]))
    shown = []
    for token_id in byte_level.encode("a stopped st") + byte_level.encode("op! b"):
        if detokenizer.push([token_id]) is not None:
            break
        shown.append(str(detokenizer.visible))
    assert not any(text.endswith(("s", "st", "sto", "stop")) for text in shown)
    assert str(detokenizer.visible) == "a stopped "
    assert detokenizer.push(byte_level.encode("more")) == "stop!"
    assert str(detokenizer.visible) == "a stopped "


def test_stop_strings_count_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = [i for c in "xbxbxb" for i in byte_level.encode(c)]
    assert len(ids) == 6
    for min_tokens, expected in ((0, "x"), (1, "x"), (2, "xbx"), (3, "xbx"), (5, "xbxbx"), (6, "xbxbxb")):
        text, stop = incremental(byte_level, ids, stop="b", min_tokens=min_tokens)
        assert text == expected
        assert (stop is None) == (min_tokens == 6)


def test_detokenize_false_gives_no_text(byte_level: Tokenizer) -> None:
    assert incremental(byte_level, [5, 6], detokenize=False) == ("", None)
    detokenizer = Detokenizer(None, SamplingParams())
    assert detokenizer.push([5]) is None
    assert detokenizer.finish() is None
    assert str(detokenizer.visible) == ""
