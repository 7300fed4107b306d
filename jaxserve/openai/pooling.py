"""Requests and replies of models that pool: OpenAI's embeddings, and vLLM's other paths."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.api.pooling_params import CLASSIFY, EMBED, PoolingParams
from jaxserve.openai.chats import PROMPT_FIELDS, allow_any, read_prompt
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import (
    CLASSIFICATION,
    EMBEDDINGS,
    POOLING,
    POOLING_PARAMETERS,
    ParsedRequest,
    naming_fields,
    read_fields,
)
from jaxserve.openai.prompts import Prompt, completion_prompts, plain_prompts
from jaxserve.openai.tools import Tools, detected_format

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.stream_events import Increment
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.text.tokenizer import Tokenizer

TASKS = {EMBEDDINGS: EMBED, POOLING: None, CLASSIFICATION: CLASSIFY}  # tasks by path; None is the model's own


def parse_pooling(
    url: str,
    body: object,
    own_name: str,
    model_names: Sequence[str],
    labels: Sequence[str] = (),
    *,
    tokenizer: Tokenizer | None = None,
    may_stream: bool = False,
    takes_templates: bool = True,
    check_prompt: Callable[[str], None] = allow_any,
) -> ParsedRequest:
    """Check a request body and convert it to prompts and parameters.

    Args:
        url: one of `TASKS`.
        body: request body, parsed from JSON.
        own_name: name of the model if a request gives none.
        model_names: accepted values of `model`; if empty, any name is accepted.
        labels: names of the model's labels.
        tokenizer: tokenizer that renders and encodes chats.
        may_stream: the same as in `parse_body`.
        takes_templates: the same as in `parse_body`.
        check_prompt: the same as in `parse_body`; not of a chat that is truncated.

    Raises:
        BadRequestError: the body cannot be served.
    """
    given, ignored = read_fields(url, body, own_name, model_names, may_stream=may_stream)
    with naming_fields(url):
        options = {"task": TASKS[url]} | {name: given[name] for name in POOLING_PARAMETERS[url] if name in given}
        params = PoolingParams(**options)
    return ParsedRequest(
        url,
        given["model"],
        _prompts(given, tokenizer, takes_templates=takes_templates, check_prompt=check_prompt),
        params.sampling_params(),
        given.get("cache_salt"),
        request_id=given.get("request_id", ""),
        priority=given.get("priority"),
        pooling=params,
        labels=tuple(labels),
        is_base64=given.get("encoding_format") == "base64",
        ignored=tuple(ignored),
    )


def _prompts(
    given: Json, tokenizer: Tokenizer | None, *, takes_templates: bool, check_prompt: Callable[[str], None]
) -> list[Prompt]:
    """Return the prompts of a body: its input, or a chat."""
    if "messages" not in given:
        if unread := sorted(given.keys() & PROMPT_FIELDS.keys() - {"add_special_tokens"}):
            raise BadRequestError(f"{unread[0]} needs messages, and the body has input", unread[0])
        prompts = completion_prompts(given.get("input"), "input")
        if given.get("add_special_tokens", True):
            return prompts
        check_text = allow_any if "truncate_prompt_tokens" in given else check_prompt
        return plain_prompts(prompts, tokenizer, check_text, "input")
    if "input" in given:
        raise BadRequestError("a body must have input or messages, got both", "input")
    if tokenizer is None:
        raise BadRequestError("messages needs a tokenizer, and the engine runs with skip_tokenizer_init", "messages")
    chat = read_prompt(
        given,
        tokenizer,
        detected_format(tokenizer),
        Tools(),
        takes_templates=takes_templates,
        check_prompt=allow_any if "truncate_prompt_tokens" in given else check_prompt,
        adds_header=False,
    )
    return [chat.token_ids]


class WholeReply:
    """Reply that is whole: there is nothing to stream."""

    def first_events(self) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())


class PoolingReply(WholeReply):
    """Reply to one request for vectors.

    Args:
        request: the request.
        response_id: name of the reply.
        created_s: time of the request, in seconds since 1970.
    """

    def __init__(self, request: ParsedRequest, response_id: str, created_s: int) -> None:
        self._request = request
        prefix = {EMBEDDINGS: "embd", POOLING: "pool", CLASSIFICATION: "classify"}[request.url]
        self._head = {"id": f"{prefix}-{response_id}", "object": "list", "created": created_s, "model": request.model}

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply."""
        body = self.lazy_body(outputs)
        return body | {"data": list(body["data"])}

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the same with an iterator in place of the list of vectors."""
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        data = (self._entry(index, vector_of(output)) for index, output in enumerate(outputs))
        usage: Json = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        if self._request.url != EMBEDDINGS:
            usage["completion_tokens"] = 0
        return {**self._head, "data": data, "usage": usage}

    def _entry(self, index: int, vector: NDArray[np.float32]) -> Json:
        if self._request.url == CLASSIFICATION:
            label = self._request.labels[int(vector.argmax())] if self._request.labels else None
            return {"index": index, "label": label, "probs": vector.tolist(), "num_classes": len(vector)}
        kind, name = ("embedding", "embedding") if self._request.url == EMBEDDINGS else ("pooling", "data")
        content = base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._request.is_base64 else None
        return {"index": index, "object": kind, name: vector.tolist() if content is None else content}


def vector_of(output: RequestOutput) -> NDArray[np.float32]:
    """Return the vector of a request that has ended."""
    assert output.pooled is not None, "a request of an engine that pools ends with its vector"
    return output.pooled
