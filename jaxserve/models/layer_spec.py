"""LayerSpec: one decoder layer. An architecture is a list of layer specs; all else is derived from it.

A layer has one mixer and a feed-forward part: an MLP, experts, both or none.

| property | field |
|---|---|
| attention heads, query and key norms, biases, gate, scale | `AttentionSpec` |
| positions: RoPE, NoPE | `AttentionSpec.rope`, None for NoPE |
| sliding window | `AttentionSpec.window` |
| vectors per token in the KV pool: keys and values, or MLA latents, with or without index keys | `AttentionSpec.kv` |
| tokens chosen by an earlier layer's indexer | `AttentionSpec.shares_choice` |
| shared KV, cross attention: keys and values that the layer does not make | `AttentionSpec.kv_source` |
| recurrent layers: Gated DeltaNet, Mamba-2 | a `StateForm` as the mixer |
| MoE with dense layers first or between | `mlp` in some layers, `experts` in the others |
| an MLP alongside experts | both |
| self-attention, cross attention and an MLP, as in encoder-decoder models | two specs, the first without an MLP |

`ArchConfig.period`, which is stacked and scanned, is the period after which equal specs repeat; KV groups and positions
in them (`models/kv_layout.py`) are derived from the mixers. The table with per-layer inputs
(`models/per_layer_embeddings.py`) has rows for all layers, so it belongs to the model.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax import Array

from jaxserve.layers.experts import Experts
from jaxserve.layers.kv_forms import HeadVectors, KVForm, LatentForm
from jaxserve.layers.rope import RopeConfig
from jaxserve.layers.sharding import EXPERTS, held_heads
from jaxserve.layers.state_forms import StateForm
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions, HeadMatrices

QkNorm = Literal["shared", "by_head", "whole"]
EXTERNAL = -1  # `kv_source` of cross attention


class MlaSizes(NamedTuple):
    """MLA sizes that `AttentionSpec.kv` lacks.

    Attributes:
        nope_dim: elements per query head and key that are not rotated.
        value_dim: elements per value.
        q_rank: rank of the query projection; None if it is a single matrix.
        interleaved: True if elements 2i and 2i + 1 are rotated together; False for i and i + rope_dim / 2.
        index_interleaved: the same for an indexer's queries and keys.
    """

    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    interleaved: bool = True
    index_interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention.

    Attributes:
        num_heads: query heads, Q.
        kv: vectors that a token keeps in the KV pool.
        scale: factor on scores; None for head_dim ** -0.5.
        rope: rotation; None for NoPE.
        window: sliding window in tokens; None for full attention.
        soft_cap: bound on scores, soft_cap * tanh(scores / soft_cap); None without a bound.
        qkv_bias: True if projections to queries, keys and values have biases.
        o_bias: True if the output projection has a bias.
        qk_norm: query and key norm, by head with "shared" weights or different ones ("by_head"), or over all heads
            together ("whole"); None without.
        has_gate: True if each query head has a gate, projected alongside it.
        k_eq_v: True if one projection makes keys and values.
        mla: MLA sizes; None without MLA.
        kv_source: earlier layer whose keys and values this layer reads; EXTERNAL for cross attention, which neither
            reads nor writes the pool; None for its own.
        sees_images: True if each token of an image sees the whole image, also its later tokens.
        shares_choice: True if queries attend to the tokens that they chose in the latest layer with an indexer (DSA);
            False if the layer has an indexer, or no layer has.
    """

    num_heads: int
    kv: HeadVectors | LatentForm[Any]
    scale: float | None = None
    rope: RopeConfig | None = None
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    has_gate: bool = False
    k_eq_v: bool = False
    mla: MlaSizes | None = None
    kv_source: int | None = None
    sees_images: bool = False
    shares_choice: bool = False

    @property
    def head_dim(self) -> int:
        """Elements per head that RoPE reads."""
        return self.kv.rope_dim if isinstance(self.kv, LatentForm) else self.kv.head_dim

    @property
    def mla_sizes(self) -> tuple[MlaSizes, int, int]:
        """MLA sizes: `mla`, the latent rank, and the rotated elements per head."""
        assert self.mla is not None, "the layer has MLA"
        assert isinstance(self.kv, LatentForm), "MLA keeps latents"
        return self.mla, self.kv.rank, self.kv.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """KV heads; one for MLA, whose latents all heads read."""
        return 1 if isinstance(self.kv, LatentForm) else self.kv.num_kv_heads

    @property
    def options(self) -> AttentionOptions:
        """Scale, window and soft cap as the attention kernels take them."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return AttentionOptions(scale, self.window, self.soft_cap)

    def local(self, num_devices: int) -> "AttentionSpec":
        """Return the heads on a device, if `num_devices` divide them."""
        return dataclasses.replace(self, num_heads=self.num_heads // num_devices, kv=local_kv(self.kv, num_devices))

    def times(self, factor: int) -> "AttentionSpec":
        """Return attention with heads multiplied by `factor`."""
        kv = self.kv
        if isinstance(kv, HeadVectors):
            kv = dataclasses.replace(kv, num_kv_heads=factor * kv.num_kv_heads)
        return dataclasses.replace(self, num_heads=factor * self.num_heads, kv=kv)


def local_kv(kv: HeadVectors | LatentForm[Any], num_devices: int) -> HeadVectors | LatentForm[Any]:
    """Return the vectors on a device, if `num_devices` divide the heads; fewer KV heads than devices are copied."""
    if isinstance(kv, LatentForm):
        return kv
    return HeadVectors(len(held_heads(kv.num_kv_heads, 0, num_devices)), kv.head_dim)


class MlpSpec(NamedTuple):
    """A layer's MLP.

    Attributes:
        ffn_size: feed-forward size, F.
        bias: True if projections have biases.
        activation: "swiglu" or "geglu" with a gate; one of `layers.mlp.ACTIVATIONS` without.
    """

    ffn_size: int
    bias: bool = False
    activation: str = "swiglu"


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer; see the module.

    Attributes:
        mixer: attention, or a recurrent layer's state.
        mlp: MLP; None in a layer without.
        experts: experts; None in a layer without.
    """

    mixer: AttentionSpec | StateForm
    mlp: MlpSpec | None = None
    experts: Experts | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, if the layer is not recurrent."""
        assert isinstance(self.mixer, AttentionSpec), "the layer is not recurrent"
        return self.mixer

    @property
    def state(self) -> StateForm | None:
        """The mixer, if the layer is recurrent."""
        return None if isinstance(self.mixer, AttentionSpec) else self.mixer

    @property
    def keeps_tokens(self) -> bool:
        """True if the layer reads keys and values in the pool, which it or an earlier layer has written."""
        return isinstance(self.mixer, AttentionSpec) and self.mixer.kv_source != EXTERNAL

    def attending(self, **fields: Any) -> "LayerSpec":
        """Return the layer with other attention fields; a recurrent layer unchanged."""
        if not isinstance(self.mixer, AttentionSpec):
            return self
        return dataclasses.replace(self, mixer=dataclasses.replace(self.mixer, **fields))

    def local(self, num_devices: int, num_data_shards: int) -> "LayerSpec":
        """Return the layer on a device; the devices in a data shard divide the heads."""
        num_heads_over = num_devices // num_data_shards
        return dataclasses.replace(
            self,
            mixer=self.mixer.local(num_heads_over),
            mlp=self.mlp and self.mlp._replace(ffn_size=self.mlp.ffn_size // num_heads_over),
            experts=self.experts and self.experts.local(num_devices, EXPERTS, num_data_shards),
        )


class LayerOptions(NamedTuple):
    """A layer's static parameters.

    Attributes:
        spec: the layer.
        kv_group: KV group.
        kv: token layout in the pool.
        kv_source: layer whose keys and values it and later layers read; None if no other layer reads its own.
    """

    spec: LayerSpec
    kv_group: int
    kv: KVForm[Any]
    kv_source: int | None = None

    def share(
        self, k: Array | None, v: Array | HeadMatrices | None, shared: Mapping[int, tuple[Array, Array]]
    ) -> tuple[Array, Array | HeadMatrices, Mapping[int, tuple[Array, Array]]]:
        """Return this layer's keys and values for the step's tokens, and the ones that later layers may read.

        Args:
            k: keys that the layer makes; None if it reads another's.
            v: values, or the matrices that expand latents to keys and values; None if it reads another's.
            shared: keys and values of earlier layers, by layer.
        """
        if k is None:
            assert self.kv_source is not None, "a layer has keys, its own or another's"
            return *shared[self.kv_source], shared
        assert v is not None, "keys have values"
        if self.kv_source is None:
            return k, v, shared
        assert isinstance(v, Array), "layers share no latents"
        return k, v, {**shared, self.kv_source: (k, v)}
