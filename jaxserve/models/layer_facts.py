"""Facts of layers that an ArchConfig is made of, and those that it gives to the attention of each layer."""

from collections.abc import Mapping
from typing import NamedTuple

from jax import Array

from jaxserve.layers.kv_forms import HeadVectors, KVForm, Latents
from jaxserve.layers.sharding import held_heads
from jaxserve.layers.state_forms import StateForm
from jaxserve.pallas_kernels.mla_attention import HeadMatrices
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions


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

    def form(self, rope_dim: int) -> Latents:
        """Return the form of tokens in the pool, of whose latents so many elements are rotated."""
        return Latents(self.rank, rope_dim)


def local_heads(heads: HeadVectors, num_devices: int) -> HeadVectors:
    """Return the KV heads of one of `num_devices` that share all of them."""
    return HeadVectors(len(held_heads(heads.num_kv_heads, 0, num_devices)), heads.head_dim)


class GlobalAttention(NamedTuple):
    """Attention of layers whose KV heads have sizes of their own.

    Attributes:
        layers: these layers.
        heads: their KV heads.
        k_eq_v: True if keys and values come from one product.
    """

    layers: frozenset[int]
    heads: HeadVectors
    k_eq_v: bool = False

    def local(self, num_devices: int) -> "GlobalAttention":
        """Return the sizes on one of `num_devices`."""
        return self._replace(heads=local_heads(self.heads, num_devices))

    def times(self, factor: int) -> "GlobalAttention":
        """Return the attention of `factor` times as many heads."""
        return self._replace(heads=HeadVectors(factor * self.heads.num_kv_heads, self.heads.head_dim))


class LayerInputs(NamedTuple):
    """Inputs that each layer has from a table of token embeddings of its own.

    Attributes:
        vocab_size: rows of the table.
        size: elements of a token's input to a layer.
    """

    vocab_size: int
    size: int


class LayerOptions(NamedTuple):
    """Static facts of a layer that its attention needs.

    Attributes:
        attention: options of its attention.
        kv_group: KV group of its keys and values.
        kv: form of its tokens in the pool.
        state: form of its state, in a layer that has one and no attention; else None.
        kv_source: layer whose keys and values it and later layers read; None if it alone reads its own.
    """

    attention: AttentionOptions
    kv_group: int
    kv: KVForm
    state: StateForm | None = None
    kv_source: int | None = None

    def share(
        self, k: Array | None, v: Array | HeadMatrices | None, shared: Mapping[int, tuple[Array, Array]]
    ) -> tuple[Array, Array | HeadMatrices, Mapping[int, tuple[Array, Array]]]:
        """Return the keys and values of a step's tokens in this layer, and those that later layers share.

        Args:
            k: keys that the layer makes; None if it reads another's.
            v: its values, or the matrices that make them of latents; None if it reads another's.
            shared: keys and values of earlier layers, by layer.
        """
        if k is None:
            assert self.kv_source is not None, "a layer has keys, its own or those of another"
            return *shared[self.kv_source], shared
        assert v is not None, "keys have values"
        if self.kv_source is None:
            return k, v, shared
        assert isinstance(v, Array), "layers share no latents"
        return k, v, {**shared, self.kv_source: (k, v)}
