"""Errors raised to users. Messages say what is required, what was given, and what to change."""

import difflib
from collections.abc import Collection, Iterable
from itertools import islice, takewhile

_BRIEF_CHARS = 80
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


class PromptTooLongError(RequestError):
    """Error of a prompt that has more tokens than the model takes.

    Args:
        message: text that says what must hold, what came, and what to change.
        num_tokens: tokens of the prompt; of one that was not encoded, a number that it has at least.
        max_tokens: the most tokens that a prompt may have.
    """

    def __init__(self, message: str, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        """Return what rebuilds the error in another process."""
        return type(self), (str(self), self.num_tokens, self.max_tokens)


class EngineDiedError(RequestError):
    """Error of a request whose engine's process has died; in a fleet, of one that several engines died of."""


class PeerLostError(RuntimeError):
    """Loss of a process of this run with its devices; the run must be restarted."""


def brief(value: object) -> str:
    """Return the value in a short form for error messages."""
    text = repr(_begun(value, [_BRIEF_CHARS]))
    return text if len(text) <= _BRIEF_CHARS else f"{text[: _BRIEF_CHARS - 3]}..."


def _begun(value: object, left: list[int]) -> object:
    """Return as much of a value as its short form shows: clients send values of megabytes.

    Args:
        value: the value.
        left: number of values that may still be looked at, each of which is a character at least.
    """
    left[0] -= 1
    if type(value) is str or type(value) is bytes:
        return value[:_BRIEF_CHARS]
    if type(value) is list or type(value) is tuple:
        begun = [_begun(each, left) for each in takewhile(lambda _: left[0] > 0, value)]
        return begun if type(value) is list else tuple(begun)
    if type(value) is dict:
        return {
            _begun(name, left): _begun(each, left) for name, each in takewhile(lambda _: left[0] > 0, value.items())
        }
    return value


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
