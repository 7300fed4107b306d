"""Atomic replacement of files: readers see either the old or the new content, and after a kill the old one."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".jaxserve-"
STALE_S = 3600.0  # longer than any write: older temporary files were left by a kill


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file's content atomically.

    Raises:
        OSError: the file cannot be written; it is unchanged.
    """
    with _temporary_sibling(path) as temporary:
        temporary.write_bytes(content)
        temporary.replace(path)


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
