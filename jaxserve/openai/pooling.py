"""Requests and replies of models that pool: OpenAI's embeddings, and vLLM's other paths."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import (
    CLASSIFICATION,
    EMBEDDINGS,
    POOLING,
    POOLING_PARAMETERS,
    ParsedRequest,
    check_fields,
    completion_prompts,
    naming_fields,
)
from jaxserve.pooling import CLASSIFY, EMBED, PoolingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.errors import RequestError
    from jaxserve.increments import Increment
    from jaxserve.openai.errors import Json
    from jaxserve.outputs import RequestOutput

TASKS = {EMBEDDINGS: EMBED, POOLING: None, CLASSIFICATION: CLASSIFY}  # tasks by path; None is the model's own
_FORMATS = ("float", "base64")


def parse_pooling(
    url: str,
    body: object,
    own_name: str,
    model_names: Sequence[str],
    labels: Sequence[str] = (),
    *,
    may_stream: bool = False,
) -> ParsedRequest:
    """Check a request body and convert it to prompts and parameters.

    Args:
        url: one of `TASKS`.
        body: request body, parsed from JSON.
        own_name: name of the model if a request gives none.
        model_names: accepted values of `model`; if empty, any name is accepted.
        labels: names of the model's labels.
        may_stream: the same as in `parse_body`.

    Raises:
        BadRequestError: the body cannot be served.
    """
    given = check_fields(url, body, own_name, model_names, may_stream=may_stream)
    form = given.get("encoding_format", "float")
    if form not in _FORMATS:
        message = f"encoding_format must be one of {list(_FORMATS)}, got {brief(form)}"
        raise BadRequestError(message, "encoding_format")
    with naming_fields(url):
        params = PoolingParams(**{n: given[n] for n in POOLING_PARAMETERS[url] & given.keys()}, task=TASKS[url])
    return ParsedRequest(
        url,
        given["model"],
        completion_prompts(given.get("input"), "input"),
        params.sampling_params(),
        given.get("cache_salt"),
        request_id=given.get("request_id", ""),
        priority=given.get("priority"),
        pooling=params,
        labels=tuple(labels),
        is_base64=form == "base64",
        ignored=("user",) if "user" in given else (),
    )


class PoolingReply:
    """Reply to one request, which is whole: there is nothing to stream.

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
        data = (self._entry(index, _vector(output)) for index, output in enumerate(outputs))
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


def _vector(output: RequestOutput) -> NDArray[np.float32]:
    assert output.pooled is not None, "a request of an engine that pools ends with its vector"
    return output.pooled
