"""Search for stop strings with one automaton: the cost per character does not depend on their number."""

import functools
from collections.abc import Iterable


class StopStrings:
    """Aho-Corasick automaton (Communications of the ACM 18(6), 1975) for a request's stop strings.

    A state is the text's longest suffix that is a prefix of some stop string; `START` is the empty suffix. The
    automaton is immutable, so a request's samples use the same one.

    Args:
        stops: non-empty strings. Building takes time and memory in proportion to their characters.
    """

    START = 0

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # per state: character -> state one character deeper
        self._stop: list[str | None] = [None]  # per state: longest stop string that ends there
        depths = [0]
        for stop in stops:
            state = self.START
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(depths)
                    self._next.append({})
                    self._stop.append(None)
                    depths.append(depths[state] + 1)
                state = self._next[state][character]
            self._stop[state] = stop
        self._fallback = [self.START] * len(depths)  # per state: its longest proper suffix that is a state
        self._num_held = [0] * len(depths)
        breadth_first = [self.START]
        for state in breadth_first:  # fallbacks are less deep, so they are complete in time
            for character, deeper in self._next[state].items():
                fallback = self.START if state == self.START else self._step(self._fallback[state], character)
                self._fallback[deeper] = fallback
                self._stop[deeper] = self._stop[deeper] or self._stop[fallback]
                self._num_held[deeper] = depths[deeper] if self._next[deeper] else self._num_held[fallback]
                breadth_first.append(deeper)

    def scan(self, state: int, text: str, may_stop: bool) -> tuple[int, int, str | None]:
        """Read more text until a stop string is complete.

        Args:
            state: state after the earlier text.
            text: new text.
            may_stop: False to ignore stop strings.

        Returns:
            New state, number of characters read, and the longest stop string that ends there. Without a stop string all
            characters are read.
        """
        for num_read, character in enumerate(text, start=1):
            state = self._step(state, character)
            if may_stop and (stop := self._stop[state]) is not None:
                return state, num_read, stop
        return state, len(text), None

    def num_held(self, state: int) -> int:
        """Return the length of the text's suffix that may begin a stop string, after reading up to `state`."""
        return self._num_held[state]

    def _step(self, state: int, character: str) -> int:
        """Return the state after `state` and one more character."""
        while (deeper := self._next[state].get(character)) is None:
            if state == self.START:
                return state
            state = self._fallback[state]
        return deeper


@functools.lru_cache(maxsize=16)
def compile_stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the automaton for stop strings; recent ones are cached."""
    return StopStrings(stops)
