"""Checks of a batch's input and output paths, before anything is served."""

import stat
from pathlib import Path
from typing import IO

from jaxserve.errors import ConfigError
from jaxserve.system.whole_file import check_writable


def open_input(path: Path) -> IO[bytes]:
    """Open the input file of a batch; ConfigError unless it is a regular file that can be read."""
    must = f"the batch input must be a regular file that can be read, got {path}"
    try:
        mode = path.stat().st_mode  # looked at before it is opened, as a pipe could block
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{must}, a directory; name a file in it")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{must}, a device or a pipe, which no restart can read again; write its lines to a file")
        return path.open("rb")
    except PermissionError as error:
        raise ConfigError(f"{must}: {error.strerror}; change its permissions") from error
    except OSError as error:
        raise ConfigError(f"{must}: {error.strerror}; check the path") from error


def check_output(path: Path, in_path: Path) -> None:
    """Raise ConfigError unless a batch's output `path` is a regular file to resume, or can be created."""
    must, other = f"the batch output must be a regular file that can be written, got {path}", "choose another output"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        _check_new(path, must, other)
        return
    except OSError as error:
        raise ConfigError(f"{must}: {error.strerror}; {other}") from error
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{must}, a directory; name a file in it, such as {path / 'results.jsonl'}")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{must}, a device or a pipe, which no restart can read again; {other}")
    if in_path.exists() and path.samefile(in_path):
        raise ConfigError(f"the batch output must be another file than the input, got {path} as both; {other}")


def _check_new(path: Path, must: str, other: str) -> None:
    """Raise ConfigError if a new file cannot be created; the message begins with `must` and ends with `other`."""
    folder = path.resolve().parent  # folder of the file that a link names
    if not folder.is_dir():
        found = next(each for each in (folder, *folder.parents) if each.exists())
        if not found.is_dir():
            raise ConfigError(f"{must}: {found} is no directory; {other}")
        raise ConfigError(f"{must}: there is no directory {folder}; create it, or {other}")
    try:
        check_writable(path.resolve())
    except OSError as error:
        raise ConfigError(f"{must}: {error.strerror} in {folder}; {other}") from error
