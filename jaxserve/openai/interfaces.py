"""Interfaces: how each path reads requests, and the form of its replies and errors."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from jaxserve.openai import messages, responses
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError, error_body
from jaxserve.openai.format import (
    CHAT,
    CLASSIFICATION,
    COMPLETIONS,
    EMBEDDINGS,
    SCORING_PATHS,
    ParsedRequest,
    naming_fields,
    parse_body,
)
from jaxserve.openai.message_replies import MessageReply, message_error_body
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES, message_to_chat
from jaxserve.openai.pooling import TASKS, PoolingReply, parse_pooling
from jaxserve.openai.replies import AnyReply, Reply
from jaxserve.openai.response_replies import ResponseReply
from jaxserve.openai.responses import INPUT_TOKENS, RESPONSES, response_to_chat
from jaxserve.openai.scoring import ScoringReply, parse_scoring
from jaxserve.openai.translation import Translation, naming
from jaxserve.text.messages import content_text

if TYPE_CHECKING:
    from jaxserve.api.pooling_params import Pooler
    from jaxserve.errors import RequestError
    from jaxserve.text.tokenizer import Tokenizer

Json = dict[str, Any]
INVOCATIONS = "/invocations"  # path of all SageMaker requests
ANTHROPIC_OVERLOADED = 529  # Anthropic's status under load, known to its clients


@dataclass(frozen=True, slots=True)
class Interface:
    """Protocol of one HTTP path: functions that read its requests and write its replies.

    Attributes:
        url: path whose fields `parse` expects in a body, after `translate`.
        prefix: prefix of the engine's request ids.
        translate: function from a body to the body of an equivalent chat; None if `parse` reads bodies as they are.
        names: field names in requests by their names in chats, if they differ.
        reply: function from OpenAI's reply to the request, and the request's body, to the path's reply.
    """

    url: str
    prefix: str
    translate: Callable[[Json], Translation] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    reply: Callable[[Reply, Json], AnyReply] = lambda reply, _body: reply

    def read(
        self, body: Json, parse: Callable[[str, Json], ParsedRequest], max_model_len: int | None = None
    ) -> ParsedRequest:
        """Translate and parse a request body of this path.

        Args:
            body: JSON object that the client has sent.
            parse: function `parse` with all arguments except the path and the body.
            max_model_len: maximum number of tokens in prompt and output; requests with `truncation: "auto"` lose their
                oldest turns to fit. None to drop no turns.

        Raises:
            RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
        """
        if self.translate is None:
            return parse(self.url, body)
        translation = self.translate(body)
        with self.naming():
            parse_chat = partial(_parse_chat, parse=partial(parse, self.url))
            if translation.drops_turns and max_model_len is not None:
                request = _parse_newest_turns(translation.chat, parse_chat, max_model_len)
            else:
                request = parse_chat(translation.chat)
        names = {**self.names, **translation.names}
        own = {names.get(name, name) for name in request.ignored}
        return replace(request, ignored=tuple(sorted(own | translation.ignored)))

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Make request errors inside the context name the wrong body field, under this path's name for it."""
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
        """Return the object that writes a request's reply, whole or streamed.

        Args:
            request: parsed request.
            body: body from which it was parsed; some replies repeat its fields.
            tokenizer: the model's tokenizer; None if requests have token ids.
            response_id: unique name, without the path's prefix.
            created_s: arrival time, in seconds since 1970.
            fingerprint: name of the engine's configuration, from `system_fingerprint`.
        """
        reply = Reply(request, tokenizer, response_id=response_id, created_s=created_s, fingerprint=fingerprint)
        return self.reply(reply, body)


def _parse_chat(chat: Json, parse: Callable[[Json], ParsedRequest]) -> ParsedRequest:
    """Parse a chat; if its template refuses system messages between turns, join them into one at the beginning.

    Agents send such instructions.

    Args:
        chat: body of the chat.
        parse: function from a chat's body to its request.
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


def _parse_newest_turns(chat: Json, parse: Callable[[Json], ParsedRequest], max_model_len: int) -> ParsedRequest:
    """Parse a chat without the minimum number of oldest turns that makes prompt and output fit in `max_model_len`.

    System messages at the beginning stay, and so does the last turn, however long it is.

    Args:
        chat: body of the chat.
        parse: function from a chat's body to its request.
        max_model_len: maximum number of tokens in prompt and output.
    """
    messages, wanted = chat["messages"], chat.get("max_tokens")
    num_output = wanted if isinstance(wanted, int) and 0 < wanted < max_model_len else 1
    head = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [head, *(i for i, message in enumerate(messages) if i > head and message["role"] == "user")]

    @cache
    def parse_from(start: int) -> ParsedRequest:
        return parse(chat | {"messages": messages[:head] + messages[start:]})

    def fits(start: int) -> bool:
        try:
            (prompt,) = parse_from(start).prompts
        except BadRequestError as error:
            if error.too_long is None:
                raise
            return False
        return len(prompt) + num_output <= max_model_len

    if fits(starts[0]):
        return parse_from(starts[0])
    first = bisect.bisect_left(starts[:-1], True, lo=min(1, len(starts) - 1), key=fits)
    return parse_from(starts[first])


def parse(url: str, body: object, context: BodyContext) -> ParsedRequest:
    """Parse a body of one of OpenAI's or vLLM's paths, `url`, for the model in `context`.

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
    """Return the path that serves a request: `path`, or the one that the body's fields suggest for /invocations.

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
    """Return the HTTP status that clients of a path expect for an error."""
    is_overload = path.startswith(MESSAGES) and error.status_code == 503
    return ANTHROPIC_OVERLOADED if is_overload else error.status_code


def error_body_at(path: str, error: RequestError) -> Json:
    """Return the JSON body for an error in the format of a path, which need not exist: Anthropic's or OpenAI's."""
    form = message_error_body if path.startswith(MESSAGES) else error_body
    return form(error)
