"""Large models of which a test needs few layers."""

import dataclasses

from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_spec import LayerSpec


def first_layers(arch: ArchConfig, count: int | None) -> ArchConfig:
    """Return a model of the first layers of another, or all of it.

    Programs for GPUs have every layer one after the other, so that all of a large model take minutes to compile.
    """
    return dataclasses.replace(arch, layers=arch.layers[:count])


def layers_of_each_kind(arch: ArchConfig) -> ArchConfig:
    """Return a model of the first layer of each kind of another, or of its first two if they are all alike."""
    first: dict[object, int] = {}
    for index, layer in enumerate(arch.layers):
        first.setdefault(layer, index)
    indices = list(first.values()) if len(first) > 1 else [0, 1]
    sources = {index: position for position, index in enumerate(indices)}

    def kept(index: int) -> LayerSpec:
        layer = arch.layers[index]
        if layer.state or layer.attention.kv_source is None:
            return layer
        return layer.attending(kv_source=sources[arch.layers.index(arch.layers[layer.attention.kv_source])])

    return dataclasses.replace(arch, layers=tuple(map(kept, indices)))
