"""ModelFamily: what one kind of model is, as a value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from jaxserve.layers.norm import NormFunction, offset_norm
from jaxserve.layers.token_context import TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import LAYER_PROJECTION, ParamSpec

# block(params of the layer, x[T,D], tokens, layer, arch=) -> (x[T,D], tokens of the layers after it)
Block = Callable[..., tuple[Array, TokenContext]]


class Fold(NamedTuple):
    """Place in a layer where a factor per channel can move from the inputs of a matrix to what computes them.

    Attributes:
        source: name of the norm or matrix whose outputs are the inputs, up to products with other factors.
        target: name of the only matrix that reads them.
        part: index of the checkpoint tensor of the source matrix whose rows are the channels; None for a norm. Those
            of a key-value head are read once for each query head of its group.
    """

    source: str
    target: str
    part: int | None = None


FOLDS = (
    Fold("input_norm", "qkv_proj"),
    Fold("qkv_proj", "o_proj", part=2),
    Fold("mlp_norm", "gate_up_proj"),
    Fold("gate_up_proj", "down_proj", part=1),
)
UNGATED_FOLDS = (*FOLDS[:2], Fold("mlp_norm", "up_proj"))


@dataclass(frozen=True)
class ModelFamily:
    """A structure that checkpoints of some architectures share.

    Attributes:
        read_arch: function that reads a config.json; raises ConfigError for settings that are not supported.
        param_specs: function that returns one row per tensor of a model. The decoder reads `embed`, `final_norm` and,
            unless tied, `lm_head`; the block reads what is under `("layers", layer)`, by names of its own.
        block: one decoder layer, a pure function. Attention rotates dimension i of a head with i + H / 2.
        norm: function of the norms of layers and of the last one, see `layers.norm`.
        folds: places in each layer, for calibrated quantisation.
        layer_inputs: function of the parameters, the sizes, token ids [T] and their embeddings [T, D] that returns what
            each layer reads of the tokens besides, [L, T, size], or None; a block has its own as `LayerContext.inputs`.
    """

    read_arch: Callable[[Mapping[str, Any]], ArchConfig]
    param_specs: Callable[[ArchConfig], list[ParamSpec]]
    block: Block
    norm: NormFunction
    folds: tuple[Fold, ...] = ()
    layer_inputs: Callable[[Any, ArchConfig, Array, Array], Array | None] = lambda *_: None

    @property
    def norm_offset(self) -> float:
        """Constant that norms add to their weights."""
        return 1.0 if self.norm is offset_norm else 0.0


def widest_output(specs: list[ParamSpec]) -> int:
    """Return the size of a token's largest product with a matrix of a layer, on the device that has these rows."""
    return max(spec.token_rows for spec in specs if spec.is_matrix and spec.path[0] == "layers")


@dataclass(frozen=True)
class FlopCounts:
    """Floating-point operations of a step, two for each product of a weight or a score.

    Attributes:
        per_token: operations of the layers' matrices and states for a token.
        per_row: operations of the logits of a row, or of its labels.
        per_score: operations of a query-key pair, of all heads, in one layer; the mean of layers that differ.
    """

    per_token: int
    per_row: int
    per_score: int

    @classmethod
    def of(cls, arch: ArchConfig, specs: list[ParamSpec]) -> "FlopCounts":
        """Count the rows of a model, or of one device's part of it."""
        matrices = [spec for spec in specs if spec.is_matrix and spec.path[0] in ("layers", LAYER_PROJECTION)]
        # A device with rows of its own computes the attention and the MLP of its share of the tokens alone.
        num_shares = arch.num_data_shards if arch.token_axis else 1
        layers = sum(
            spec.mean_token_rows * spec.shape[1] // (num_shares if spec.experts is None else 1) for spec in matrices
        )
        of_states = sum(layer.state.token_flops for layer in arch.layers if layer.state)
        head = (arch.vocab_size if arch.pooler is None else arch.pooler.num_labels) * arch.hidden_size
        per_score = int(2 * arch.attention.num_heads * arch.mean_score_size / num_shares)
        return cls(2 * layers + of_states, 2 * head, per_score)

    def step(self, num_tokens: int, num_rows: int, num_scores: int) -> int:
        """Return the operations of a step.

        Args:
            num_tokens: tokens on the token axis.
            num_rows: rows whose logits are computed.
            num_scores: query-key pairs of one head, summed over the layers.
        """
        return num_tokens * self.per_token + num_rows * self.per_row + num_scores * self.per_score
