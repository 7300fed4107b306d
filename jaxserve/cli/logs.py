"""Log output of commands that load an engine."""

import contextlib
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_log_level(parser: ArgumentParser, default: str | None = None) -> None:
    """Add `--log-level`; without a default, warnings are logged without times."""
    shown = "warning, without times" if default is None else default
    text = f"minimum log level; the log goes to stderr (default: {shown})"
    parser.add_argument("--log-level", type=str.lower, choices=_LEVELS, default=default, help=text)


@contextlib.contextmanager
def log_at_level(args: Namespace) -> Iterator[None]:
    """Write jaxserve's log to stderr within the context, if `--log-level` is given or has a default."""
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
