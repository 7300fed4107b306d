"""Results of requests to models that pool, under vLLM's names."""

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
    """Vector of a prompt, whatever it means.

    Attributes:
        data: the vector.
    """

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding of a prompt.

    Attributes:
        embedding: the vector.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Labels of a prompt.

    Attributes:
        probs: probability of each label; the head's own outputs with `use_activation=False`.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Likeness of two prompts.

    Attributes:
        score: cosine of the embeddings, or what a head says of the pair.
    """

    score: float


OutputT = TypeVar("OutputT")
OtherT = TypeVar("OtherT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """Result of a request to a model that pools.

    Attributes:
        request_id: name of the request, unique in its engine.
        outputs: result of the prompt.
        prompt_token_ids: token ids of the prompt.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: True, as there is no result before.
    """

    request_id: str
    outputs: OutputT
    prompt_token_ids: TokenIds
    num_cached_tokens: int
    finished: bool = True

    def converted(self, kind: Callable[[str, OtherT, TokenIds, int], ResultT], outputs: OtherT) -> ResultT:
        """Return the result of the same request in another form, of the class `kind`."""
        return kind(self.request_id, outputs, self.prompt_token_ids, self.num_cached_tokens)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Embedding of a request."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Labels of a request."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Score of a pair."""


def pooling_output(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of a request that has ended."""
    assert output.pooled is not None, "a request of an engine that pools ends with its vector"
    vector = PoolingOutput(output.pooled)
    return PoolingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens)
