"""Stop strings against their definition, and their cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from jaxserve.errors import RequestError
from jaxserve.text.stop_strings import StopStrings
from tests.random_runs import examples

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


def first_complete(text: str, stops: list[str], start: int = 0) -> tuple[int, str] | None:
    """Return the end of the first stop string to end after `start` characters; the longest of several."""
    for end in range(start + 1, len(text) + 1):
        if hits := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(hits, key=len)
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Return the number of characters at the end of `text` that a stop string may begin with and go on from."""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    return max(length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings)


@settings(max_examples=examples(200))
@given(stops=STOPS, pieces=st.lists(st.tuples(st.text("abc", max_size=5), st.booleans()), max_size=8))
def test_scanning_in_pieces_finds_the_same_stop_string_as_a_search(
    stops: list[str], pieces: list[tuple[str, bool]]
) -> None:
    automaton, state, text = StopStrings(stops), StopStrings.START, ""
    for piece, may_stop in pieces:
        state, num_read, stop = automaton.scan(state, piece, may_stop)
        expected = first_complete(text + piece, stops, len(text)) if may_stop else None
        text += piece[:num_read]
        if expected is not None:
            assert (len(text), stop) == expected
            return
        assert (num_read, stop) == (len(piece), None)
        assert automaton.num_held(state) == longest_beginning(text, stops)


class CountingDict(dict[str, int]):
    """Dict that counts its look-ups."""

    count = 0

    def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
        CountingDict.count += 1
        return super().get(key, default)


@pytest.mark.parametrize("num_stops", [1, 8, 64])
def test_cost_per_character_is_independent_of_the_number_of_stop_strings(num_stops: int) -> None:
    stops = ["a" * (63 - i) + chr(ord("b") + i) for i in range(num_stops)]
    automaton = StopStrings(stops)
    automaton._next = [CountingDict(deeper) for deeper in automaton._next]
    CountingDict.count = 0
    text = ("a" * 63 + "!") * 100  # falls back as far and as often as possible
    _, num_read, stop = automaton.scan(StopStrings.START, text, True)
    assert (num_read, stop) == (len(text), None)
    assert CountingDict.count <= 2 * len(text)


def test_number_and_length_of_stop_strings_are_bounded() -> None:
    most = [f"{i:0{MAX_STOP_CHARS // MAX_STOP_STRINGS}d}" for i in range(MAX_STOP_STRINGS)]
    assert SamplingParams(stop=most).stop == most
    for stop, got in (
        ([*most[:-1], most[-1] + "!"], "64 of 4097"),
        (["a"] * 65, "65 of 65"),
        ("a" * 4097, "1 of 4097"),
    ):
        with pytest.raises(RequestError, match=f"at most 64 strings of 4096 characters in all, got {got}; keep"):
            SamplingParams(stop=stop)


@pytest.mark.parametrize("value", [0, False, {}, "", 0.0, b""])
def test_empty_values_that_are_not_lists_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="stop must be a non-empty string or a list"):
        SamplingParams(stop=value)
    with pytest.raises(RequestError, match="stop_token_ids must be a list"):
        SamplingParams(stop_token_ids=value)
    assert SamplingParams(stop=[], stop_token_ids=()) == SamplingParams()
