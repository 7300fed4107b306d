"""Text of a completion, which grows by pieces and reads as a string."""

import copy
import dataclasses
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.outputs import CompletionOutput, GrowingText


@given(first=st.text(), pieces=st.lists(st.tuples(st.text(), st.booleans())), data=st.data())
def test_it_is_the_concatenation_whenever_it_is_read(
    first: str, pieces: list[tuple[str, bool]], data: st.DataObject
) -> None:
    text, expected = GrowingText(first), first
    for piece, is_read in pieces:
        text.append(piece)
        expected += piece
        if is_read:
            assert str(text) == expected
        start = data.draw(st.integers(0, len(expected)))
        assert text.since(start) == expected[start:]
        assert len(text) == len(expected)
    assert str(text) == expected


def test_appending_costs_the_same_however_long_the_text_is() -> None:
    text, num_copied = GrowingText(), 0
    for i in range(10_000):
        text.append("a" * (1 + i * 7919 % 5))
        _, pieces = text._state
        num_copied += len(pieces[-1])
        assert len(pieces) <= 16
    assert len(text) == 30_000
    assert num_copied < 10 * len(text)


def between_instructions(call: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Run `call` and, before each of its bytecode instructions, `meanwhile`, as another thread might."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            meanwhile()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces no instruction unless some frame has it by now
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("read", [str, len, lambda text: text.since(3)], ids=["str", "len", "since"])
def test_appending_while_it_is_read_loses_nothing(read: Callable[[GrowingText], object]) -> None:
    text, expected = GrowingText("abc"), ["abc"]
    text.append("d")

    def append() -> None:
        expected.append(f"{len(expected)},")
        text.append(expected[-1])

    expected.append("d")
    between_instructions(lambda: read(text), append)
    assert len(expected) > 10
    assert str(text) == "".join(expected)
    assert len(text) == len(str(text))


def test_reading_while_it_is_appended_to_shows_whole_pieces() -> None:
    text, seen = GrowingText("ab"), set()

    def read() -> None:
        seen.add((str(text), text.since(1)))

    for piece in ("c", "de", "fghijkl"):
        between_instructions(partial(text.append, piece), read)
        read()
    assert seen == {(t, t[1:]) for t in ("ab", "abc", "abcde", "abcdefghijkl")}


def test_a_reader_on_another_thread_loses_nothing() -> None:
    output, done = CompletionOutput(0), threading.Event()
    growing = GrowingText()
    output.follow(growing, None)
    whole = "".join(f"{i:04d}" for i in range(5000))
    wrong: list[str] = []

    def keep_reading() -> None:
        while not done.is_set():
            text = output.text
            if not whole.startswith(text + output.text_since(len(text))):
                wrong.append(text)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader = threading.Thread(target=keep_reading)
        reader.start()
        for start in range(0, len(whole), 4):
            growing.append(whole[start : start + 4])
        done.set()
        reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert output.text == whole


def test_a_completion_is_a_plain_value_with_text_in_it() -> None:
    growing = GrowingText("a")
    live = CompletionOutput(3)
    assert live == CompletionOutput(3, "")
    live.follow(growing, None)
    seen = []
    for piece in "bcd":
        seen.append((live.text, dataclasses.replace(live), pickle.loads(pickle.dumps(live)), copy.deepcopy(live)))
        growing.append(piece)
    for text, *others in seen:
        assert [text] * 3 == [other.text for other in others], "snapshots do not grow"
        assert others == [CompletionOutput(3, text)] * 3
    assert [text for text, *_ in seen] == list(accumulate("abc"))
    assert live.text == "abcd"
    assert live.text_since(2) == "cd"
    assert "text='abcd'" in repr(live)
    assert dataclasses.asdict(live)["text"] == "abcd"
