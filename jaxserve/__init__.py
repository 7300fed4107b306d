"""jaxserve: serve large language models with JAX on NVIDIA GPUs, TPUs and CPUs from one code base."""

TYPE_CHECKING = False  # importing typing would take longer than installing the interrupt handler
if TYPE_CHECKING:
    from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.config import EngineConfig
    from jaxserve.errors import ConfigError, RequestError
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxserve.pooling import PoolingParams
    from jaxserve.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structured_output.params import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_MODULES = {
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "ClassificationOutput": "pooling_outputs",
    "ClassificationRequestOutput": "pooling_outputs",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EmbeddingOutput": "pooling_outputs",
    "EmbeddingRequestOutput": "pooling_outputs",
    "EngineConfig": "config",
    "LLM": "llm",
    "Logprob": "outputs",
    "PoolingOutput": "pooling_outputs",
    "PoolingParams": "pooling",
    "PoolingRequestOutput": "pooling_outputs",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "ScoringOutput": "pooling_outputs",
    "ScoringRequestOutput": "pooling_outputs",
    "StructuredOutputsParams": "structured_output.params",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import public names on first use: LLM imports jax, and the command line must start fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"jaxserve.{_MODULES[name]}"), name)
