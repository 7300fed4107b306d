"""Translation of requests to chats: the parts that /v1/responses and /v1/messages share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxserve.errors import RequestError
from jaxserve.openai.errors import Json, as_bad_request
from jaxserve.openai.fields import SWITCH, TEXT, ObjectFields, needed, only
from jaxserve.openai.format import CHAT_FIELDS, SAMPLING
from jaxserve.openai.reuse_hints import HINT_FIELDS

_NOT_SHARED = {"n", "stop", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side"}
_SHARED = (  # chat fields that the other interfaces also have, most of them vLLM's
    *("model", "stream", "cache_salt", "priority", "chat_template_kwargs", "timeout"),
    *(name for name in SAMPLING if name not in _NOT_SHARED),
    *("structured_outputs", "request_id", *HINT_FIELDS, "spaces_between_special_tokens", "watermarking"),
    *("vllm_xargs", "media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params"),
)
SHARED_FIELDS: ObjectFields = {name: CHAT_FIELDS[name] for name in _SHARED}
FUNCTION: ObjectFields = {  # fields of a callable function
    "name": needed(TEXT),
    "description": TEXT,
    "strict": SWITCH,
    "defer_loading": only(False),
    "allowed_callers": only(["direct"]),
}
CALLED_DIRECTLY: ObjectFields = {"caller": only({"type": "direct"})}


class Translation(NamedTuple):
    """Chat that is equivalent to a request of another interface.

    Attributes:
        chat: body of the chat, for `parse_body`.
        ignored: the request's accepted fields without effect.
        names: the request's field names by their names in the chat, in addition to the interface's.
        drops_turns: True to leave out the oldest turns if the chat is too long.
    """

    chat: Json
    ignored: frozenset[str]
    names: Mapping[str, str] = {}
    drops_turns: bool = False


def shared_values(given: Json) -> Json:
    """Return the fields of a request that need no translation: /v1/responses and /v1/messages name them as chats do."""
    return {name: given[name] for name in _SHARED if name in given}


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Replace a chat's field names in request errors inside the context by the names in the original request.

    Args:
        names: field names in the request by their names in the chat.
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
