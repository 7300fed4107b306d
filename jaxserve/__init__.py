"""jaxserve: serve large language models with JAX on NVIDIA GPUs, TPUs and CPUs from one code base."""

from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "ConfigError", "EngineConfig", "RequestError", "RequestOutput", "SamplingParams"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import LLM, and with it jax, only when it is asked for."""
    if name == "LLM":
        from jaxserve.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
