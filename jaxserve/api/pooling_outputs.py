"""Results from pooling models, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.token_ids import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """A prompt's vector, whatever it means.

    Attributes:
        data: the vector.
    """

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's embedding.

    Attributes:
        embedding: the vector.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A prompt's labels.

    Attributes:
        probs: probability per label; the head's raw outputs with `use_activation=False`.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Similarity of two prompts.

    Attributes:
        score: cosine of the embeddings, or a head's output for the pair.
    """

    score: float


OutputT = TypeVar("OutputT")
OtherT = TypeVar("OtherT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """A request's result from a pooling model.

    Attributes:
        request_id: the request's name, unique in its engine.
        outputs: the prompt's result.
        prompt_token_ids: prompt token ids.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: True, as there is no result before.
    """

    request_id: str
    outputs: OutputT
    prompt_token_ids: TokenIds
    num_cached_tokens: int
    finished: bool = True

    def converted(self, kind: Callable[[str, OtherT, TokenIds, int], ResultT], outputs: OtherT) -> ResultT:
        """Return a copy with the class `kind`, such as EmbeddingRequestOutput, that holds `outputs`."""
        return kind(self.request_id, outputs, self.prompt_token_ids, self.num_cached_tokens)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A request's embedding."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A request's labels."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair's score."""


def pooling_output(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    """Return a finished request's result."""
    assert output.pooled is not None, "a request of an engine that pools ends with its vector"
    vector = PoolingOutput(output.pooled)
    return PoolingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens)
