"""jaxserve: serve large language models with JAX on NVIDIA GPUs, TPUs and CPUs from one code base."""

TYPE_CHECKING = False  # importing typing would take longer than installing the interrupt handler
if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.errors import ConfigError, RequestError
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structured_output.params import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EngineConfig": "config",
    "LLM": "llm",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
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
