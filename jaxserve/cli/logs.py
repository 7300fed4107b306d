"""The log of a command that loads an engine."""

import contextlib
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_log_level(parser: ArgumentParser, default: str | None = None) -> None:
    """Add `--log-level`."""
    shown = "warnings and errors, without" if default is None else default
    text = f"write what jaxserve logs from this level on to stderr, with times (default: {shown})"
    parser.add_argument("--log-level", type=str.lower, choices=_LEVELS, default=default, help=text)


@contextlib.contextmanager
def log_as_asked(args: Namespace) -> Iterator[None]:
    """Write the log as `--log-level` says, where the command has the flag and it was given."""
    level = getattr(args, "log_level", None)
    if level is None:
        yield
        return
    logger, handler = logging.getLogger("jaxserve"), logging.StreamHandler(sys.stderr)
    before = logger.level
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
