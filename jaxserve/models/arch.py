"""ArchConfig: the engine's description of a model of any family."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from jaxserve.api.pooling_params import Pooler
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.kv_forms import HeadVectors, KVForm, MixedHeads, PartOfPages
from jaxserve.layers.rope import RopeConfig
from jaxserve.layers.sharding import (
    DATA,
    EXPERTS,
    MODEL,
    TENSOR,
)
from jaxserve.layers.state_forms import StateForm
from jaxserve.models.kv_places import STATES, KVPlace, LayerKind, place_layers
from jaxserve.models.layer_facts import GlobalAttention, LatentAttention, LayerInputs, LayerOptions, local_heads
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions
from jaxserve.weights import Schemes


@dataclass(frozen=True)
class ArchConfig:
    """Sizes and switches of a decoder-only transformer, in this order: V D L Q K H F of the shape annotations.

    For a model split over devices, `over` says over how many, by which layers share pages, and `local` gives the sizes
    of one device: its V, Q, K and F.
    """

    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int  # longest sequence, RoPE scaling included: see hf_config.max_position
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]  # rotation of each layer's queries and keys; None where it has none
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens, None for full attention
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: frozenset[int] = frozenset()
    dtype: str = "float32"  # dtype of the checkpoint
    query_scale: float | None = None  # factor on scores; None is head_dim ** -0.5
    soft_cap: float | None = None  # bound of scores: soft_cap * tanh(scores / soft_cap)
    logit_soft_cap: float | None = None  # bound of logits, in the same way
    logit_scale: float = 1.0  # factor on logits
    embed_scale: float = 1.0  # factor on embeddings
    residual_scale: float = 1.0  # factor on what attention and MLP add to the residual stream
    activation: str = "gelu"  # activation of an MLP without a gate, see `layers.mlp.ACTIVATIONS`
    parallel: bool = False  # True if the MLP reads what attention reads, not what it adds to
    num_devices: int = 1  # devices that share heads, where these are the sizes of the whole model
    tensor_axis: tuple[str, ...] | None = None  # mesh axes of the split, where these are the sizes of one device
    num_data_shards: int = 1  # sets of devices among which rows and their pages are divided
    schemes: Schemes | None = None  # quantisation of the checkpoint's matrices
    experts: Experts | None = None  # experts of the layers; None for one MLP in each
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP although others have experts
    latent: LatentAttention | None = None  # sizes of attention over latents; None for keys and values of heads
    state: StateForm | None = None  # form of the state of layers without attention; None where there are none
    state_layers: frozenset[int] = frozenset()  # layers with a state and without attention
    one_kv_group: bool = False  # True where all layers keep their keys and values under the same pages
    global_attention: GlobalAttention | None = None  # layers with other KV heads; None where all have the same
    num_shared_layers: int = 0  # last layers, which read keys and values of earlier ones
    shared_ffn_factor: int = 1  # factor on the feed-forward size of these layers
    layer_inputs: LayerInputs | None = None  # inputs of each layer besides the residual stream
    pooler: Pooler | None = None  # pooling of a model that does not generate

    def __post_init__(self) -> None:
        assert len(self.windows) == len(self.ropes) == self.num_layers, (
            "each layer has a window and a rotation, or None"
        )
        assert (self.state is None) == (not self.state_layers), "layers with a state have a form"
        if not self.attended_windows:
            raise ConfigError("a model must have a layer with attention, got none; page tables belong to such layers")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        for rope, head_dim in dict.fromkeys(self.rotations):
            if rope is not None:
                rope.check(head_dim)
        if self.global_attention is not None:
            self._check_heads(self.global_attention.heads)

    def _check_heads(self, other: HeadVectors) -> None:
        if self.num_heads % other.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads must be a multiple of num_global_key_value_heads, "
                f"got {self.num_heads} and {other.num_kv_heads}"
            )
        sizes = self._kv_sizes
        if max(sizes) % min(sizes):
            raise ConfigError(
                f"num_key_value_heads * head_dim must be a multiple or a divisor of the same of global layers, so that "
                f"their pages have equal bytes, got {sizes[0] // 2} and {sizes[1] // 2} on a device"
            )

    def local(self, num_devices: int) -> "ArchConfig":
        """Return the sizes on one of `num_devices`; the vocabulary is padded on the last device if it does not divide.

        Raises:
            ConfigError: the devices that have the same rows cannot share the query heads or a feed-forward size.
        """
        if num_devices == 1:
            return self
        num_all, num_devices = num_devices, num_devices // self.num_data_shards
        assert self.global_attention is None or self.num_devices == num_devices, "`over` chooses pages for the devices"
        sizes, experts = {"num_attention_heads": self.num_heads}, self.experts
        if experts is None or self.dense_layers or experts.beside_mlp:
            sizes["intermediate_size"] = self.ffn_size
        if experts is not None:
            share = "" if experts.num_shards == 1 else " x expert_parallel_size"
            sizes[f"intermediate_size of an expert{share}"] = experts.ffn_size * experts.num_shards
            sizes["intermediate_size of shared experts"] = experts.shared_ffn_size
        for name, size in sizes.items():
            if size % num_devices:
                share = "" if self.num_data_shards == 1 else " / expert_parallel_size"
                raise ConfigError(
                    f"tensor_parallel_size{share} must divide {name}, got {num_devices} and {size}; "
                    f"set it to a divisor of {math.gcd(*sizes.values())}",
                    about=("tensor_parallel_size",),
                )
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // num_all),
            num_heads=self.num_heads // num_devices,
            num_kv_heads=local_heads(HeadVectors(self.num_kv_heads, self.head_dim), num_devices).num_kv_heads,
            global_attention=self.global_attention and self.global_attention.local(num_devices),
            ffn_size=self.ffn_size // num_devices,
            experts=experts and experts.local(num_all, EXPERTS, self.num_data_shards),
            state=self.state and self.state.local(num_devices),
            num_devices=1,
            tensor_axis=TENSOR,
        )

    def over(self, num_devices: int) -> "ArchConfig":
        """Return the config of a model whose heads are divided among so many devices."""
        return dataclasses.replace(self, num_devices=num_devices)

    def divided(self, num_devices: int, num_expert_shards: int = 1, num_data_shards: int = 1) -> "ArchConfig":
        """Return the config of a model that is divided among so many devices.

        Args:
            num_devices: number of devices.
            num_expert_shards: number of shares of whole experts.
            num_data_shards: number of sets of devices that have rows of their own; each set divides the heads.

        Raises:
            ConfigError: the experts or the rows cannot be divided.
        """
        arch = self.with_expert_shards(num_expert_shards)._with_data_shards(num_data_shards)
        return arch.over(num_devices // num_data_shards)

    def _with_data_shards(self, num_shards: int) -> "ArchConfig":
        if num_shards > 1 and (self.state is not None or self.layer_inputs is not None):
            what = "layers with a state" if self.state is not None else "layers with inputs of their own"
            raise ConfigError(
                f"enable_dp_attention must be False for {self.architecture}, as rows of {what} are not divided "
                f"among devices, got True; drop it"
            )
        return dataclasses.replace(self, num_data_shards=num_shards)

    @property
    def token_axis(self) -> str | None:
        """Mesh axis along which devices have tokens of their own, where these are the sizes of one device."""
        return DATA if self.tensor_axis and self.num_data_shards > 1 else None

    @property
    def vocab_axis(self) -> tuple[str, ...] | None:
        """Mesh axes over which the vocabulary is split, where these are the sizes of one device."""
        return MODEL if self.tensor_axis else None

    def with_expert_shards(self, num_shards: int) -> "ArchConfig":
        """Return the config of a model whose experts are divided among so many sets of devices.

        Raises:
            ConfigError: there are no experts, or they cannot be divided evenly.
        """
        if num_shards == 1:
            return self
        if self.experts is None:
            raise ConfigError(
                f"expert_parallel_size must be 1, as {self.architecture} has no experts, got {num_shards}; drop it"
            )
        if self.experts.num_experts % num_shards:
            raise ConfigError(
                f"expert_parallel_size must divide the number of experts, got {num_shards} and "
                f"{self.experts.num_experts}; set it to a divisor of {self.experts.num_experts}"
            )
        return dataclasses.replace(self, experts=self.experts._replace(num_shards=num_shards))

    def within(self, max_len: int) -> "ArchConfig":
        """Return the config for sequences of at most `max_len` tokens: a window that holds all of them is none.

        LongRoPE has its factors for short sequences if `max_len` is at most the length of its pre-training.
        """
        windows = tuple(window if window is not None and window < max_len else None for window in self.windows)
        ropes = tuple(rope and rope.within(max_len) for rope in self.ropes)
        return dataclasses.replace(self, windows=windows, ropes=ropes)

    @property
    def rope_pairs(self) -> RopeConfig | None:
        """Rotation that says which dimensions of a head are rotated together, the same in all layers."""
        return next(filter(None, self.ropes), None)

    def times(self, factor: int) -> "ArchConfig":
        """Return the config with heads multiplied by `factor`."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads * factor,
            num_kv_heads=self.num_kv_heads * factor,
            global_attention=self.global_attention and self.global_attention.times(factor),
            state=self.state and self.state.times(factor),
        )

    @property
    def rotations(self) -> tuple[tuple[RopeConfig | None, int], ...]:
        """Rotation of each layer's queries and keys, and the size of its heads."""
        return tuple(zip(self.ropes, map(self.head_dim_of, range(self.num_layers)), strict=True))

    def head_dim_of(self, layer: int) -> int:
        """Return the size of a layer's heads."""
        return self.layer_heads(layer).head_dim

    def layer_heads(self, layer: int) -> HeadVectors:
        """Return the KV heads of a layer."""
        if self.global_attention is not None and layer in self.global_attention.layers:
            return self.global_attention.heads
        return HeadVectors(self.num_kv_heads, self.head_dim)

    def is_global(self, layer: int) -> bool:
        """Return whether a layer is one of `global_attention`."""
        return self.global_attention is not None and layer in self.global_attention.layers

    def reads_other_layer(self, layer: int) -> bool:
        """Return whether a layer has no keys and values of its own."""
        return layer >= self.num_layers - self.num_shared_layers

    def kv_source(self, layer: int) -> int | None:
        """Return the layer whose keys and values this and later layers read; None if it alone reads its own."""
        alike = [
            own
            for own in range(self.num_layers - self.num_shared_layers)
            if self.num_shared_layers and self.is_global(own) == self.is_global(layer)
        ]
        return alike[-1] if alike and (self.reads_other_layer(layer) or layer == alike[-1]) else None

    def attention(self, layer: int) -> AttentionOptions:
        """Return the options of a layer's attention."""
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        return AttentionOptions(scale, self.windows[layer], self.soft_cap)

    def layer_options(self, layer: int) -> LayerOptions:
        """Return the static facts of a layer that its attention needs."""
        state = self.state if layer in self.state_layers else None
        source = self.kv_source(layer)
        return LayerOptions(self.attention(layer), self.kv_places[layer].group, self.kv_form(layer), state, source)

    def kv_form(self, layer: int) -> KVForm:
        """Return the form of a layer's tokens in the pool."""
        if self.global_attention is None:
            return self.kv
        own = self.layer_heads(layer)
        is_smaller = isinstance(self.kv, MixedHeads) and own == self.kv.smaller
        return own if not is_smaller else PartOfPages(own.num_kv_heads, own.head_dim, self._num_parts(layer))

    @property
    def _kv_sizes(self) -> tuple[int, int]:
        """Elements of a token's keys and values on a device, in a layer and in one of `global_attention`."""
        own = HeadVectors(self.num_kv_heads, self.head_dim)
        both = own, self.global_attention.heads if self.global_attention else own
        local, wide = (local_heads(heads, self.num_devices).token_size for heads in both)
        return local, wide

    def _num_parts(self, layer: int) -> int:
        """Return the number of layers like this one that take the room of one of the pool on a device."""
        return max(self._kv_sizes) // self._kv_sizes[self.is_global(layer)]

    @property
    def kv_group_forms(self) -> tuple[KVForm, ...]:
        """Form of the tokens of each KV group."""
        forms = {place.group: self.kv_form(layer) for layer, place in enumerate(self.kv_places)}
        return tuple(forms[group] for group in sorted(forms) if group != STATES)

    @property
    def num_layers_read(self) -> Fraction:
        """Layers with attention, in the room that a layer takes in the pool."""
        attended = (layer for layer in range(self.num_layers) if layer not in self.state_layers)
        return sum((Fraction(1, self._num_parts(layer)) for layer in attended), Fraction(0))

    @property
    def mean_score_size(self) -> Fraction:
        """Mean over the layers with attention of the elements that a query-key pair multiplies."""
        attended = [layer for layer in range(self.num_layers) if layer not in self.state_layers]
        return Fraction(sum(self.kv_form(layer).score_size for layer in attended), len(attended))

    @property
    def attended_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer with attention."""
        return tuple(window for layer, window in enumerate(self.windows) if layer not in self.state_layers)

    @property
    def num_states(self) -> int:
        """Number of layers with a state."""
        return self.num_layers - len(self.attended_windows)

    @property
    def kv(self) -> KVForm:
        """Form of tokens in the pool; of the larger ones, where layers differ: see `kv_form`."""
        if self.latent is not None:
            return self.latent.form(self.head_dim)
        own = HeadVectors(self.num_kv_heads, self.head_dim)
        if self.global_attention is None or self.global_attention.heads == own:
            return own
        smaller, larger = sorted((own, self.global_attention.heads), key=lambda heads: heads.token_size)
        return MixedHeads(larger.num_kv_heads, larger.head_dim, smaller)

    @cached_property
    def num_first_layers(self) -> int:
        """Number of layers before those whose kinds repeat: layers without experts, if only the first ones are.

        They have to be like the others in all else, as pages are laid out by the period of the others.
        """
        num_first, layers = len(self.dense_layers), range(self.num_layers)
        is_alike = len({(self.windows[layer], layer in self.state_layers) for layer in layers}) == 1
        is_first = self.dense_layers == frozenset(range(num_first)) and num_first < self.num_layers
        return num_first if is_first and is_alike else 0

    @cached_property
    def period(self) -> int:
        """Number of layers after which their kinds repeat, from layer `num_first_layers` on.

        Where kinds of layers take different room, several times as many, if there are as many, that fill their pages.
        """
        layers = range(self.num_first_layers, self.num_layers)
        shared = frozenset(filter(self.reads_other_layer, layers))
        own = self.global_attention.layers if self.global_attention else frozenset()
        facts = self.dense_layers, self.state_layers, own, shared
        kinds = [(self.attention(layer), self.ropes[layer], *(layer in fact for fact in facts)) for layer in layers]
        period = next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), len(kinds))
        if self.global_attention is None:
            return period
        counts = Counter(map(self._num_parts, layers[:period]))
        factor = math.lcm(*(num_parts // math.gcd(num_parts, count) for num_parts, count in counts.items()))
        return factor * period if 2 * factor * period <= len(kinds) else period

    @cached_property
    def kv_places(self) -> tuple[KVPlace, ...]:
        """Place of each layer in the KV groups; those that read another layer's keys and values are where that is."""
        if self.one_kv_group:
            layers = ((self._source(layer), self._num_parts(layer)) for layer in range(self.num_layers))
            return tuple(KVPlace(0, source * num_parts) for source, num_parts in layers)
        num_own = self.num_layers - self.num_shared_layers
        period = self.period if 2 * self.period <= self.num_layers else None
        places = place_layers([self._kind(layer) for layer in range(num_own)], period)
        return (*places, *(places[self._source(layer)] for layer in range(num_own, self.num_layers)))

    def _kind(self, layer: int) -> LayerKind | None:
        """Return the kind of a layer with keys and values of its own; None if it has a state."""
        if layer in self.state_layers:
            return None
        return LayerKind(self.windows[layer], self.is_global(layer), self._num_parts(layer))

    def _source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        source = self.kv_source(layer) if self.reads_other_layer(layer) else layer
        assert source is not None, "there is an earlier layer of each kind"
        return source

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each KV group; None for full attention."""
        windows = {place.group: window for place, window in zip(self.kv_places, self.windows, strict=True)}
        return tuple(windows[group] for group in sorted(windows) if group != STATES)

    @property
    def kv_group_layers(self) -> int:
        """Layers of the pool, whose keys and values every page has room for: those of the largest KV group."""
        rooms = (
            place.layer // self._num_parts(layer) for layer, place in enumerate(self.kv_places) if place.group != STATES
        )
        return 1 + max(rooms)
