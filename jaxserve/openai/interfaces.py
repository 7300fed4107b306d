"""Interfaces: how each path reads requests, and the form of its replies and errors."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxserve.openai import messages, responses
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError, error_body
from jaxserve.openai.format import (
    CHAT,
    CLASSIFICATION,
    COMPLETIONS,
    EMBEDDINGS,
    ParsedRequest,
    naming_fields,
    parse_body,
)
from jaxserve.openai.message_replies import MessageReply, message_error_body
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES, message_to_chat
from jaxserve.openai.pooling import TASKS, PoolingReply, parse_pooling
from jaxserve.openai.replies import Reply
from jaxserve.openai.response_replies import ResponseReply
from jaxserve.openai.responses import INPUT_TOKENS, RESPONSES, response_to_chat
from jaxserve.openai.scoring import SCORING_PATHS, ScoringReply, parse_scoring
from jaxserve.openai.translation import Translation, naming
from jaxserve.text.messages import content_text

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.pooling_params import Pooler
    from jaxserve.api.stream_events import Increment
    from jaxserve.errors import RequestError
    from jaxserve.text.tokenizer import Tokenizer

Json = dict[str, Any]
INVOCATIONS = "/invocations"  # path of all SageMaker requests
ANTHROPIC_OVERLOADED = 529  # Anthropic's status under load, known to its clients


@runtime_checkable
class AnyReply(Protocol):
    """Reply to one request, whole or streamed."""

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply."""

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply, with iterators for long lists."""

    def first_events(self) -> Iterator[bytes]:
        """Yield the events before any output."""

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the events for new increments."""

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the events that end a stream."""

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events that end a failed stream."""


