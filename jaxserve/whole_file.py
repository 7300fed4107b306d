"""Files that appear whole: readers see the content of before or that of after, and a kill leaves the former."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".jaxserve-"
STALE_S = 3600.0  # no write takes as long: what is older was left by a kill


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    with _beside(path) as own:
        own.write_bytes(content)
        own.replace(path)


def check_writable(path: Path) -> None:
    """OSError where `write_whole` could not write the file."""
    with _beside(path) as own:
        own.touch()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A place of our own on the same disk; those that kills have left there vanish."""
    for left in path.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be faster
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent) as directory:
        yield Path(directory) / path.name
