"""Errors raised to users. Messages name the rule, the given value and the remedy."""

import difflib
from collections.abc import Collection, Iterable
from itertools import islice, takewhile

_BRIEF_CHARS = 80
_MAX_NAMES, _MAX_NAME_LEN = 4, 64  # a client must not keep the server comparing names


class ConfigError(ValueError):
    """Invalid configuration: the engine cannot start; raised before any request is accepted.

    Args:
        message: text with the rule, the given value and the remedy.
        about: EngineConfig fields that the message concerns, for commands such as `plan`, which sets some itself.
    """

    def __init__(self, message: str, *, about: Collection[str] = ()) -> None:
        super().__init__(message)
        self.about = frozenset(about)


class RequestError(ValueError):
    """Invalid request, which is refused; the engine and all other requests continue."""


class BusyError(RequestError):
    """Request that is refused only now, as others use what it needs; the client may send it again."""


class FaultError(RequestError):
    """Request that fails by a fault of this installation: sent again, it fails again until an operator mends that."""


class PromptTooLongError(RequestError):
    """Prompt with more tokens than the model takes.

    Args:
        message: text with the rule, the given value and the remedy.
        num_tokens: number of prompt tokens; a lower bound if the prompt was not encoded.
        max_tokens: maximum number of prompt tokens.
    """

    def __init__(self, message: str, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        """Return the constructor call that rebuilds the error in another process."""
        return type(self), (str(self), self.num_tokens, self.max_tokens)


class EngineDiedError(RequestError):
    """Request whose engine process has died; in a fleet, a request that has killed several engines."""


class PeerLostError(RuntimeError):
    """Loss of another process in this run with its devices; the run must be restarted."""


def error_at(where: str, error: RequestError) -> RequestError:
    """Return an error whose message begins with where it occurred; one that is not the request's fault stays such."""
    kind = next((each for each in (BusyError, FaultError, EngineDiedError) if isinstance(error, each)), RequestError)
    return kind(f"{where}: {error}" if where else str(error))


def brief(value: object) -> str:
    """Return a short representation of a value for error messages."""
    text = repr(_begun(value, [_BRIEF_CHARS]))
    return text if len(text) <= _BRIEF_CHARS else f"{text[: _BRIEF_CHARS - 3]}..."


def _begun(value: object, left: list[int]) -> object:
    """Return a prefix of a value, nested ones included, that has all that `brief` shows: clients send megabytes.

    Args:
        value: the value.
        left: maximum number of further values; each takes at least one character.
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
    """Return " (did you mean ...?)" with the known names similar to unknown ones, or "" if there are none."""
    short = (name for name in unknown if len(name) <= _MAX_NAME_LEN)
    names, close = sorted(known), list[str]()
    for name in islice(short, _MAX_NAMES):
        close += difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {' and '.join(dict.fromkeys(close))}?)" if close else ""


def install_extra(extra: str) -> str:
    """Return the advice to install a missing package through an extra."""
    return f"install the extra {extra}: pip install 'jaxserve[{extra}]', or in a clone pip install -e '.[{extra}]'"
