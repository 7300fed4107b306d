"""Scores for prompt pairs, by embedding cosine or by a head that reads both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.api.pooling_outputs import ScoringOutput, ScoringRequestOutput
from jaxserve.errors import RequestError, brief

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.api.pooling_outputs import PoolingOutput, PoolingRequestOutput
    from jaxserve.api.pooling_params import Pooler
    from jaxserve.core.prompt import Prompt
    from jaxserve.text.tokenizer import Tokenizer

_SMALLEST_NORM = 1e-8  # torch's, for the product of two lengths


def pairs(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[tuple[Prompt, Prompt]]:
    """Return the pairs from two prompt lists; a single first one is paired with every second one."""
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second) or not second:
        raise RequestError(
            f"data_1 must be one prompt or as many as in data_2, of which there must be some, "
            f"got {len(first)} and {len(second)}"
        )
    return list(zip(first, second, strict=True))


def check_head(pooler: Pooler) -> None:
    """Raise RequestError unless a classification head can score pairs."""
    if pooler.num_labels != 1:
        raise RequestError(f"score needs a classification head of 1 label, got {pooler.num_labels}; use classify")


def joined(texts: Sequence[tuple[Prompt, Prompt]], pooler: Pooler, tokenizer: Tokenizer) -> list[Prompt]:
    """Return one token id prompt per text pair, for a classification head that reads both.

    Raises:
        RequestError: the head has several labels, or a prompt is not text.
    """
    check_head(pooler)
    prompts: list[Prompt] = []
    for first, second in texts:
        if not isinstance(first, str) or not isinstance(second, str):
            raise RequestError(f"a pair for a classification head must be two texts, got {brief((first, second))}")
        prompts.append({"prompt_token_ids": tokenizer.encode_pair(first, second)})
    return prompts


def head_scores(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[ScoringRequestOutput]:
    """Return a score per pair, given the outputs from a head that has read both: its first element each."""
    return [output.converted(ScoringRequestOutput, ScoringOutput(float(output.outputs.data[0]))) for output in outputs]


def cosine(x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    """Return the cosine similarity between two vectors."""
    return float(np.dot(x, y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), _SMALLEST_NORM))


def embedding_scores(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[ScoringRequestOutput]:
    """Return a score per pair, given the embeddings for both its prompts in sequence: their cosine similarity."""
    return [
        ScoringRequestOutput(
            f"{a.request_id}_{b.request_id}",
            ScoringOutput(cosine(a.outputs.data, b.outputs.data)),
            a.prompt_token_ids + b.prompt_token_ids,
            a.num_cached_tokens + b.num_cached_tokens,
        )
        for a, b in zip(outputs[::2], outputs[1::2], strict=True)
    ]
