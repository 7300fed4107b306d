"""Scores for text pairs, and documents ordered by score: vLLM's, Jina's and Cohere's interfaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.api.pooling_params import CLASSIFY, EMBED, PoolingParams
from jaxserve.errors import brief
from jaxserve.offline import scoring
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import RERANK_PATHS, SCORE_PATHS, ParsedRequest, naming_fields, read_fields
from jaxserve.openai.pooling import vector_of
from jaxserve.openai.replies import AnyReply

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.openai.errors import Json
    from jaxserve.openai.replies import Reply
    from jaxserve.text.tokenizer import Tokenizer


_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))  # vLLM's


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of a scoring request.

    Attributes:
        first: queries: one for all of `second`, or one for each.
        second: documents.
        names: body fields that have the queries and the documents.
    """

    first: list[str]
    second: list[str]
    names: tuple[str, str]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield, for each pair to score, its indices in `first` and `second`."""
        for index in range(len(self.second)):
            yield (0 if len(self.first) == 1 else index), index


def parse_scoring(url: str, body: object, context: BodyContext) -> ParsedRequest:
    """Parse the body of a scoring or reranking request; `url` is its path.

    Prompts are text pairs if the model has a classification head, and single texts to embed otherwise.

    Raises:
        RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
    """
    given, common = read_fields(url, body, context)
    texts, max_prompts, pooler = _read_texts(url, given), context.max_prompts, context.pooler
    assert pooler is not None, "the server has these paths for models that pool"
    if len(texts.second) > max_prompts:
        message = (
            f"{texts.names[1]} must be at most {max_prompts} texts, got {len(texts.second)}; send several requests"
        )
        raise BadRequestError(message, texts.names[1])
    limits = [given.get(name) or None for name in ("max_tokens_per_query", "max_tokens_per_doc")]
    tokenizer, max_len = context.needed_tokenizer(texts.names[0]), context.max_model_len or sys.maxsize
    first, second = (
        [text if limit is None else shortened(tokenizer, text, limit) for text in each]
        for each, limit in zip((texts.first, texts.second), limits, strict=True)
    )
    has_head = bool(pooler.num_labels)
    with naming_fields(url):
        options = {name: given[name] for name in ("use_activation", "truncate_prompt_tokens") if name in given}
        params = PoolingParams(**options, task=CLASSIFY if has_head else EMBED)
        prompts: list[Any] = [*first, *second]
        if has_head:
            scoring.check_head(pooler)
            wanted = params.truncate_prompt_tokens
            max_pair_len = None if wanted is None else min(max_len if wanted < 0 else wanted, max_len)
            prompts = []
            for one, other in texts.pairs():
                if max_pair_len is None:
                    context.check_prompt(first[one])
                    context.check_prompt(second[other])
                prompts.append(_encode_pair(tokenizer, first[one], second[other], max_pair_len))
    return ParsedRequest(url, prompts=prompts, params=params.sampling_params(), pooling=params, **common)


def _encode_pair(tokenizer: Tokenizer, first: str, second: str, max_len: int | None) -> list[int]:
    """Encode two texts as one prompt of at most `max_len` tokens (None: any length), which shortens the second text."""
    token_ids = tokenizer.encode_pair(first, second)
    while max_len is not None and len(token_ids) > max_len and second:
        num_left = len(tokenizer.encode(second, add_special_tokens=False)) - (len(token_ids) - max_len)
        second = shortened(tokenizer, second, num_left) if num_left > 0 else ""
        token_ids = tokenizer.encode_pair(first, second)
    return token_ids


def shortened(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Return the part of a text that its first `num_tokens` tokens cover."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(token_ids) <= num_tokens else tokenizer.decode(token_ids[:num_tokens])


def _read_texts(url: str, given: Json) -> _Texts:
    """Return the texts in a body's `given` fields; BadRequestError unless they make pairs for the path `url`."""
    names = ("query", "documents")
    if url in SCORE_PATHS:
        found = [pair for pair in _NAMES if all(name in given for name in pair)]
        if not found:
            raise BadRequestError(f"one of {[list(pair) for pair in _NAMES]} must be given", "queries")
        names = found[0]
    first, second = (_texts(given.get(name), name) for name in names)
    if len(first) not in (1, len(second)) or (url in RERANK_PATHS and len(first) != 1):
        message = f"{names[0]} must be one text, or as many as {names[1]}, got {len(first)} and {len(second)}"
        raise BadRequestError(message, names[0])
    return _Texts(first, second, names)


def _texts(content: Any, name: str) -> list[str]:
    """Return the texts in the body field `name`, which has one text or a list."""
    items = content if isinstance(content, list) else [content]
    if content is None or not items:
        raise BadRequestError(f"{name} must be a text or a list of texts, got {brief(content)}", name)
    return [_text(item, name) for item in items]


def _text(item: Any, name: str) -> str:
    """Return an item of the field `name` as text: a string, Jina's {"text": ...}, or vLLM's {"content": [parts]}."""
    match item:
        case str():
            return item
        case {"content": list(parts)}:
            if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                return "".join(part["text"] for part in parts)
        case {"text": str(text)}:
            return text
    message = f'{name} must be texts, or objects {{"text": ...}}, as only texts are supported, got {brief(item)}'
    raise BadRequestError(message, name)


class ScoringReply(AnyReply):
    """Reply to one request for scores or ranked documents.

    Args:
        reply: OpenAI-format `Reply` to the same request; this takes the request, reply id and creation time from it.
        body: the request's JSON body; the texts are read from it.
    """

    def __init__(self, reply: Reply, body: Json) -> None:
        self._request, self._body, self._id, self._created_s = reply.request, body, reply.response_id, reply.created_s
        self._texts = _read_texts(self._request.url, {name: value for name, value in body.items() if value is not None})

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as a JSON object: scores in order, or documents with the best score first."""
        scores = self._scores(outputs)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        head = {"object": "list", "created": self._created_s, "model": self._request.model}
        if self._request.url in SCORE_PATHS:
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            return {"id": f"score-{self._id}", **head, "data": data, "usage": usage | {"completion_tokens": 0}}
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [self._result(index, scores[index]) for index in order[: self._body.get("top_n") or None]]
        meta = {  # Cohere's
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": num_tokens, "output_tokens": 0},
        }
        return {"id": f"rerank-{self._id}", **head, "usage": usage, "results": results, "meta": meta}

    def _scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return one score for each pair: the head's output, or the cosine between the two texts' vectors."""
        vectors = [vector_of(output) for output in outputs]
        assert self._request.pooling is not None, "a request for scores pools"
        if self._request.pooling.task == CLASSIFY:
            return [float(vector[0]) for vector in vectors]
        num_first = len(self._texts.first)
        return [scoring.cosine(vectors[one], vectors[num_first + other]) for one, other in self._texts.pairs()]

    def _result(self, index: int, score: float) -> Json:
        """Return the `results` element for a document, with its index in the request and its score."""
        result: Json = {"index": index, "relevance_score": score}
        if self._body.get("return_documents") is not False:
            result["document"] = {"text": self._texts.second[index], "multi_modal": None}
        return result
