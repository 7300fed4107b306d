"""Log probabilities of a completion or a prompt, kept as they come from the device until someone reads them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from jaxserve.request import Logprob

Entry = TypeVar("Entry", dict[int, Logprob], dict[int, Logprob] | None)


class LogprobList(Sequence[Entry], Generic[Entry]):
    """A stand-in for vLLM's list of `dict[int, Logprob]`: one dict per token, with the token itself first.

    An entry is kept as bytes and becomes a dict each time it is read, which is when its tokens are decoded. A token
    with 20 others would otherwise be 20 objects more, made and decoded on the thread that feeds the device, though most
    readers look at one of them. One thread may append while others read. Pickled and copied, it is a plain list.

    Args:
        token_text: token id -> text of the token by itself, or None.
        entries: first entries, ready as they are: None for the first token of a prompt, which nothing predicts.
    """

    def __init__(self, token_text: Callable[[int], str | None], entries: Iterable[Entry] = ()) -> None:
        self._token_text = token_text
        self._ready: tuple[Entry, ...] = tuple(entries)
        self._rows: list[tuple[int, float, int, bytes, bytes]] = []  # tuples of these types cost no garbage collection

    def append(self, token_id: int, logprob: float, rank: int, top_ids: bytes, top_logprobs: bytes) -> None:
        """Add the entry of the next token.

        Args:
            token_id: the token.
            logprob: its log probability.
            rank: its rank, which equal logits share.
            top_ids: int32 ids of the most likely tokens, best first; none where all tokens are given.
            top_logprobs: their float32 log probabilities; those of all tokens are in the order of ids.
        """
        self._rows.append((token_id, logprob, rank, top_ids, top_logprobs))

    def __len__(self) -> int:
        return len(self._ready) + len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        """Return an entry, or those of a slice as a list."""
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._read(positions)
        return [self._read(position) for position in positions]

    def _read(self, position: int) -> Any:
        if position < len(self._ready):
            return self._ready[position]
        token_id, logprob, rank, top_ids, top_logprobs = self._rows[position - len(self._ready)]
        if top_logprobs and not top_ids:
            by_id = np.frombuffer(top_logprobs, np.float32)
            order = largest(by_id, len(by_id))
            ids, values = order.tolist(), by_id[order].tolist()
        else:
            ids, values = memoryview(top_ids).cast("i").tolist(), memoryview(top_logprobs).cast("f").tolist()
        own = Logprob(logprob, rank, self._token_text(token_id))
        entry = {token_id: own}
        entry.update(zip(ids, map(Logprob, values, itertools.count(1), map(self._token_text, ids)), strict=True))
        entry[token_id] = own  # among the most likely too: there with its place for a rank
        return entry

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Return the places of the `count` largest values, best first, and the first of equal ones."""
    places = np.arange(len(values))
    if count == 0:
        places = places[:0]
    elif count < len(values):  # in a tenth of the time of sorting all
        least = np.partition(values, -count)[-count]
        better, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
        places = np.concatenate([better, equal[: count - len(better)]])
    return places[np.lexsort((places, -values[places]))].astype(np.int32)
