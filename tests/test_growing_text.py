"""A completion's text, which grows by pieces and reads as a string."""

import copy
import dataclasses
import pickle
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.request import CompletionOutput, GrowingText


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


class Counted(str):
    """A piece that counts how often it is touched."""

    num_slices = 0

    def __getitem__(self, index: slice) -> str:
        Counted.num_slices += 1
        return super().__getitem__(index)


def test_what_is_new_costs_the_same_however_long_the_text_is() -> None:
    text = GrowingText()
    for _ in range(1000):
        start = len(text)
        text.append(Counted("ab"))
        assert text.since(start) == "ab"
    assert Counted.num_slices == 1000


def test_a_completion_is_a_plain_value_with_text_in_it() -> None:
    growing = GrowingText("a")
    live = CompletionOutput(3)
    assert live == CompletionOutput(3, "")
    live.follow(growing)
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
