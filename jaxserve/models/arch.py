"""ArchConfig: the engine's model description, the same for all families: `LayerSpec`s, embeddings and logits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.api.pooling_params import Pooler
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.layers.rope import RopeConfig
from jaxserve.layers.sharding import DATA, MODEL, TENSOR
from jaxserve.layers.state_forms import StateForm
from jaxserve.models.image_input import ImageInput
from jaxserve.models.kv_layout import KVLayout, check_sizes, filled_period, lay_out
from jaxserve.models.layer_spec import AttentionSpec, LayerOptions, LayerSpec
from jaxserve.scheduling.step_costs import TokenChoice
from jaxserve.weights import Schemes

if TYPE_CHECKING:
    from jaxserve.models.vision.arch import VisionArch


class PerLayerEmbeddings(NamedTuple):
    """Table with per-layer inputs in addition to the residual stream; see `models/per_layer_embeddings.py`.

    Attributes:
        vocab_size: table rows.
        size: elements per token and layer.
    """

    vocab_size: int
    size: int


class Stage(NamedTuple):
    """Layers of a whole model that a pipeline stage computes; the default is all of them.

    Attributes:
        first_layer: index of its first layer in the whole model.
        is_first: True if it embeds the tokens; later stages get hidden states.
        is_last: True if it has the final norm and the head, and samples.
        kv_groups: KV group of each layer in the whole model; None if the groups follow from the layers.
        num_kv_groups: number of KV groups in the whole model, of which some may have no layer here.
    """

    first_layer: int = 0
    is_first: bool = True
    is_last: bool = True
    kv_groups: tuple[int, ...] | None = None
    num_kv_groups: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if it is the only stage."""
        return self.is_first and self.is_last


WHOLE = Stage()


