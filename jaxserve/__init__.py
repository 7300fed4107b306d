"""jaxserve: serve large language models with JAX on NVIDIA GPUs, TPUs and CPUs from one code base."""

TYPE_CHECKING = False  # importing typing would take longer than installing the interrupt handler
if TYPE_CHECKING:
    from jaxserve.api.cached_tokens import CachedTokens
    from jaxserve.api.config import EngineConfig
    from jaxserve.api.lora_request import LoRARequest
    from jaxserve.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from jaxserve.api.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxserve.api.pooling_params import PoolingParams
    from jaxserve.api.reuse_hint import ReuseHint
    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.api.structured_outputs import StructuredOutputsParams
    from jaxserve.errors import ConfigError, RequestError
    from jaxserve.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxserve.offline.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CachedTokens",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "ReuseHint",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_OTHER_MODULES = {  # modules by name; `api.pooling_outputs` has all other names
    "BeamSearchOutput": "offline.beam_search",
    "BeamSearchParams": "offline.beam_search",
    "BeamSearchSequence": "offline.beam_search",
    "CachedTokens": "api.cached_tokens",
    "CompletionOutput": "api.outputs",
    "ConfigError": "errors",
    "EngineConfig": "api.config",
    "LLM": "offline.llm",
    "LoRARequest": "api.lora_request",
    "Logprob": "api.outputs",
    "PoolingParams": "api.pooling_params",
    "RequestError": "errors",
    "RequestMetrics": "api.outputs",
    "RequestOutput": "api.outputs",
    "ReuseHint": "api.reuse_hint",
    "SamplingParams": "api.sampling_params",
    "StructuredOutputsParams": "api.structured_outputs",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import public names on first use: LLM imports jax, and the command line must start fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import gc  # noqa: PLC0415 - here, it is no name of the package
    from importlib import import_module  # noqa: PLC0415 - as above

    collects = gc.isenabled()
    gc.disable()  # objects that modules make last: scanning them again and again takes a tenth of the time
    try:
        module = import_module(f"jaxserve.{_OTHER_MODULES.get(name, 'api.pooling_outputs')}")
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()  # together, these two declare all objects old, or the next collection would scan them
                gc.unfreeze()
            gc.enable()
    globals()[name] = value = getattr(module, name)  # found without this function from now on
    return value
