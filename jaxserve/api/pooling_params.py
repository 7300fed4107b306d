"""Pooling: from a prompt's hidden states to one vector. Host values only, without jax."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, no_type_check

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.schema import SWITCH, TEXT, Schema, integer, one_of, unknown_names_message
from jaxserve.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBED, CLASSIFY = "embed", "classify"  # vLLM's task names
_SMALLEST_NORM = 1e-12  # torch's, below which a vector is not scaled to length 1


class PoolingKind(enum.StrEnum):
    """Tokens whose hidden states represent a prompt, by vLLM's names."""

    LAST = "LAST"
    MEAN = "MEAN"
    CLS = "CLS"


class Activation(enum.StrEnum):
    """Activation after a classification head."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return this function of a head's outputs."""
        import numpy as np  # noqa: PLC0415 - not needed to parse a command line

        if self is Activation.IDENTITY:
            return logits
        if self is Activation.SIGMOID:
            return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)), np.float32)  # does not overflow
        powers = np.exp(logits - logits.max())
        return np.asarray(powers / powers.sum(), np.float32)


@dataclass(frozen=True)
class Pooler:
    """Computation of a prompt's vector from its hidden states.

    Attributes:
        kind: tokens that represent the prompt.
        num_labels: number of classification labels; 0 for embeddings, which have no head.
        activation: activation after the head.
        labels: label names, if the checkpoint has any.
        normalize: True if embeddings have length 1 by default.
        use_activation: True if the activation is applied by default.
        dimensions: sizes to which embeddings may be shortened; empty for all.
    """

    kind: PoolingKind = PoolingKind.LAST
    num_labels: int = 0
    activation: Activation = Activation.SOFTMAX
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    use_activation: bool = True

    @property
    def task(self) -> str:
        """The model's task: "embed" or "classify"."""
        return CLASSIFY if self.num_labels else EMBED

    @property
    def reads_prefix_cache(self) -> bool:
        """True if the vector depends only on the last token's hidden state."""
        return self.kind is PoolingKind.LAST

    def configured(self, options: Mapping[str, Any]) -> Pooler:
        """Return a copy with the user's options, as from `read_pooler_config`; ConfigError for one without effect."""
        if self.num_labels and "normalize" in options:
            raise ConfigError(
                f"normalize of pooler_config must be absent for the task {self.task!r}, got {options['normalize']}; "
                "use_activation is the switch of such a head"
            )
        given = {_FIELDS.get(name, name): value for name, value in options.items()}
        if not self.num_labels and "use_activation" in given:
            given["normalize"] = _normalizes(given.get("normalize"), given.pop("use_activation"), ConfigError)
        return replace(self, **given)

    def check(self, params: PoolingParams, hidden_size: int) -> None:
        """Raise RequestError unless a request's parameters suit this model."""
        if params.task not in (None, self.task):
            raise RequestError(
                f"the task must be {self.task!r} with this model, got {params.task!r}; "
                f"{'load an embedding model' if self.num_labels else 'load a model with a classification head'}, or "
                f"start the engine with convert={'embed' if self.num_labels else 'classify'!r}"
            )
        for name in ("normalize", "dimensions") if self.num_labels else ():
            if getattr(params, name) is not None:
                raise RequestError(f"{name} must be None for the task {self.task!r}, got {getattr(params, name)!r}")
        _normalizes(params.normalize, params.use_activation, RequestError)
        sizes, wanted = self.dimensions, params.dimensions
        if wanted is not None and (wanted > hidden_size or (sizes and wanted not in sizes)):
            known = f"one of {list(sizes)}" if sizes else f"at most {hidden_size}"
            raise RequestError(f"dimensions must be {known} with this model, got {wanted}")

    def finish(self, vector: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
        """Return a request's result from the device's pooled vector: a float32 copy."""
        import numpy as np  # noqa: PLC0415 - not needed to parse a command line

        if self.num_labels:
            is_active = self.use_activation if params.use_activation is None else params.use_activation
            activation = self.activation if is_active else Activation.IDENTITY
            return activation.apply(np.array(vector, np.float32))
        vector = np.array(vector[: params.dimensions], np.float32)
        wanted = _normalizes(params.normalize, params.use_activation, RequestError)
        is_normal = self.normalize if wanted is None else wanted
        return vector / max(np.linalg.norm(vector), np.float32(_SMALLEST_NORM)) if is_normal else vector


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a RequestError
@dataclass
class PoolingParams:
    """Parameters for one request to a pooling model. Names, meanings and defaults are vLLM's.

    Attributes:
        truncate_prompt_tokens: the same as in SamplingParams.
        truncation_side: the same, but "right" by default: the first tokens are kept, as transformers' tokenizers do.
        dimensions: number of elements that an embedding keeps, the first ones; it is normalised afterwards. None keeps
            all. Any model is accepted, whether or not it declares Matryoshka training; if a model lists sizes, only
            these are.
        normalize: scale embeddings to length 1; None follows the checkpoint, by default True.
        use_activation: apply softmax or sigmoid to a classification head's outputs; None follows `pooler_config`, by
            default True. For embeddings it is another name for `normalize`, vLLM's only one.
        task: "embed" or "classify"; None is the model's own.

    Raises:
        RequestError: a value is out of range.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    truncation_side: str = "right"

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        self.sampling_params()

    @property
    def n(self) -> int:
        """Number of results: 1, as SamplingParams has it."""
        return 1

    def sampling_params(self) -> SamplingParams:
        """Return sampling parameters for computing the prompt; the sampled token is never read."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


def _normalizes(normalize: bool | None, use_activation: bool | None, error: type[Exception]) -> bool | None:
    """Return the switch for normalising embeddings, given under one of two names; raise `error` if they differ."""
    if None not in (normalize, use_activation) and normalize != use_activation:
        raise error(f"normalize and use_activation must be equal for embeddings, got {normalize} and {use_activation}")
    return use_activation if normalize is None else normalize


_SCHEMA = Schema(
    RequestError,
    PoolingParams,
    {
        "dimensions": integer(1).optional(),
        "normalize": SWITCH.optional(),
        "use_activation": SWITCH.optional(),
        "task": one_of((EMBED, CLASSIFY), advice=": vectors and labels per token are not returned").optional(),
    },
)
_OPTIONS = {"pooling_type": TEXT, "normalize": SWITCH, "use_activation": SWITCH}
_FIELDS = {"pooling_type": "kind"}  # fields that Pooler names differently


def read_pooler_config(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that `pooler_config` sets, checked, with `pooling_type` as a PoolingKind.

    Raises:
        ConfigError: an option is unknown, or its value is not supported.
    """
    if unknown := set(map(str, value)) - _OPTIONS.keys():
        raise ConfigError(unknown_names_message("options of pooler_config", unknown, _OPTIONS))
    given = {
        name: _OPTIONS[name].read(f"{name} of pooler_config", each, ConfigError)
        for name, each in value.items()
        if each is not None
    }
    if "pooling_type" in given:
        given["pooling_type"] = pooling_kind(given["pooling_type"])
    return given


def pooling_kind(name: str) -> PoolingKind:
    """Return the PoolingKind with vLLM's name, in any case; ConfigError if it is not supported."""
    try:
        return PoolingKind(name.upper())
    except ValueError:
        raise ConfigError(f"pooling_type must be one of {[*map(str, PoolingKind)]}, got {name!r}") from None