@dataclass(frozen=True)
class ArchConfig:
    """A decoder's layers, sizes and switches, parsed from config.json.

    Sizes are the whole model's. `divided` sets how many devices will share it, which determines the KV groups; `local`
    returns a config with one device's sizes.
    """

    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int  # longest sequence, RoPE scaling included: see hf_config.max_position
    norm_eps: float
    tied_embeddings: bool = False
    eos_ids: frozenset[int] = frozenset()
    dtype: str = "float32"  # checkpoint dtype
    logit_soft_cap: float | None = None  # bound on logits: cap * tanh(logits / cap)
    logit_scale: float = 1.0  # factor on logits
    embed_scale: float = 1.0  # factor on embeddings
    residual_scale: float = 1.0  # factor on the outputs added to the residual stream
    parallel: bool = False  # True if the MLP reads the same input as attention
    num_devices: int = 1  # devices that divide the heads, if sizes are the whole model's
    tensor_axis: tuple[str, ...] | None = None  # mesh axes of the split, if sizes are one device's
    num_data_shards: int = 1  # device sets that divide the rows and their pages
    schemes: Schemes | None = None  # quantisation in the checkpoint
    one_kv_group: bool = False  # True if all layers keep their keys and values under the same pages
    per_layer_embeddings: PerLayerEmbeddings | None = None
    page_budget: int | None = None  # maximum tokens in the pages that an output token chooses; None if it sees all
    pooler: Pooler | None = None  # pooling, for models that do not generate
    images: ImageInput | None = None  # images that it takes; None for text only
    stage: Stage = WHOLE  # pipeline stage that has these layers

    def __post_init__(self) -> None:
        if not self.attention_layers:
            raise ConfigError("a model must have a layer with attention, got none; page tables belong to such layers")
        for attention in dict.fromkeys(self.attention_layers):
            if attention.num_heads % attention.num_kv_heads:
                has_global_heads = attention.window is None and len({each.kv for each in self.attention_layers}) > 1
                field = "num_global_key_value_heads" if has_global_heads else "num_key_value_heads"
                raise ConfigError(
                    f"num_attention_heads must be a multiple of {field}, "
                    f"got {attention.num_heads} and {attention.num_kv_heads}"
                )
            if attention.rope is not None:
                attention.rope.check(attention.head_dim)
        check_sizes(self.layers, self.num_devices)

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    @cached_property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """Attention in all layers that are not recurrent."""
        return tuple(layer.attention for layer in self.layers if layer.state is None)

    @property
    def attention(self) -> AttentionSpec:
        """Attention in the first layer that is not recurrent; others may differ in windows, RoPE and KV heads."""
        return self.attention_layers[0]

    @property
    def image_token_id(self) -> int | None:
        """Id of the tokens that take images' embeddings; None for text only."""
        return None if self.images is None else self.images.token_id

    @property
    def tower(self) -> "VisionArch | None":
        """Vision tower; None without images, and in pipeline stages after the first one, which encodes all images."""
        return self.images.tower if self.images is not None and self.stage.is_first else None

    @property
    def num_deep_layers(self) -> int:
        """Number of first layers that get features of images (DeepStack)."""
        return self.images.num_deep_layers if self.images is not None and self.stage.is_first else 0

    @property
    def sees_images(self) -> bool:
        """True if tokens of an image see the whole image in some layers."""
        return any(attention.sees_images for attention in self.attention_layers)

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with experts."""
        return sum(layer.experts is not None for layer in self.layers)

    @property
    def experts(self) -> Experts | None:
        """Experts in MoE layers; None without."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def state(self) -> StateForm | None:
        """State in recurrent layers; None without."""
        return next((layer.state for layer in self.layers if layer.state), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window by layer; None for full attention and in recurrent layers."""
        return tuple(None if layer.state else layer.attention.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Rotation by layer; None in NoPE and recurrent layers."""
        return tuple(None if layer.state else layer.attention.rope for layer in self.layers)

    def with_attention(self, **columns: Sequence[Any]) -> "ArchConfig":
        """Return the config with other attention fields.

        Args:
            columns: one value per layer, by field; ignored in recurrent layers.
        """
        assert all(len(column) == self.num_layers for column in columns.values()), "each layer has a value"
        layers = (
            layer.attending(**{name: column[index] for name, column in columns.items()})
            for index, layer in enumerate(self.layers)
        )
        return dataclasses.replace(self, layers=tuple(layers))

    def with_states(self, states: Mapping[int, StateForm]) -> "ArchConfig":
        """Return the config with some layers recurrent.

        Args:
            states: recurrent states by layer index.
        """
        layers = (
            dataclasses.replace(layer, mixer=states.get(index, layer.mixer)) for index, layer in enumerate(self.layers)
        )
        return dataclasses.replace(self, layers=tuple(layers))

    def local(self, num_devices: int) -> "ArchConfig":
        """Return the sizes on one of `num_devices`; the vocabulary is padded on the last device if it does not divide.

        Raises:
            ConfigError: the devices that have the same rows cannot share the query heads or a feed-forward size.
        """
        if num_devices == 1:
            return self
        num_head_shards = num_devices // self.num_data_shards
        has_one_size = len({attention.kv for attention in self.attention_layers}) == 1
        assert has_one_size or self.num_devices == num_head_shards, "`divided` lays out the pages for these devices"
        sizes = {"num_attention_heads": self.attention_layers[0].num_heads}
        if mlp_sizes := [layer.mlp.ffn_size for layer in self.layers if layer.mlp]:
            sizes["intermediate_size"] = math.gcd(*mlp_sizes)
        if (experts := self.experts) is not None:
            shards = "" if experts.num_shards == 1 else " x expert_parallel_size"
            sizes[f"intermediate_size of an expert{shards}"] = experts.ffn_size * experts.num_shards
            sizes["intermediate_size of shared experts"] = experts.shared_ffn_size
        for name, size in sizes.items():
            if size % num_head_shards:
                shards = "" if self.num_data_shards == 1 else " / expert_parallel_size"
                raise ConfigError(
                    f"tensor_parallel_size{shards} must divide {name}, got {num_head_shards} and {size}; "
                    f"set it to a divisor of {math.gcd(*sizes.values())}",
                    about=("tensor_parallel_size",),
                )
        layers = {layer: layer.local(num_devices, self.num_data_shards) for layer in dict.fromkeys(self.layers)}
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // num_devices),
            layers=tuple(layers[layer] for layer in self.layers),
            num_devices=1,
            tensor_axis=TENSOR,
            images=self.images and self.images._replace(tower=self.images.tower.divided(num_head_shards).local()),
        )

    def divided(self, num_devices: int, num_expert_shards: int = 1, num_data_shards: int = 1) -> "ArchConfig":
        """Return the config divided among devices.

        Args:
            num_devices: all devices.
            num_expert_shards: shards with whole experts.
            num_data_shards: device sets with different rows; each set divides the heads.

        Raises:
            ConfigError: the experts or the rows cannot be divided.
        """
        layers = self.layers if num_expert_shards == 1 else self._expert_shards(num_expert_shards)
        if num_data_shards > 1 and (self.state is not None or self.per_layer_embeddings is not None):
            kind = "recurrent layers" if self.state is not None else "layers with inputs of their own"
            raise ConfigError(
                f"enable_dp_attention must be False for {self.architecture}, as rows of {kind} are not divided "
                f"among devices, got True; drop it"
            )
        num_head_shards = num_devices // num_data_shards
        return dataclasses.replace(
            self,
            layers=layers,
            num_data_shards=num_data_shards,
            num_devices=num_head_shards,
            images=self.images and self.images._replace(tower=self.images.tower.divided(num_head_shards)),
        )

    def _expert_shards(self, num_shards: int) -> tuple[LayerSpec, ...]:
        """Return the layers' specs with experts divided into shards.

        Raises:
            ConfigError: there are no experts, or `num_shards` does not divide them.
        """
        if (experts := self.experts) is None:
            raise ConfigError(
                f"expert_parallel_size must be 1, as {self.architecture} has no experts, got {num_shards}; drop it"
            )
        if experts.num_experts % num_shards:
            raise ConfigError(
                f"expert_parallel_size must divide the number of experts, got {num_shards} and "
                f"{experts.num_experts}; set it to a divisor of {experts.num_experts}"
            )
        divided = (layer.experts and layer.experts._replace(num_shards=num_shards) for layer in self.layers)
        return tuple(dataclasses.replace(layer, experts=each) for layer, each in zip(self.layers, divided, strict=True))

    def part(self, layers: range) -> "ArchConfig":
        """Return the pipeline stage with some consecutive layers, whose keys and values no other layer reads."""
        first, groups = layers.start, [each.group for each in self.kv_layout.layers]

        def moved(layer: LayerSpec) -> LayerSpec:
            source = None if layer.state else layer.attention.kv_source
            return layer if source is None or source < 0 else layer.attending(kv_source=source - first)

        stage = Stage(
            first,
            is_first=first == 0,
            is_last=layers.stop == self.num_layers,
            kv_groups=tuple(groups[layer] for layer in layers),
            num_kv_groups=1 + max(groups),
        )
        return dataclasses.replace(self, layers=tuple(moved(self.layers[layer]) for layer in layers), stage=stage)

    @property
    def token_axis(self) -> str | None:
        """Mesh axis along which devices have different tokens, if sizes are one device's."""
        return DATA if self.tensor_axis and self.num_data_shards > 1 else None

    @property
    def vocab_axis(self) -> tuple[str, ...] | None:
        """Mesh axes over which the vocabulary is split, if sizes are one device's."""
        return MODEL if self.tensor_axis else None

    def within(self, max_len: int) -> "ArchConfig":
        """Return the config for sequences up to `max_len` tokens: windows that hold all tokens become None.

        LongRoPE uses its short factors if `max_len` is at most its pre-training length.
        """
        windows = [window if window is not None and window < max_len else None for window in self.windows]
        return self.with_attention(window=windows, rope=[rope and rope.within(max_len) for rope in self.ropes])

    def times(self, factor: int) -> "ArchConfig":
        """Return the config with heads multiplied by `factor`."""
        layers = (dataclasses.replace(layer, mixer=layer.mixer.times(factor)) for layer in self.layers)
        return dataclasses.replace(self, layers=tuple(layers))

    def layer_options(self, layer: int) -> LayerOptions:
        """Return a layer's static parameters, given its index: spec, KV group, token layout in the pool, KV source."""
        spec, layout = self.layers[layer], self.kv_layout
        source = None if spec.state else spec.attention.kv_source
        if source is None and any(each.kv_source == layer for each in self.attention_layers):
            source = layer
        return LayerOptions(spec, layout.layers[layer].group, layout.form(layer), source)

    @cached_property
    def last_kv_layer(self) -> int | None:
        """Last layer that makes keys and values, after which only the rows' last tokens need hidden states.

        None if a later layer, or the layer itself, is recurrent or has cross attention: these read all tokens. So do
        later stages.
        """
        for index in reversed(range(self.num_layers)):
            layer = self.layers[index]
            if not (layer.keeps_tokens and self.stage.is_last):
                return None
            if layer.attention.kv_source is None:
                return index
        return None

    @property
    def mean_score_size(self) -> Fraction:
        """Mean multiply-adds per head and query-key pair, over layers with attention."""
        sizes = [attention.kv.score_size for attention in self.attention_layers]
        return Fraction(sum(sizes), len(sizes))

    @cached_property
    def num_first_layers(self) -> int:
        """Number of layers before the first period: dense layers, if these come first and all others have experts; and
        layers that get features of images (DeepStack).

        It is 0 if windows or states differ, because pages are laid out by the period.
        """
        is_dense = [layer.experts is None for layer in self.layers]
        num_first = is_dense.index(False) if False in is_dense else 0
        is_alike = len({(layer.state, window) for layer, window in zip(self.layers, self.windows, strict=True)}) == 1
        num_first = num_first if is_alike and not any(is_dense[num_first:]) else 0
        assert not self.num_deep_layers or is_alike, "layers of models with DeepStack are alike"
        return max(num_first, self.num_deep_layers)

    @cached_property
    def period(self) -> int:
        """Number of layers after which their specs repeat, from layer `num_first_layers` on.

        If layers differ in bytes per token, a multiple that fills whole pages, provided that it repeats too.
        """
        layers = self.layers[self.num_first_layers :] or self.layers[-1:]
        period = next((p for p in range(1, len(layers)) if layers[p:] == layers[:-p]), len(layers))
        return filled_period(layers, period, self.num_devices)

    @cached_property
    def kv_layout(self) -> KVLayout:
        """Layout in the KV pool."""
        period = self.period if 2 * self.period <= self.num_layers else None
        options: dict[str, Any] = {"period": period, "has_one_group": self.one_kv_group}
        if self.stage.kv_groups is not None:
            options |= {"groups": self.stage.kv_groups, "num_groups": self.stage.num_kv_groups}
        layout = lay_out(self.layers, num_devices=self.num_devices, **options)
        return layout if self.page_budget is None else layout.with_bounds(self.page_budget, self.tensor_axis)

    @property
    def token_choice(self) -> TokenChoice | None:
        """Mean costs of indexers, by which queries choose their tokens in all layers; None without indexers."""
        if not isinstance(kv := self.attention.kv, IndexedLatents):
            return None
        fraction = sum(not each.shares_choice for each in self.attention_layers) / len(self.attention_layers)
        score_size, index_dim = self.attention.num_heads * kv.score_size, fraction * kv.index_dim
        key_bytes = index_dim / (kv.token_size - kv.index_dim + index_dim)
        return TokenChoice(kv.top_k, key_bytes, kv.num_index_heads * index_dim / score_size)

    @property
    def has_alike_heads(self) -> bool:
        """True if all layers have full attention with the same KV heads."""
        [(kv, window), *others] = {(attention.kv, attention.window) for attention in self.attention_layers}
        return not others and type(kv) is HeadVectors and window is None and self.state is None

    def with_page_budget(self, budget: int | None, max_len: int) -> "ArchConfig":
        """Return the config for output tokens that attend to the best pages of up to `budget` tokens.

        Without a budget, or if all of `max_len` tokens are within it, output tokens see all.

        Raises:
            ConfigError: not all layers have full attention with the same KV heads.
        """
        if budget is None or budget >= max_len:
            return self
        if not self.has_alike_heads:
            raise ConfigError(
                f"sparse_attention needs a model with full attention and the same KV heads in all layers, got "
                f"{self.architecture}; drop it"
            )
        return dataclasses.replace(self, page_budget=budget)
