"""PageArchive: KV pages in a file, found by content, that outlive the process that wrote them.

The file is an array of equal slots. A slot holds one page after a header with the page's key and checksums, so a file
needs no index, no compaction and no journal: opening it reads the headers, and a page that was torn by a crash, or
changed since, fails its checksum when it is read. It is then dropped and counted, never returned.
"""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.stored_pages import PageKey

logger = logging.getLogger(__name__)

_MAGIC = b"jskv\x00\x00\x00\x01"  # the last byte is the format version
_HEADER = Struct("<8s16si16sQII")  # magic, fingerprint, group, hash, sequence number, page bytes, CRC-32 of the page
_CHECKSUM = Struct("<I")  # CRC-32 of the header
_HEADER_BYTES = 64
_MAX_FILES = 1024  # engines that use one directory simultaneously


class PageArchive:
    """Pages in one file, which only this process uses.

    One thread at a time uses it. After the start, a file system error is logged and counted, never raised.

    Args:
        directory: where the file lies; created if missing.
        fingerprint: 16 bytes that distinguish weights, page layout and file format; a page with another one is unknown.
        page_bytes: page size.
        max_bytes: maximum file size.

    Attributes:
        page_bytes: see above.
        slot_bytes: file size per page.
        num_slots: maximum number of stored pages.
        num_corrupt: pages that failed their checksum.
        num_errors: failed system calls.

    Raises:
        OSError: the directory or file cannot be written.
    """

    def __init__(self, directory: Path, fingerprint: bytes, page_bytes: int, max_bytes: int) -> None:
        self.num_corrupt = self.num_errors = 0
        self._has_lost = False  # True after a failed sync: the next one succeeds without the pages that were lost
        self._fingerprint, self.page_bytes = fingerprint, page_bytes
        self.slot_bytes = _HEADER_BYTES + page_bytes
        self.num_slots = max_bytes // self.slot_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._file = _lock_first(directory)
        self._closing = weakref.finalize(self, os.close, self._file)  # also if nobody calls `close`
        self._closing.atexit = False
        self._slots: dict[PageKey, int] = {}
        self._sequence = 0
        self._free: list[int] = []  # slots without a page that lie before a slot that had one
        self._next = 0  # first slot that never had a page
        self._open()

    @property
    def keys(self) -> list[PageKey]:
        """Keys for the stored pages, in the order in which they were written."""
        return list(self._slots)

    def write(self, key: PageKey, *parts: bytes | memoryview) -> bool:
        """Store a page, in the slot of the one written first if none is free; return whether it can be read.

        Args:
            key: content of the page.
            parts: bytes of the page, which are not copied on the way to the file.
        """
        num_bytes, checksum = 0, 0
        for part in parts:
            num_bytes += len(part)
            checksum = zlib.crc32(part, checksum)
        assert num_bytes == self.page_bytes, f"a page has {self.page_bytes} bytes, got {num_bytes}"
        if key in self._slots:
            return True
        slot, self._sequence = self._take_slot(), self._sequence + 1
        header = _HEADER.pack(_MAGIC, self._fingerprint, *key, self._sequence, num_bytes, checksum)
        header += _CHECKSUM.pack(zlib.crc32(header))
        try:
            is_whole = os.pwritev(self._file, (header, *parts), slot * self.slot_bytes) == self.slot_bytes
        except OSError as error:
            self._note_error("write to", error)
            is_whole = False
        if is_whole:
            self._slots[key] = slot
        else:
            self._free.append(slot)
        return is_whole

    def read(self, key: PageKey) -> bytes | None:
        """Return a page; None if it is not stored. A page that is not intact is deleted first."""
        if (slot := self._slots.get(key)) is None:
            return None
        try:
            content = os.pread(self._file, self.slot_bytes, slot * self.slot_bytes)
        except OSError as error:
            self._note_error("read", error)
            content = b""
        page, found = content[_HEADER_BYTES:], self._key(content)
        if found is not None and found.key == key and found.checksum == zlib.crc32(page):
            return page
        self.num_corrupt += 1
        logger.warning("a stored KV page is not intact and is computed again: page %d of its file", slot)
        self.delete(key)
        return None

    def _take_slot(self) -> int:
        """Return a slot for a page; if none is free, delete the page written first."""
        if not self._free:
            if self._next < self.num_slots:
                self._next += 1
                return self._next - 1
            self.delete(next(iter(self._slots)))
        return self._free.pop()

    def delete(self, key: PageKey) -> None:
        """Free the slot of a page, if it is stored."""
        if (slot := self._slots.pop(key, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Delete all pages, also for later processes."""
        self._slots.clear()
        self._free, self._next, self._has_lost = [], 0, False
        try:
            os.ftruncate(self._file, 0)
        except OSError as error:
            self._note_error("empty", error)

    def sync(self) -> bool:
        """Wait until the disk has all pages written so far; return False if it has failed, now or before."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._has_lost = True
            self._note_error("sync", error)
        return not self._has_lost

    def close(self) -> None:
        """Close the file and let others use it; has no effect the second time."""
        if self._closing.alive:
            _unlock(self._file)
        self._closing()
        self._file = -1

    def _open(self) -> None:
        """Find the pages in the file; slots of others are free."""
        by_sequence = sorted(self._scan())
        for sequence, slot, key in by_sequence:
            self._slots.pop(key, None)  # the same content again: keep the later one
            self._slots[key], self._sequence = slot, sequence
        used = set(self._slots.values())
        self._next = max(used, default=-1) + 1
        self._free = [slot for slot in reversed(range(self._next)) if slot not in used]
        if os.fstat(self._file).st_size > self.num_slots * self.slot_bytes:
            os.ftruncate(self._file, self.num_slots * self.slot_bytes)

    def _scan(self) -> Iterator[tuple[int, int, PageKey]]:
        """Yield sequence number, slot and key for each intact header."""
        num_used = os.fstat(self._file).st_size // self.slot_bytes
        for slot in range(min(num_used, self.num_slots)):
            found = self._key(os.pread(self._file, _HEADER_BYTES, slot * self.slot_bytes))
            if found is not None:
                yield found.sequence, slot, found.key

    def _key(self, content: bytes) -> _Found | None:
        """Read the header at the start of `content`; return None if it is not intact or has another fingerprint."""
        header = content[: _HEADER.size]
        if len(content) < _HEADER_BYTES or content[_HEADER.size : _HEADER_BYTES] != _CHECKSUM.pack(zlib.crc32(header)):
            return None
        magic, fingerprint, group, page_hash, sequence, num_bytes, checksum = _HEADER.unpack(header)
        if (magic, fingerprint, num_bytes) != (_MAGIC, self._fingerprint, self.page_bytes):
            return None
        return _Found(PageKey(group, page_hash), sequence, checksum)

    def _note_error(self, action: str, error: OSError) -> None:
        """Count a failed system call, and warn of the first one."""
        self.num_errors += 1
        if self.num_errors == 1:
            logger.warning("cannot %s the file of KV pages, which are computed again instead: %s", action, error)


class SlicedArchive:
    """Contents of two sizes in one archive: a state snapshot takes several slots, each with a slice of it.

    Slices whose snapshot is not whole, because others were overwritten, are deleted first: a later write of the
    snapshot, with other rounding, would keep them.

    Args:
        archive: the archive, whose slots hold a KV page.
        state_bytes: size of a state snapshot; 0 without recurrent layers.

    Attributes:
        archive: the archive.
        num_slices: slots per snapshot.
    """

    def __init__(self, archive: PageArchive, state_bytes: int) -> None:
        self.archive, self._state_bytes = archive, state_bytes
        self._page_bytes = archive.page_bytes
        self.num_slices = max(-(-state_bytes // self._page_bytes), 1)
        stored = set(archive.keys)
        for key in stored:
            if key.group <= STATES and not stored.issuperset(self._slices(PageKey(STATES, key.page_hash))):
                archive.delete(key)

    @property
    def keys(self) -> list[PageKey]:
        """Keys for the stored contents; a snapshot comes where its first slice was written."""
        return [key for key in self.archive.keys if key.group >= STATES]

    def write(self, key: PageKey, *parts: bytes | memoryview) -> bool:
        """Store a content, given in parts; return whether it can be read."""
        if key.group != STATES:
            return self.archive.write(key, *parts)
        content, size = b"".join(parts), self._page_bytes
        for index, each in enumerate(self._slices(key)):
            if not self.archive.write(each, content[index * size : (index + 1) * size].ljust(size, b"\0")):
                self.delete(key)
                return False
        return True

    def read(self, key: PageKey) -> bytes | None:
        """Return a content; None, after its deletion, if it is not whole."""
        parts = list(map(self.archive.read, self._slices(key)))
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            self.delete(key)
            return None
        return b"".join(whole)[: self._state_bytes if key.group == STATES else None]

    def delete(self, key: PageKey) -> None:
        """Free the slots of a content, if it is stored."""
        for each in self._slices(key):
            self.archive.delete(each)

    def _slices(self, key: PageKey) -> list[PageKey]:
        """Return the keys for a content's slots; those of a snapshot differ in their group, from STATES downwards."""
        if key.group != STATES:
            return [key]
        return [PageKey(STATES - index, key.page_hash) for index in range(self.num_slices)]


class _Found(NamedTuple):
    """Header fields."""

    key: PageKey
    sequence: int
    checksum: int


def _lock_first(directory: Path) -> int:
    """Open and lock the first file in a directory that no other process uses; return its descriptor.

    Raises:
        OSError: it cannot be opened.
    """
    import fcntl  # noqa: PLC0415 - Windows lacks it

    for index in range(_MAX_FILES):
        file = os.open(directory / f"pages-{index}.kv", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        except OSError:  # the file system has no locks
            os.close(file)
            raise
        else:
            return file
    raise OSError(f"all {_MAX_FILES} page files in {directory} are in use")


def _unlock(file: int) -> None:
    """Unlock a file; closing does not if a forked process has it, too."""
    import fcntl  # noqa: PLC0415 - Windows lacks it

    fcntl.flock(file, fcntl.LOCK_UN)
