"""Static parameters that an ArchConfig gives to the attention of each layer."""

from collections.abc import Mapping
from typing import NamedTuple

from jax import Array

from jaxserve.layers.kv_forms import KVForm
from jaxserve.layers.state_forms import StateForm
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionOptions, HeadMatrices


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
