"""ArchConfig: the engine's description of a model of any family."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.kv_forms import HeadVectors, KVForm, Latents
from jaxserve.layers.rope import RopeConfig
from jaxserve.layers.state_forms import StateForm
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions
from jaxserve.pooling import Pooler
from jaxserve.sharding import EXPERT, TENSOR, held_heads
from jaxserve.weights import Schemes

MAX_KV_GROUPS = 8  # most groups of layers whose kinds do not repeat
STATES = -1  # group of layers without keys and values, which have a state


class LayerOptions(NamedTuple):
    """Static facts of a layer that its attention needs.

    Attributes:
        attention: options of its attention.
        kv_group: KV group of its keys and values.
        kv: form of its tokens in the pool.
        state: form of its state, in a layer that has one and no attention; else None.
    """

    attention: AttentionOptions
    kv_group: int
    kv: KVForm
    state: StateForm | None = None


class LatentAttention(NamedTuple):
    """Sizes of multi-head latent attention, besides that of the rotated part, which is `ArchConfig.head_dim`.

    Attributes:
        rank: elements of a latent before the rotated ones, r.
        nope_dim: elements of a head's queries and keys that are not rotated.
        value_dim: elements of a head's values.
        q_rank: size between the two matrices of queries; None if they have one.
        interleaved: True if neighbouring elements are rotated together; False for those of the two halves.
    """

    rank: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    interleaved: bool = True


class KVPlace(NamedTuple):
    """Place of a layer's keys and values, or of its state.

    Attributes:
        group: KV group of the layer; STATES if it has a state.
        layer: number of the layer in the group, or among the layers with a state.
    """

    group: int
    layer: int


@dataclass(frozen=True)
class ArchConfig:
    """Sizes and switches of a decoder-only transformer, in this order: V D L Q K H F of the shape annotations.

    For a model split over devices, `local` gives the sizes of one device: its V, Q, K and F.
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
    tensor_axis: tuple[str, ...] | None = None  # mesh axes of the split, where these are the sizes of one device
    schemes: Schemes | None = None  # quantisation of the checkpoint's matrices
    experts: Experts | None = None  # experts of the layers; None for one MLP in each
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP although others have experts
    latent: LatentAttention | None = None  # sizes of attention over latents; None for keys and values of heads
    state: StateForm | None = None  # form of the state of layers without attention; None where there are none
    state_layers: frozenset[int] = frozenset()  # layers with a state and without attention
    one_kv_group: bool = False  # True where all layers keep their keys and values under the same pages
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
        for rope in filter(None, dict.fromkeys(self.ropes)):
            self._check_rope(rope)

    def _check_rope(self, rope: RopeConfig) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        num_rotated = rope.rotated(self.head_dim)
        if num_rotated < 2 or num_rotated % 2:
            raise ConfigError(
                f"partial_rotary_factor must rotate an even number of dimensions, got {rope.fraction} of head_dim "
                f"{self.head_dim}"
            )
        factors = {k: v for k, v in rope.options if isinstance(v, tuple)}
        if wrong := {name: len(values) for name, values in factors.items() if len(values) != num_rotated // 2}:
            raise ConfigError(f"{', '.join(wrong)} must have {num_rotated // 2} numbers, got {wrong}")

    def local(self, num_devices: int) -> "ArchConfig":
        """Return the sizes on one of `num_devices`; the vocabulary is padded on the last device if it does not divide.

        Raises:
            ConfigError: `num_devices` does not divide the query heads or a feed-forward size.
        """
        if num_devices == 1:
            return self
        sizes, experts = {"num_attention_heads": self.num_heads}, self.experts
        if experts is None or self.dense_layers:
            sizes["intermediate_size"] = self.ffn_size
        if experts is not None:
            share = "" if experts.num_shards == 1 else " x expert_parallel_size"
            sizes[f"intermediate_size of an expert{share}"] = experts.ffn_size * experts.num_shards
            sizes["intermediate_size of shared experts"] = experts.shared_ffn_size
        for name, size in sizes.items():
            if size % num_devices:
                raise ConfigError(
                    f"tensor_parallel_size must divide {name}, got {num_devices} and {size}; "
                    f"set it to a divisor of {math.gcd(*sizes.values())}"
                )
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // num_devices),
            num_heads=self.num_heads // num_devices,
            num_kv_heads=len(held_heads(self.num_kv_heads, 0, num_devices)),
            ffn_size=self.ffn_size // num_devices,
            experts=experts and experts.local(num_devices, EXPERT),
            state=self.state and self.state.local(num_devices),
            tensor_axis=TENSOR,
        )

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
        """Return the config with heads and vocabulary multiplied by `factor`."""
        return dataclasses.replace(
            self,
            vocab_size=self.vocab_size * factor,
            num_heads=self.num_heads * factor,
            num_kv_heads=self.num_kv_heads * factor,
            state=self.state and self.state.times(factor),
        )

    def attention(self, layer: int) -> AttentionOptions:
        """Return the options of a layer's attention."""
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        return AttentionOptions(scale, self.windows[layer], self.soft_cap)

    def layer_options(self, layer: int) -> LayerOptions:
        """Return the static facts of a layer that its attention needs."""
        state = self.state if layer in self.state_layers else None
        return LayerOptions(self.attention(layer), self.kv_places[layer].group, self.kv, state)

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
        """Form of tokens in the pool."""
        if self.latent is None:
            return HeadVectors(self.num_kv_heads, self.head_dim)
        return Latents(self.latent.rank, self.head_dim)

    @cached_property
    def num_first_layers(self) -> int:
        """Number of layers before those whose kinds repeat: layers without experts, if only the first ones are."""
        num_first = len(self.dense_layers)
        return num_first if self.dense_layers == frozenset(range(num_first)) and num_first < self.num_layers else 0

    @cached_property
    def period(self) -> int:
        """Number of layers after which their kinds repeat, from layer `num_first_layers` on."""
        layers = range(self.num_first_layers, self.num_layers)
        facts = self.dense_layers, self.state_layers
        kinds = [(self.attention(layer), self.ropes[layer], *(layer in fact for fact in facts)) for layer in layers]
        return next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), len(kinds))

    @cached_property
    def kv_places(self) -> tuple[KVPlace, ...]:
        """Place of each layer in the KV groups: equally many layers of one window in each, in every period.

        If the layers do not repeat, a group has as many layers as have the rarest window, or more if there would be
        more than MAX_KV_GROUPS groups; the last group of a window may have fewer. Layers with a state are in none.
        """
        if self.one_kv_group:
            return tuple(KVPlace(0, layer) for layer in range(self.num_layers))
        period = self.period if 2 * self.period <= self.num_layers else self.num_layers
        kinds = [STATES if layer in self.state_layers else window for layer, window in enumerate(self.windows)]
        counts = Counter(kind for kind in kinds[:period] if kind != STATES)
        group_size = math.gcd(*counts.values())
        if period == self.num_layers:
            group_size = max(min(counts.values()), -(-self.num_layers // MAX_KV_GROUPS))
        first_groups = dict(
            zip(counts, accumulate((-(-n // group_size) for n in counts.values()), initial=0), strict=False)
        )
        places: list[KVPlace] = []
        for layer, window in enumerate(kinds):
            if window == STATES:
                places.append(KVPlace(STATES, kinds[:layer].count(STATES)))
                continue
            start = layer // period * period
            group, number = divmod(kinds[start:layer].count(window), group_size)
            places.append(KVPlace(first_groups[window] + group, start // period * group_size + number))
        return tuple(places)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each KV group; None for full attention."""
        windows = {place.group: window for place, window in zip(self.kv_places, self.windows, strict=True)}
        return tuple(windows[group] for group in sorted(windows) if group != STATES)

    @property
    def kv_group_layers(self) -> int:
        """Layers of the largest KV group, whose keys and values every page has room for."""
        return 1 + max(place.layer for place in self.kv_places if place.group != STATES)


def token_id_set(value: Any) -> frozenset[int]:
    """Parse the end-of-sequence ids of Hugging Face: null, a number or a list; ConfigError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id must be a token id, a list of them or null, got {value!r}")
    return frozenset(ids)
