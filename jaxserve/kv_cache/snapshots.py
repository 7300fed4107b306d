"""Snapshots of the states of layers without attention, from which sequences go on that begin alike."""

from collections import OrderedDict
from collections.abc import Sequence


class Snapshots:
    """Entries of the device's pool of states that hold snapshots, by the hash of the page behind which they are taken.

    What a plan takes is written while its step runs, so that only later plans read it; and what a plan reads, it does
    not write to. The least recently used entry is given up first.

    Args:
        num_entries: number of entries.
    """

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self.reset()

    def reset(self) -> None:
        """Forget all content."""
        self._free = list(range(self._num_entries - 1, -1, -1))
        self._entry_by_hash: OrderedDict[bytes, int] = OrderedDict()  # the least recently used in front
        self._taken: dict[bytes, int] = {}  # snapshots that the last plan takes
        self._read: set[int] = set()  # entries that the last plan reads

    def begin_plan(self) -> None:
        """Note that a new plan begins, whose step runs behind those of all plans before."""
        self._entry_by_hash.update(self._taken)
        self._taken.clear()
        self._read.clear()

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Return the number of a prefix's pages, of which these are the hashes, up to its last snapshot."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._entry_by_hash), 0)

    def read(self, page_hash: bytes) -> int:
        """Return the entry of a snapshot that a row of the plan goes on from."""
        entry = self._entry_by_hash[page_hash]
        self._entry_by_hash.move_to_end(page_hash)
        self._read.add(entry)
        return entry

    def take(self, page_hash: bytes) -> int | None:
        """Return the entry for a snapshot that a row of the plan takes; None if there is one, or no entry is free."""
        if page_hash in self._taken:
            return None
        if page_hash in self._entry_by_hash:
            self._entry_by_hash.move_to_end(page_hash)
            return None
        if self._free:
            entry = self._free.pop()
        else:
            oldest = next((key for key, entry in self._entry_by_hash.items() if entry not in self._read), None)
            if oldest is None:
                return None
            entry = self._entry_by_hash.pop(oldest)
        self._taken[page_hash] = entry
        return entry

    def check_integrity(self) -> None:
        """Assert that every entry is in one place."""
        entries = [*self._free, *self._entry_by_hash.values(), *self._taken.values()]
        assert sorted(entries) == list(range(self._num_entries)), f"snapshots are lost or shared: {sorted(entries)}"
        assert not self._taken.keys() & self._entry_by_hash.keys(), "a snapshot is taken twice"
