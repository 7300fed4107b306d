"""Large models of which a test needs few layers."""

import dataclasses

from jaxserve.models.arch import ArchConfig


def first_layers(arch: ArchConfig, count: int | None) -> ArchConfig:
    """Return a model of the first layers of another, or all of it.

    Programs for GPUs have every layer one after the other, so that all of a large model take minutes to compile.
    """
    if count is None:
        return arch
    return dataclasses.replace(arch, num_layers=count, ropes=arch.ropes[:count], windows=arch.windows[:count])


def layers_of_each_kind(arch: ArchConfig) -> ArchConfig:
    """Return a model of the first layer of each kind of another, or of its first two if they are all alike."""
    own = arch.global_attention
    shared = frozenset(filter(arch.reads_other_layer, range(arch.num_layers)))
    sets = [arch.state_layers, arch.dense_layers, own.layers if own else frozenset(), shared]
    first: dict[object, int] = {}
    for layer in range(arch.num_layers):
        first.setdefault((arch.ropes[layer], arch.windows[layer], *(layer in some for some in sets)), layer)
    layers = list(first.values()) if len(first) > 1 else [0, 1]
    states, dense, wide, shared = (frozenset(i for i, layer in enumerate(layers) if layer in some) for some in sets)
    return dataclasses.replace(
        arch,
        num_layers=len(layers),
        ropes=tuple(arch.ropes[layer] for layer in layers),
        windows=tuple(arch.windows[layer] for layer in layers),
        state_layers=states,
        dense_layers=dense,
        global_attention=own and own._replace(layers=wide),
        num_shared_layers=len(shared),
    )
