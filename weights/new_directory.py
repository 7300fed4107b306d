"""Directories that appear complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import IO

from jaxserve.weights.errors import CheckpointError


def require_free(target: FilePath) -> None:
    """Raise CheckpointError if `target` is a file or a directory with content."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} must be absent or an empty directory, got something there; remove it first")


@contextmanager
def new_directory(target: FilePath) -> Iterator[FilePath]:
    """Yield a hidden directory next to `target`, which becomes `target` on success and is removed on failure.

    A directory left by a killed process is removed first: its lock file admits one process at a time.

    Raises:
        CheckpointError: `target` is taken, or another process is writing it.
        OSError: the directory cannot be written.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".converting-{target.name}"
    with _locked(scratch.with_name(f"{scratch.name}.lock"), target):
        require_free(target)
        _remove(scratch)
        try:
            scratch.mkdir()
            yield scratch
            if target.exists():
                target.rmdir()
            scratch.rename(target)
        finally:
            _remove(scratch)


def _remove(directory: FilePath) -> None:
    """Remove a directory with its content, if it exists."""
    if directory.exists():
        shutil.rmtree(directory)


@contextmanager
def _locked(path: FilePath, target: FilePath) -> Iterator[None]:
    """Hold a lock on a temporary file; the system releases it when the process is killed."""
    import fcntl  # noqa: PLC0415 - not available on Windows

    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another process is writing {target}; wait for it, or choose another directory"
                ) from None
            if _is_at(path, file):  # else the previous holder removed the file while it was opened here
                try:
                    yield
                finally:
                    path.unlink()
                return


def _is_at(path: FilePath, file: IO[bytes]) -> bool:
    """Return whether an open file is still the one at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
