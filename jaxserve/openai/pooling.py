"""Requests and replies for pooling models: OpenAI's embeddings, and vLLM's other paths."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.api.pooling_params import CLASSIFY, EMBED, PoolingParams
from jaxserve.openai.chats import PROMPT_FIELDS, read_prompt
from jaxserve.openai.context import BodyContext
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
from jaxserve.openai.prompts import Prompt, read_prompts
from jaxserve.openai.replies import AnyReply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.api.outputs import RequestOutput
    from jaxserve.openai.errors import Json
    from jaxserve.openai.replies import Reply

TASKS = {EMBEDDINGS: EMBED, POOLING: None, CLASSIFICATION: CLASSIFY}  # tasks by path; None is the model's own


def parse_pooling(url: str, body: object, context: BodyContext) -> ParsedRequest:
    """Parse the body of an embedding, pooling or classification request; `url` is its path.

    Raises:
        BadRequestError: the body cannot be served.
    """
    given, common = read_fields(url, body, context)
    with naming_fields(url):
        options = {"task": TASKS[url]} | {name: given[name] for name in POOLING_PARAMETERS[url] if name in given}
        params = PoolingParams(**options)
    return ParsedRequest(
        url,
        prompts=_prompts(given, context),
        params=params.sampling_params(),
        pooling=params,
        labels=tuple(context.pooler.labels if context.pooler else ()),
        is_base64=given.get("encoding_format") == "base64",
        **common,
    )


def _prompts(given: Json, context: BodyContext) -> list[Prompt]:
    """Return the prompts in a body's field `input`, or the rendered chat in `messages`."""
    if "messages" not in given:
        if unread := sorted(given.keys() & PROMPT_FIELDS.keys() - {"add_special_tokens"}):
            raise BadRequestError(f"{unread[0]} needs messages, and the body has input", unread[0])
        return read_prompts(given, "input", context)
    if "input" in given:
        raise BadRequestError("a body must have input or messages, got both", "input")
    return [read_prompt(given, context, adds_header=False).token_ids]


class PoolingReply(AnyReply):
    """Reply to one request for vectors or class probabilities.

    Args:
        reply: OpenAI's reply to the request, which has its name and parameters.
    """

    def __init__(self, reply: Reply, _body: Json) -> None:
        self._request = reply.request
        prefix = {EMBEDDINGS: "embd", POOLING: "pool", CLASSIFICATION: "classify"}[reply.request.url]
        name = f"{prefix}-{reply.response_id}"
        self._head = {"id": name, "object": "list", "created": reply.created_s, "model": reply.request.model}

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as a JSON object: one vector, or one label, for each output."""
        body = self.lazy_body(outputs)
        return body | {"data": list(body["data"])}

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as a JSON object with an iterator for its vectors or labels."""
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        data = (self._entry(index, vector_of(output)) for index, output in enumerate(outputs))
        usage: Json = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        if self._request.url != EMBEDDINGS:
            usage["completion_tokens"] = 0
        return {**self._head, "data": data, "usage": usage}

    def _entry(self, index: int, vector: NDArray[np.float32]) -> Json:
        """Return the `data` element for the prompt with this index: its vector, or its label with probabilities."""
        if self._request.url == CLASSIFICATION:
            label = self._request.labels[int(vector.argmax())] if self._request.labels else None
            return {"index": index, "label": label, "probs": vector.tolist(), "num_classes": len(vector)}
        kind, name = ("embedding", "embedding") if self._request.url == EMBEDDINGS else ("pooling", "data")
        content = base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._request.is_base64 else None
        return {"index": index, "object": kind, name: vector.tolist() if content is None else content}


def vector_of(output: RequestOutput) -> NDArray[np.float32]:
    """Return the pooled vector, or the class probabilities, of an ended request."""
    assert output.pooled is not None, "a request of an engine that pools ends with its vector"
    return output.pooled
