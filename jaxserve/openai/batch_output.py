"""Batch output file: records are appended, and read again when a run resumes.

It is the batch's only state. Each record is appended whole, so after `kill -9` the file holds whole records and at
most one truncated one. Written records survive the end of the process, and after the next fsync, at most about a
second later, also a crash of the machine.
"""

import fcntl
import hashlib
import itertools
import json
import os
import re
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from jaxserve.errors import ConfigError
from jaxserve.openai.errors import Json

MAX_LINE_BYTES = 2**24  # twice the body that the server takes
FSYNC_INTERVAL_S = 1.0
_RECORD_START = b'{"id": "batch_req_'
_RECORD = re.compile(  # a record's beginning, with the fields in the order of `make_record`
    _RECORD_START + rb'([1-9][0-9]*)", "custom_id": (?:"(?:[^"\\]|\\.)*"|-?[0-9]+|null), '
    rb'"response": \{"status_code": ([0-9]+), "request_id": "([0-9a-f]{16})"'
)


@dataclass(slots=True)
class DoneLines:
    """Set of the input lines that have a record, as one bit per line.

    Attributes:
        num_lines: number of input lines that are not blank.
        num_records: number of lines in the set.
        bits: bit for each line number, lowest first.
    """

    num_lines: int = 0
    num_records: int = 0
    bits: bytearray = field(default_factory=bytearray)

    def __contains__(self, number: int) -> bool:
        return number >> 3 < len(self.bits) and bool(self.bits[number >> 3] >> (number & 7) & 1)

    def add(self, number: int) -> None:
        """Add a line number to the set."""
        self.bits.extend(bytes(max(0, (number >> 3) + 1 - len(self.bits))))
        self.bits[number >> 3] |= 1 << (number & 7)
        self.num_records += 1


class BatchOutput:
    """Output file of a batch, open for appending records; other processes cannot open it inside the context.

    Args:
        path: output file, created if it does not exist.

    Attributes:
        path: output file.
        num_records: number of records in the file.
        num_errors: number of records of failed requests.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_records = 0
        self.num_errors = 0
        self._synced_s = time.monotonic()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the batch output must be a regular file that can be written, got {path}: {error.strerror}; "
                "change its permissions, or choose another output"
            ) from error

    def __enter__(self) -> "BatchOutput":
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(
                f"another process is writing the batch output {self.path}; wait for it, or choose another output"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def resume(self, lines: IO[bytes], key: bytes) -> DoneLines:
        """Check the file's records against a batch's input, and drop a partial record at the end.

        Args:
            lines: input file.
            key: run seed, part of the records' fingerprints.

        Returns:
            The input lines that have a record.

        Raises:
            ConfigError: the records belong to another input or seed; the file is unchanged.
        """
        fingerprints, size = self._scan(max_number=os.fstat(lines.fileno()).st_size)
        done = DoneLines()
        for number, raw in numbered_lines(lines):
            done.num_lines += 1
            if number < len(fingerprints) and fingerprints[number]:
                if fingerprints[number] != int(fingerprint_of(raw, key), 16):
                    raise self._foreign(f"its record of line {number} is of another request or another seed")
                done.add(number)
        if done.num_records < self.num_records:
            raise self._foreign("it has records of lines that the input does not have")
        os.ftruncate(self._fd, size)
        return done

    def append(self, record: Json) -> None:
        """Append one record as a line of JSON."""
        data = memoryview(json.dumps(record).encode("ascii") + b"\n")
        while data:  # one write suffices unless the disk is full; then the second one raises
            data = data[os.write(self._fd, data) :]
        self.num_records += 1
        if time.monotonic() - self._synced_s >= FSYNC_INTERVAL_S:
            os.fsync(self._fd)
            self._synced_s = time.monotonic()

    def _scan(self, max_number: int) -> tuple["array[int]", int]:
        """Read all records; return their fingerprints by line number (0: no record), and their total size in bytes.

        Line numbers above `max_number` are refused.
        """
        fingerprints: array[int] = array("Q")
        size = 0
        with open(self._fd, "rb", closefd=False) as file:
            for record in file:
                if not record.endswith(b"\n"):
                    if not record.startswith(_RECORD_START[: len(record)]):
                        raise self._foreign("its last line is no record of a batch")
                    break
                head = _RECORD.match(record)
                if head is None or not record.endswith(b"}\n"):
                    raise self._foreign(f"its line {self.num_records + 1} is no record of a batch")
                if (number := int(head[1])) > max_number:
                    raise self._foreign("it has records of lines that the input does not have")
                fingerprints.extend([0] * (number + 1 - len(fingerprints)))
                if fingerprints[number]:
                    raise self._foreign(f"it has two records of line {number}")
                fingerprints[number] = int(head[3], 16)
                self.num_records += 1
                self.num_errors += head[2] != b"200"
                size += len(record)
        return fingerprints, size

    def _foreign(self, reason: str) -> ConfigError:
        """Return the error for a file with records of another batch."""
        return ConfigError(f"{self.path} does not belong to this batch: {reason}; choose another output file")


def numbered_lines(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, content) for every line that is not blank; long lines are cut.

    A line is too long if its content has more than `MAX_LINE_BYTES`.
    """
    lines.seek(0)
    for number in itertools.count(1):
        raw = part = lines.readline(MAX_LINE_BYTES + 2)
        if not raw:
            return
        while part and not part.endswith(b"\n"):
            part = lines.readline(MAX_LINE_BYTES)
        if content := raw.strip():
            yield number, content


def fingerprint_of(raw: bytes, key: bytes) -> str:
    """Return an input line's fingerprint under the run's seed: 16 hexadecimal digits."""
    return hashlib.blake2b(raw, digest_size=8, key=key, person=b"batch line").hexdigest()


def make_record(
    number: int, custom_id: str | int | None, fingerprint: str, status_code: int, body: Json, error: Json | None
) -> Json:
    """Return a record in OpenAI's batch format, with the fields in the order that `resume` expects."""
    response = {"status_code": status_code, "request_id": fingerprint, "body": body}
    return {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
