"""Counts of the tokens of thoughts, against the places of the marks among the tokens."""

import tempfile
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.openai import reasoning_tokens
from jaxserve.openai.chat_formats import ChatFormat, ReasoningDelimiters, chat_format
from jaxserve.openai.reasoning_tokens import ReasoningTokens
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.token_texts import new_stream
from tests.random_runs import examples

MARKS = ["<think>", "</think>"]
with tempfile.TemporaryDirectory() as directory:
    backend = tiny_tokenizers.byte_level()
    backend.add_tokens([tokenizers.AddedToken(mark) for mark in MARKS])
    with_marks = load_tokenizer(tiny_tokenizers.write(Path(directory) / "marks", backend))
    without = load_tokenizer(tiny_tokenizers.write(Path(directory) / "bytes", tiny_tokenizers.byte_level()))

FORMAT = ChatFormat(reasoning=ReasoningDelimiters(*MARKS))


def count(
    text: str, *, in_reasoning: bool = False, form: ChatFormat = FORMAT, has_marks: bool = True
) -> tuple[int, list[int]]:
    tokenizer = with_marks if has_marks else without
    token_ids = tokenizer.encode(text)
    counter, counts = ReasoningTokens(form, new_stream(tokenizer, frozenset()), in_reasoning=in_reasoning), []
    for token_id in token_ids:
        counter.push([token_id])
        counts.append(counter.count)
    return counter.count, counts


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("thought", ["one", "日本 and 😀", " a < b </thin", ""])
def test_tokens_between_the_marks(thought: str, has_marks: bool) -> None:
    tokenizer = with_marks if has_marks else without
    num_tokens = len(tokenizer.encode(thought))
    assert count(f"<think>{thought}</think>two three", has_marks=has_marks)[0] == num_tokens
    assert count(f"{thought}</think>two", in_reasoning=True, has_marks=has_marks)[0] == num_tokens
    assert count(f"<think>{thought}", has_marks=has_marks)[0] == num_tokens
    assert count(thought, has_marks=has_marks)[0] == 0


def test_counts_grow_with_marks_that_are_tokens() -> None:
    counts = count("<think>one two</think>three<think>four</think>")[1]
    assert counts == sorted(counts)


def test_thoughts_in_a_channel() -> None:
    form = chat_format([], "openai")
    thought = "why not"
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>two three"
    assert count(text, form=form)[0] == len(with_marks.encode(thought))


PIECES = ["<think>", "</think>", "<th", "ink>", "</", "think", ">", "a", " bc", "", "x" * 7]


class Pieces:
    """Stream whose tokens are indices of PIECES."""

    def push(self, token_id: int) -> str:
        return PIECES[token_id]


def num_in_thoughts(token_ids: list[int], *, in_reasoning: bool) -> int:
    """Return the number of tokens that begin in a thought of the whole text."""
    text, starts = "", []
    for token_id in token_ids:
        starts.append(len(text))
        text += PIECES[token_id]
    count, begin = 0, 0
    while True:
        mark = MARKS[in_reasoning]
        found = text.find(mark, begin)
        end = len(text) + 1 if found < 0 else found
        count += in_reasoning * sum(begin <= start < end for start in starts)
        if found < 0:
            return count
        begin, in_reasoning = found + len(mark), not in_reasoning


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=60), st.booleans())
def test_counts_are_those_of_the_whole_text_though_little_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, token_ids: list[int], in_reasoning: bool
) -> None:
    monkeypatch.setattr(reasoning_tokens, "_MAX_KEPT_CHARS", 12)
    counter = ReasoningTokens(FORMAT, Pieces(), in_reasoning=in_reasoning)  # type: ignore[arg-type]
    for count, token_id in enumerate(token_ids, 1):
        counter.push([token_id])
        assert len(counter._text) <= 12 + max(map(len, PIECES))
        assert counter.count == num_in_thoughts(token_ids[:count], in_reasoning=in_reasoning)
