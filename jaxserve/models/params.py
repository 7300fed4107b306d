"""ParamSpec: one row per tensor. It drives shapes, sharding, random init, Hugging Face names, storage."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.packed_linear import pack
from weights.rows import Params, build_tree, leaf_at

__all__ = ["ParamSpec", "Params", "build_tree", "pack_matrices", "stack_layers"]

# A parameter tree is {"embed", "layers": [{...}] or {...} when stacked, "final_norm", "lm_head" unless tied}.


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a model.

    Attributes:
        path: keys into the parameter tree, e.g. ("layers", 3, "qkv_proj").
        shape: as stored here; matrices are [out, in].
        axes: logical axis of each dimension, by which it is sharded.
        hf_names: tensors of a Hugging Face checkpoint, concatenated along axis 0.
        hf_rows: length of axis 0 of each of them.
        init: "normal", "ones" or "zeros", for random weights.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_names: tuple[str, ...]
    hf_rows: tuple[int, ...]
    init: str = "normal"


def pack_matrices(params: Params, specs: Sequence[ParamSpec]) -> Params:
    """Packs every matrix that is multiplied by for the native CPU kernels, in place, one after the other."""
    for spec in specs:
        only_gathered = spec.path == ("embed",) and "lm_head" in params
        if len(spec.shape) == 2 and not only_gathered:
            parent = leaf_at(params, spec.path[:-1])
            parent[spec.path[-1]] = pack(parent[spec.path[-1]])
    return params


def stack_layers(params: Params) -> Params:
    """The list of layers as one tree of stacked arrays [L, ...], the form that is scanned (TPU).

    Takes the tensors out of `params["layers"]` as it goes, so that only one of them at a time is held twice.
    """
    layers = params["layers"]
    stacked = {name: jnp.stack([layer.pop(name) for layer in layers]) for name in list(layers[0])}
    return {**params, "layers": stacked}
