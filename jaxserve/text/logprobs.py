"""Log probabilities for a completion or a prompt, kept in the device's format until they are read."""

import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.outputs import Logprob
from jaxserve.text.token_texts import TokenTexts

NUM_BEFORE = 24  # preceding tokens that a token's text may depend on, including hidden ones

NUM_RELEASED = 4096  # entries freed between two switches of threads
Entry = TypeVar("Entry", dict[int, Logprob], dict[int, Logprob] | None)


class LazyEntries(Sequence[Entry], Generic[Entry]):
    """Sequence that equals a list of `dict[int, Logprob]`, but builds each entry on access."""

    @abstractmethod
    def _read(self, position: int) -> Any:
        """Return the entry at a position from 0."""

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._read(positions)
        return [self._read(position) for position in positions]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list, which it equals


class LogprobList(LazyEntries[Entry], Generic[Entry]):
    """Lazy version of vLLM's list of `dict[int, Logprob]`: one dict per token, with the token itself first.

    Entries are kept as bytes; the reading thread builds the dict and decodes its tokens. Otherwise a token with 20
    alternatives would cost 20 more objects on the thread that feeds the device, although many readers use only one.
    One thread may append while others read. Pickling and copying give a plain list.

    Args:
        texts: function from tokens to texts, see `TokenTexts`; None for no texts.
        prompt: tokens that precede the list.
        first: initial tokens without log probabilities, such as the first token of a prompt.
        entries: entries for `first`.
    """

    def __init__(
        self,
        texts: TokenTexts | None,
        prompt: Sequence[int] = (),
        first: Sequence[int] = (),
        entries: Iterable[Entry] = (),
    ) -> None:
        self._texts, self._prompt, self._first = texts, prompt, tuple(first)
        self._built: list[Entry] = list(entries)  # initial entries, as `as_list` returns them
        self._num_given = len(self._built)
        self._is_ended = False
        self._rows: list[tuple[int, float, int, bytes, bytes]] = []  # tuples that the garbage collector need not track
        self._building = threading.Lock()

    def append(self, token_id: int, logprob: float, rank: int, top_ids: bytes, top_logprobs: bytes) -> None:
        """Add the entry of the next token.

        Args:
            token_id: the token.
            logprob: its log probability.
            rank: its rank; tokens with equal logits have the same rank.
            top_ids: int32 ids of the most likely tokens, best first; empty if all tokens are given.
            top_logprobs: their float32 log probabilities; in id order if all tokens are given.
        """
        self._rows.append((token_id, logprob, rank, top_ids, top_logprobs))

    def as_list(self) -> list[Entry]:
        """Return all entries so far as one list; all calls return the same object, and extend it."""
        with self._building:
            self._built.extend([self._read(position) for position in range(len(self._built), len(self))])
        return self._built

    def end(self) -> None:
        """End the list: no entries follow, so that the last token's text includes an incomplete character."""
        with self._building:
            self._is_ended = True
            if self._rows and len(self._built) == len(self):
                self._built[-1] = self._build(len(self) - 1)

    def __len__(self) -> int:
        return self._num_given + len(self._rows)

    def part(self, start: int, stop: int) -> Sequence[Entry]:
        """Return the entries from `start` to before `stop`, each built on access."""
        return LogprobPart(self, range(start, min(stop, len(self))))

    def release(self) -> None:
        """Drop all entries in small batches: no thread can run while memory is freed."""
        for entries in (self._built, self._rows):
            while entries:
                del entries[-NUM_RELEASED:]
                time.sleep(0)

    def _read(self, position: int) -> Any:
        """Return the entry at a position from 0, an earlier one if it was built before."""
        return self._built[position] if position < len(self._built) else self._build(position)

    def _build(self, position: int) -> Any:
        """Return a new entry for a position from the device's values."""
        token_id, logprob, rank, top_ids, top_logprobs = self._rows[position - self._num_given]
        ids: list[int]
        if top_logprobs and not top_ids:
            by_id = np.frombuffer(top_logprobs, np.float32)
            order = largest(by_id, len(by_id))
            ids, values = order.tolist(), by_id[order].tolist()
        else:
            ids, values = memoryview(top_ids).cast("i").tolist(), memoryview(top_logprobs).cast("f").tolist()
        texts = self._texts_at(position, [token_id, *ids])
        own = Logprob(logprob, rank, texts[0])
        entry = {token_id: own}
        entry.update(zip(ids, map(Logprob, values, itertools.count(1), texts[1:]), strict=True))
        entry[token_id] = own  # replaces its entry among the most likely, whose rank is its position
        return entry

    def _texts_at(self, position: int, token_ids: list[int]) -> Sequence[str | None]:
        """Return the texts that the tokens would have at a position: first its token, then the alternatives."""
        if self._texts is None:
            return [None] * len(token_ids)
        rows = self._rows[max(0, position - len(self._first) - NUM_BEFORE) : max(0, position - len(self._first))]
        before: list[int] = [row[0] for row in rows]
        if len(before) < NUM_BEFORE:
            before = [*self._first, *before]
        prompt = self._prompt if len(before) < NUM_BEFORE else ()
        return self._texts(prompt, before, token_ids, is_end=self._is_ended and position + 1 == len(self))

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self[:],)


class LogprobPart(LazyEntries[Entry], Generic[Entry]):
    """Slice of a LogprobList, without a copy.

    Args:
        entries: the list.
        positions: positions of the slice in the list.
    """

    def __init__(self, entries: LogprobList[Entry], positions: range) -> None:
        self._entries: LogprobList[Entry] = entries
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def _read(self, position: int) -> Any:
        """Return the entry at a position from 0 in the slice."""
        return self._entries[self._positions[position]]


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Return the indices of the `count` largest values, largest first; among equal values, the first ones."""
    indices = np.arange(len(values))
    if count == 0:
        indices = indices[:0]
    elif count < len(values):  # takes a tenth of the time of a full sort
        smallest = np.partition(values, -count)[-count]
        larger, equal = np.flatnonzero(values > smallest), np.flatnonzero(values == smallest)
        indices = np.concatenate([larger, equal[: count - len(larger)]])
    return indices[np.lexsort((indices, -values[indices]))].astype(np.int32)
