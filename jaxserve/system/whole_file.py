"""Atomic replacement of files: readers see either the old or the new content, and after a kill the old one."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".jaxserve-"
STALE_S = 3600.0  # longer than any write: older temporary files were left by a kill


def write_whole(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Replace the file's content atomically.

    Args:
        path: the file.
        content: its new content.
        is_durable: True to return after the disk has it, so that it also outlives the machine's power.

    Raises:
        OSError: the file cannot be written; it is unchanged.
    """
    with _temporary_sibling(path) as temporary:
        temporary.write_bytes(content)
        if is_durable:
            _sync(temporary)
        temporary.replace(path)
    if is_durable and os.name != "nt":  # Windows cannot open directories
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_writable(path: Path) -> None:
    """Raise OSError if `write_whole` could not write the file."""
    with _temporary_sibling(path) as temporary:
        temporary.touch()


@contextlib.contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield a temporary path on the same disk as `path`, and delete old ones that killed processes have left."""
    for left in path.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may delete it first
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent) as directory:
        yield Path(directory) / path.name
