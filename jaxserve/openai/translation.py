"""Translation of other interfaces' requests to chats: what their request sides share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import RequestError, brief
from jaxserve.openai.errors import BadRequestError, as_bad_request
from jaxserve.openai.format import CHAT, WITHOUT_EFFECT
from jaxserve.openai.refusals import unknown_fields

Json = dict[str, Any]
SAMPLING = (  # vLLM's further fields of chats, which the other interfaces have too
    *("seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "stop_token_ids", "skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids"),
    *("bad_words", "structured_outputs", "request_id", "session_id", "spaces_between_special_tokens", "watermarking"),
    *("vllm_xargs", "media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params"),
)


class Translation(NamedTuple):
    """Chat that a request asks for.

    Attributes:
        chat: body of the chat, for `parse_body`.
        ignored: fields of the request that were accepted and change nothing.
        names: names in the request of fields of the chat, where they are others than the interface's.
        drops_turns: True to leave out the oldest turns of a chat that is too long.
    """

    chat: Json
    ignored: frozenset[str]
    names: Mapping[str, str] = {}
    drops_turns: bool = False


class Fields:
    """Fields of an object in a body, each of which must be taken or refused.

    Args:
        content: the object.
        where: name of the object for messages, such as "tool_choice".
        param: field of the body that errors name; None if it is the field itself.
    """

    def __init__(self, content: object, where: str, param: str | None) -> None:
        if not isinstance(content, dict):
            raise BadRequestError(f"{where} must be an object, got {brief(content)}", param)
        self._left = {str(name): value for name, value in content.items() if value is not None}
        self._where, self._param = where, param
        self._known: set[str] = set()  # fields of which some value has an effect

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field's value, `default` if it is not given or null; BadRequestError if it is of another type."""
        self._known.add(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        is_number = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if not is_number and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise BadRequestError(
                f"{self._name(name)} must be of type {kind.__name__}, got {brief(value)}", self._param or name
            )
        return value

    def need(self, name: str, kind: type) -> Any:
        """Return a field's value; BadRequestError if it is not given, null or of another type."""
        value = self.take(name, kind)
        if value is None:
            raise BadRequestError(
                f"{self._name(name)} must be given", self._param or name, "missing_required_parameter"
            )
        return value

    def any(self, name: str) -> Any:
        """Return a field's value of whatever type; None if it is not given."""
        self._known.add(name)
        return self._left.pop(name, None)

    def of_chats(self, *names: str) -> Json:
        """Return fields that mean the same in a chat, by their names, as far as they are given."""
        self._known.update(name for name in names if name not in WITHOUT_EFFECT[CHAT])
        return {name: self._left.pop(name) for name in names if name in self._left}

    def choose(self, name: str, *choices: str) -> str | None:
        """Return a field's value; None if it is not given, BadRequestError if it is none of `choices`."""
        self._known.add(name)
        value: str | None = self._left.get(name)
        self.demand(name, *choices)
        return value

    def skip(self, *names: str) -> set[str]:
        """Leave fields without effect; return those that are given."""
        return {name for name in names if self._left.pop(name, None) is not None}

    def demand(self, name: str, *allowed: Any, why: str = "") -> None:
        """Check that a field, if it is given, has one of the values that ask for what is done anyway."""
        if name in self._left and self._left.pop(name) not in allowed:
            must = " or ".join(map(repr, allowed)) if allowed else "left out"
            reason = f": {why}" if why else ""
            raise BadRequestError(
                f"{self._name(name)} must be {must}{reason}", self._param or name, "unsupported_value"
            )

    def end(self) -> None:
        """Raise BadRequestError if a field is left that nobody has taken."""
        if self._left:
            unknown = sorted(self._left)
            raise unknown_fields(self._where, unknown, self._known, self._param or unknown[0])

    def _name(self, name: str) -> str:
        return f"{self._where}.{name}" if self._param else name


def by_type(
    content: object, readers: Mapping[str, Callable[[Fields], Any]], where: str, param: str, default: str | None = None
) -> Any:
    """Return what the reader of an object's `type` makes of the object.

    Args:
        content: the object.
        readers: reader of each supported type; it takes all fields but `type`.
        where: name of the object for messages.
        param: field of the body that errors name.
        default: type of objects without one.
    """
    fields = Fields(content, where, param)
    kind = fields.take("type", str, default)
    if kind not in readers:
        message = f"{where} must be of the types {sorted(readers)}, got {brief(kind)}; others are not supported"
        raise BadRequestError(message, param, "unsupported_value")
    read = readers[kind](fields)
    fields.end()
    return read


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Say the request's own names of fields in errors of its chat.

    Args:
        names: name of a field in the request by its name in the chat.
    """
    try:
        yield
    except RequestError as raised:
        error = as_bad_request(raised)
        if error.param is not None and error.param in names:
            error.message = re.sub(rf"\b{error.param}\b", names[error.param], error.message, count=1)
            error.param = names[error.param]
        if error is raised:
            raise
        raise error from raised
