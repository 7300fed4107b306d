"""SpeculationConfig: which proposer drafts tokens, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxserve.api.option_values import read_options
from jaxserve.api.schema import PATH, SWITCH, Schema, integer, one_of
from jaxserve.api.token_tree import MAX_NODES, TokenTree
from jaxserve.errors import ConfigError

METHODS = ("draft_model", "ngram", "medusa", "eagle3", "mtp")
TREE_METHODS = ("draft_model", "medusa")
DEFAULT_DRAFTED_TOKENS = 4
DEFAULT_NGRAM = 5
_MAX_NGRAM = 32
_ALIASES = {"ngram_gpu": "ngram", "deepseek_mtp": "mtp", "mimo_mtp": "mtp"}  # vLLM's names for the same
_NEUTRAL: dict[str, tuple[object, ...]] = {  # values of vLLM's other keys that match the behaviour here
    "code_revision": (None,),
    "disable_logprobs": (False,),
    "disable_padded_drafter_batch": (False,),
    "draft_sample_method": ("probabilistic",),
    "draft_tensor_parallel_size": (1, None),
    "enable_adaptive_verification": (False,),
    "enforce_eager": (None, False, True),
    "parallel_drafting": (False,),
    "rejection_sample_method": ("standard",),
    "revision": (None,),
    "use_heterogeneous_vocab": (False, True),  # tokenizers are compared
    "use_local_argmax_reduction": (False,),
}


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding options, under the names in vLLM's `speculative_config`.

    Attributes:
        method: "draft_model" uses a smaller model, which may have another tokenizer; "ngram" looks up earlier
            occurrences of the last tokens; "medusa" uses heads on the model's hidden states; "eagle3" and "mtp" use a
            layer over them. None is "draft_model" if a model is given.
        model: directory with the draft model, heads or layer. It may be None in two cases: the engine serves the
            embedded default model, which has a draft model, Medusa heads and an EAGLE-3 layer; or the method is "mtp"
            and the checkpoint of an MLA model has the layer.
        num_speculative_tokens: maximum drafted tokens per request and round; None is 4, or the depth of a tree.
        prompt_lookup_max: maximum tokens that "ngram" matches; None is `prompt_lookup_min`, or 5.
        prompt_lookup_min: minimum tokens that "ngram" matches; None is `prompt_lookup_max`.
        quantization: weight format for the draft model; None keeps its dtype.
        speculative_token_tree: tree of drafts: paths of token ranks, such as [(0,), (1,), (0, 0)]. None drafts a chain.
        adaptive: choose the number of drafted tokens per request by acceptance and step times; if False, it is always
            `num_speculative_tokens`.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    quantization: str | None = None
    speculative_token_tree: str | Sequence[Sequence[int]] | None = None
    adaptive: bool = True

    @cached_property
    def tree(self) -> TokenTree | None:
        """Tree of drafts; None for a chain."""
        return None if self.speculative_token_tree is None else TokenTree.from_paths(self.speculative_token_tree)

    @property
    def max_drafts(self) -> int:
        """Maximum length of a chain or path of drafts: the resolved `num_speculative_tokens`."""
        assert self.num_speculative_tokens is not None, "__post_init__ has set it"
        return self.num_speculative_tokens

    @property
    def num_spare_drafts(self) -> int:
        """Number of tree tokens outside its longest path; 0 for a chain."""
        return 0 if self.tree is None else self.tree.num_nodes - self.tree.num_levels

    def __post_init__(self) -> None:
        values = vars(self)  # frozen after construction
        if self.method in ("ngram", "ngram_gpu") or self.model in ("ngram", "[ngram]"):
            values |= {"method": "ngram", "model": None}
        if self.tree is not None:
            values["speculative_token_tree"] = self.tree.paths
        defaults = {
            "method": "draft_model",
            "num_speculative_tokens": DEFAULT_DRAFTED_TOKENS if self.tree is None else self.tree.num_levels,
            "prompt_lookup_max": DEFAULT_NGRAM if self.prompt_lookup_min is None else self.prompt_lookup_min,
        }
        values |= {name: default for name, default in defaults.items() if values[name] is None}
        _SCHEMA.check(self)
        if self.prompt_lookup_min is None:
            values["prompt_lookup_min"] = self.prompt_lookup_max
        min_type = integer(1, self.prompt_lookup_max)
        values["prompt_lookup_min"] = min_type.read("prompt_lookup_min" + _OWNER, self.prompt_lookup_min, ConfigError)
        if self.tree is not None:
            self._check_tree(self.tree)
        if self.quantization is not None and self.method != "draft_model":
            raise ConfigError(
                "quantization of speculative_config needs the method 'draft_model', got "
                f"{self.quantization!r} with {self.method!r}; leave it out"
            )

    def _check_tree(self, tree: TokenTree) -> None:
        """Raise ConfigError unless the method can draft a tree, and the number of tokens is its depth."""
        if self.method not in TREE_METHODS:
            raise ConfigError(
                f"speculative_token_tree needs a method of {list(TREE_METHODS)}, got method {self.method!r}"
            )
        if self.num_speculative_tokens != tree.num_levels:
            raise ConfigError(
                "num_speculative_tokens must be the depth of speculative_token_tree or be left out, got "
                f"{self.num_speculative_tokens} and a depth of {tree.num_levels}"
            )

    @classmethod
    def from_value(cls, value: object) -> SpeculationConfig | None:
        """Return the configuration from a user's dict or JSON, or the one given; None for None and "null".

        Raises:
            ConfigError: a key is not supported, or a value is invalid.
        """
        return read_options("speculative_config", cls, value, _NEUTRAL)


_OWNER = " of speculative_config"
_SCHEMA = Schema(
    ConfigError,
    SpeculationConfig,
    {
        "method": one_of(METHODS, _ALIASES),
        "model": PATH.optional(),
        "num_speculative_tokens": integer(1, MAX_NODES),
        "prompt_lookup_max": integer(1, _MAX_NGRAM),
        "adaptive": SWITCH,
    },
    _OWNER,
)
