"""Errors raised to users. Messages say what is required, what was given, and what to change."""

import difflib
from collections.abc import Collection, Iterable
from itertools import islice

_MOST_NAMES, _LONGEST_NAME = 4, 64  # a client must not keep the server comparing names


class ConfigError(ValueError):
    """Error of the configuration: the engine cannot start; raised before any request is accepted.

    Args:
        message: text that says what must hold, what came, and what to change.
        about: fields of EngineConfig that the message is about, where a command needs them: `plan` sets some itself,
            and says so.
    """

    def __init__(self, message: str, *, about: Collection[str] = ()) -> None:
        super().__init__(message)
        self.about = frozenset(about)


class RequestError(ValueError):
    """Error of one request, which is refused; the engine and all other requests continue."""


class EngineDiedError(RequestError):
    """Error of a request that several engines died of, one after the other, each while serving it alone."""


class PeerLostError(RuntimeError):
    """Loss of a process of this run with its devices; the run must be restarted."""


def brief(value: object) -> str:
    """Return the value in a short form for error messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the known names that are like unknown ones, or "" if there are none."""
    short = (name for name in unknown if len(name) <= _LONGEST_NAME)
    names, close = sorted(known), list[str]()
    for name in islice(short, _MOST_NAMES):
        close += difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {' and '.join(dict.fromkeys(close))}?)" if close else ""


def install_extra(extra: str) -> str:
    """Return the advice to install a missing package with an extra of this one."""
    return f"install the extra {extra}: pip install 'jaxserve[{extra}]', or in a clone pip install -e '.[{extra}]'"