@dataclass(frozen=True, slots=True)
class Interface:
    """Form of one path's requests and replies.

    Attributes:
        url: endpoint as which `parse_body` reads requests, COMPLETIONS or CHAT.
        prefix: prefix of the engine's request ids.
        translate: function from a body to its chat; None if bodies need no translation.
        names: field names in requests by their names in chats, if they differ.
        reply: function from the reply in OpenAI's form and the request's body to the path's reply.
    """

    url: str
    prefix: str
    translate: Callable[[Json], Translation] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    reply: Callable[[Reply, Json], AnyReply] = lambda reply, _body: reply

    def read(
        self, body: Json, parse: Callable[[str, Json], ParsedRequest], max_model_len: int | None = None
    ) -> ParsedRequest:
        """Return the request in a body.

        Args:
            body: the body, of this interface.
            parse: `parse_body` with all arguments but the endpoint and the body.
            max_model_len: maximum number of tokens in prompt and output, for requests that allow leaving out old
                turns; None to leave none out.

        Raises:
            RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
        """
        if self.translate is None:
            return parse(self.url, body)
        translation = self.translate(body)
        with self.naming():
            if translation.drops_turns and max_model_len is not None:
                request = _fitting(
                    translation.chat, lambda chat: _in_order(chat, partial(parse, self.url)), max_model_len
                )
            else:
                request = _in_order(translation.chat, partial(parse, self.url))
        names = {**self.names, **translation.names}
        own = {names.get(name, name) for name in request.ignored}
        return replace(request, ignored=tuple(sorted(own | translation.ignored)))

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the field to errors, under its name in requests."""
        with naming(self.names), naming_fields(self.url):
            yield

    def new_reply(
        self,
        request: ParsedRequest,
        body: Json,
        tokenizer: Tokenizer | None,
        response_id: str,
        *,
        created_s: int,
        fingerprint: str | None = None,
    ) -> AnyReply:
        """Return a new reply to a request."""
        reply = Reply(request, tokenizer, response_id=response_id, created_s=created_s, fingerprint=fingerprint)
        return self.reply(reply, body)


def _in_order(chat: Json, parse: Callable[[Json], ParsedRequest]) -> ParsedRequest:
    """Return a chat's request, with all instructions at the beginning if its template wants them there.

    Agents send instructions between turns, which some templates refuse.
    """
    try:
        return parse(chat)
    except BadRequestError as error:
        messages = chat["messages"]
        instructions = [message["content"] for message in messages if message["role"] == "system"]
        is_in_order = all(message["role"] != "system" for message in messages[1:])
        if error.param != "messages" or error.too_long is not None or is_in_order:
            raise
        first = {"role": "system", "content": "\n\n".join(map(content_text, instructions))}
        return parse(chat | {"messages": [first, *(m for m in messages if m["role"] != "system")]})


def _fitting(chat: Json, parse: Callable[[Json], ParsedRequest], max_model_len: int) -> ParsedRequest:
    """Return a chat's request, without its oldest turns if the output would not fit otherwise.

    Instructions at the beginning stay, and so does the last turn, however long it is.
    """
    messages, wanted = chat["messages"], chat.get("max_tokens")
    num_output = wanted if isinstance(wanted, int) and 0 < wanted < max_model_len else 1
    head = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [head, *(i for i, message in enumerate(messages) if i > head and message["role"] == "user")]
    fitting: dict[int, ParsedRequest] = {}

    def is_too_long(start: int) -> bool:
        try:
            request = parse(chat | {"messages": messages[:head] + messages[start:]})
        except BadRequestError as error:
            if error.too_long is None:
                raise
            return True
        (prompt,) = request.prompts
        fitting[start] = request
        return len(prompt) + num_output > max_model_len

    if is_too_long(starts[0]):
        first = bisect.bisect_left(starts, True, lo=min(1, len(starts) - 1), key=lambda start: not is_too_long(start))
        start = starts[min(first, len(starts) - 1)]
        return fitting[start] if start in fitting else parse(chat | {"messages": messages[:head] + messages[start:]})
    return fitting[starts[0]]


def parse(url: str, body: object, context: BodyContext) -> ParsedRequest:
    """Return the request in a body that has OpenAI's or vLLM's form.

    Raises:
        RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
    """
    if url in SCORING_PATHS:
        return parse_scoring(url, body, context)
    return parse_pooling(url, body, context) if url in TASKS else parse_body(url, body, context)


_RESPONSES = Interface(CHAT, "resp", response_to_chat, responses.NAMES, ResponseReply)
_MESSAGES = Interface(CHAT, "msg", message_to_chat, messages.NAMES, MessageReply)
INTERFACES = {
    COMPLETIONS: Interface(COMPLETIONS, "cmpl"),
    CHAT: Interface(CHAT, "chatcmpl"),
    **{path: Interface(path, "pool", reply=PoolingReply) for path in TASKS},
    **{path: Interface(path, "score", reply=ScoringReply) for path in SCORING_PATHS},
    RESPONSES: _RESPONSES,
    INPUT_TOKENS: _RESPONSES,
    MESSAGES: _MESSAGES,
    COUNT_TOKENS: replace(_MESSAGES, translate=partial(message_to_chat, has_output=False)),
}


def invoked_path(path: str, body: Json, pooler: Pooler | None) -> str:
    """Return the path of a request; at /invocations the path that fits its fields.

    Args:
        path: path of the HTTP request.
        body: the body.
        pooler: pooling of the model; None if it generates text.
    """
    if path != INVOCATIONS:
        return path
    if pooler is None:
        return CHAT if "messages" in body else COMPLETIONS
    if body.keys() & {"query", "queries", "text_1", "data_1"}:
        return "/rerank" if "query" in body else "/score"
    return CLASSIFICATION if pooler.num_labels else EMBEDDINGS


def error_status_at(path: str, error: BadRequestError) -> int:
    """Return the HTTP status for an error at a path."""
    is_overload = path.startswith(MESSAGES) and error.status_code == 503
    return ANTHROPIC_OVERLOADED if is_overload else error.status_code


def error_body_at(path: str, error: RequestError) -> Json:
    """Return the reply body for an error at a path, whether or not the path exists."""
    form = message_error_body if path.startswith(MESSAGES) else error_body
    return form(error)
