"""ModelFamily: the functions that define a model family, as a value; FLOP counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax import Array

from jaxserve.layers.norm import NormFunction, offset_norm, rms_norm
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import block as blocks
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.layer_tensors import LLAMA, TensorNames, decoder_specs
from jaxserve.models.params import LAYER_PROJECTION, ParamSpec

# block(layer params, x[T,D], tokens, layer, arch=) -> (x[T,D], tokens for the next layer)
Block = Callable[..., tuple[Array, TokenContext]]


class Fold(NamedTuple):
    """Pair of tensors in a layer between which per-channel factors can move: from a matrix's inputs to their source.

    Attributes:
        source: norm or matrix whose outputs are the inputs, perhaps after elementwise multiplication.
        target: the only matrix that reads them.
        part: index in the source's `hf_names` of the tensor whose rows are the channels; None for a norm. Each query
            head in a group reads the channels of the group's KV head.
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
    """Model structure that one or more architectures share; by default Llama's.

    Attributes:
        parse: function that converts a config.json with `defaults` merged in; raises ConfigError for unsupported
            settings.
        names: tensors in checkpoints. The decoder reads `embed`, `final_norm` and, unless tied, `lm_head`; the block
            reads the tensors under `("layers", layer)`.
        defaults: values of absent config.json fields.
        block: one decoder layer, a pure function. Attention rotates a head's dimension i with i + H / 2.
        norm: norm function for all layers and the final norm; see `layers.norm`.
        folds: pairs of tensors in each layer between which calibrated quantisation may move factors.
        layer_inputs: function from parameters, ArchConfig, token ids [T] and their embeddings [T, D] to the layers'
            inputs [L, T, size] in addition to the residual stream, or None; a block reads `LayerContext.inputs`.
    """

    parse: Callable[[HfConfig], ArchConfig]
    names: TensorNames = LLAMA
    defaults: Mapping[str, Any] = field(default_factory=dict)
    block: Block = blocks.block
    norm: NormFunction = rms_norm
    folds: tuple[Fold, ...] = FOLDS
    layer_inputs: Callable[[Any, ArchConfig, Array, Array], Array | None] = lambda *_: None

    def read_arch(self, config: HfConfig) -> ArchConfig:
        """Convert a config.json; ConfigError for unsupported settings."""
        return self.parse({**self.defaults, **config})

    def param_specs(self, arch: ArchConfig) -> list[ParamSpec]:
        """Return one ParamSpec per tensor in a model of this family."""
        return decoder_specs(arch, self.names)

    @property
    def norm_offset(self) -> float:
        """Constant that norms add to their weights."""
        return 1.0 if self.norm is offset_norm else 0.0


def widest_output(specs: list[ParamSpec]) -> int:
    """Return the size of a token's largest matmul output in a layer, on the device that holds these rows."""
    return max(spec.token_rows for spec in specs if spec.is_matrix and spec.path[0] == "layers")


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs that a step takes; a multiply-add counts as two.

    Attributes:
        per_token: FLOPs per token in the layers' matmuls and recurrent states.
        per_row: FLOPs for a row's logits, or its labels in a classifier.
        per_score: FLOPs for one query token with one key token in one layer, over all heads; the mean if layers differ.
    """

    per_token: int
    per_row: int
    per_score: int

    @classmethod
    def from_specs(cls, arch: ArchConfig, specs: list[ParamSpec]) -> "FlopCounts":
        """Count the FLOPs of the whole model, or of one device's part if `arch` has one device's sizes."""
        matrices = [spec for spec in specs if spec.is_matrix and spec.path[0] in ("layers", LAYER_PROJECTION)]
        # Under data-parallel attention each device computes attention and MLP only for its own tokens.
        num_shards = arch.num_data_shards if arch.token_axis else 1
        layers = sum(
            spec.mean_token_rows * spec.shape[1] // (num_shards if spec.experts is None else 1) for spec in matrices
        )
        state_flops = sum(layer.state.token_flops for layer in arch.layers if layer.state)
        outputs = arch.vocab_size if arch.pooler is None else arch.pooler.num_labels
        head = outputs * arch.hidden_size if arch.stage.is_last else 0
        per_score = int(2 * arch.attention.num_heads * arch.mean_score_size / num_shards)
        return cls(2 * layers + state_flops, 2 * head, per_score)

    def step(self, num_tokens: int, num_rows: int, num_scores: int) -> int:
        """Return a step's FLOPs.

        Args:
            num_tokens: tokens on the token axis.
            num_rows: rows whose logits are computed.
            num_scores: query-key pairs in one head, summed over the layers.
        """
        return num_tokens * self.per_token + num_rows * self.per_row + num_scores * self.per_score
