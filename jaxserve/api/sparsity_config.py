"""Options by which output tokens see fewer keys and values: `kv_eviction` and `sparse_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from jaxserve.api.option_values import read_options
from jaxserve.api.schema import Schema, integer, one_of
from jaxserve.errors import ConfigError

COMPACTING = ("snapkv", "h2o")  # methods that choose among prompt tokens by their attention weights
METHODS = ("streaming_llm", *COMPACTING)
NUM_DENSE_LAYERS = 2  # first layers, in which "quest" attends to all pages, because attention is spread over many


@dataclass(frozen=True)
class _Budget:
    """An option with a method and a budget in tokens."""

    option: ClassVar[str]
    schema: ClassVar[Schema]

    method: str
    budget: int

    def __post_init__(self) -> None:
        self.schema.check(self)


@dataclass(frozen=True)
class EvictionConfig(_Budget):
    """Options of `kv_eviction`, for layers with full attention.

    Attributes:
        method: "streaming_llm" keeps the first tokens and the latest ones, in whole pages (StreamingLLM, arXiv
            2309.17453, with each token's own position): an output token sees no others, a prompt token sees all.
            "snapkv" keeps the prompt tokens that the last ones attend to most (SnapKV, arXiv 2404.14469), and "h2o"
            the ones that all prompt tokens attend to most (H2O, arXiv 2306.14048): once the prompt is computed, its
            best tokens are moved together, the same in all layers, and its pages are released.
        budget: maximum tokens that an output token sees; for "snapkv" and "h2o" the maximum prompt tokens among them.
        sink_tokens: number of first tokens that "streaming_llm" keeps, rounded up to whole pages.
        window_tokens: number of latest prompt tokens that "snapkv" and "h2o" always keep; None is 64 for "snapkv",
            which chooses by the attention of these, and half of the kept tokens for "h2o".
    """

    option = "kv_eviction"

    sink_tokens: int = 4
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, methods in (("sink_tokens", METHODS[:1]), ("window_tokens", COMPACTING)):
            if getattr(self, name) != getattr(EvictionConfig, name) and self.method not in methods:
                raise ConfigError(f"{name} of kv_eviction needs a method of {methods}, got {self.method!r}; drop it")


@dataclass(frozen=True)
class SparseAttentionConfig(_Budget):
    """Options of `sparse_attention`.

    Attributes:
        method: "quest" attends to the pages whose keys may score highest (Quest, arXiv 2406.10774), the first one and
            the latest one: an output token chooses them in each layer except the first two, a prompt token sees all.
        budget: maximum tokens that an output token sees, in whole pages.
    """

    option = "sparse_attention"


_TYPES = {"budget": integer(1)}
EvictionConfig.schema = Schema(
    ConfigError,
    EvictionConfig,
    {"method": one_of(METHODS), "sink_tokens": integer(0), "window_tokens": integer(1).optional(), **_TYPES},
    " of kv_eviction",
)
SparseAttentionConfig.schema = Schema(
    ConfigError, SparseAttentionConfig, {"method": one_of(("quest",)), **_TYPES}, " of sparse_attention"
)


Budget = TypeVar("Budget", EvictionConfig, SparseAttentionConfig)


def read_budget(kind: type[Budget], value: object) -> Budget | None:
    """Return an option's configuration from a user's dict or JSON, or the one given; None for None and "null".

    Raises:
        ConfigError: a key is not supported or missing, or a value is invalid.
    """
    return read_options(kind.option, kind, value)
