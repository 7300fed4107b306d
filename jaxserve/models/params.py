"""ParamSpec: one row per tensor. It drives shapes, sharding, random init, Hugging Face names, storage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]  # {"embed", "layers": [{...}] | {... stacked}, "final_norm", "lm_head"}


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a model.

    Attributes:
        path: keys into the parameter tree, e.g. ("layers", 3, "qkv_proj").
        shape: as stored here; matrices are [out, in].
        axes: logical axis of each dimension; sharding.py maps them to the mesh.
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


def build_tree(specs: Sequence[ParamSpec], leaf: Callable[[ParamSpec], Any]) -> Params:
    """The nested parameter tree whose leaves are `leaf(spec)`."""
    tree: Params = {}
    for spec in specs:
        node: Any = tree
        for key, below in zip(spec.path, spec.path[1:], strict=False):
            node = _child(node, key, [] if isinstance(below, int) else {})
        _child(node, spec.path[-1], leaf(spec))
    return tree


def _child(node: Any, key: str | int, new: Any) -> Any:
    if isinstance(key, int):
        if key == len(node):
            node.append(new)
        return node[key]
    return node.setdefault(key, new)


def abstract_params(specs: Sequence[ParamSpec], dtype: jax.typing.DTypeLike) -> Params:
    """Shapes only, for planning and for compiling without weights."""
    return build_tree(specs, lambda s: jax.ShapeDtypeStruct(s.shape, dtype))


def stack_layers(params: Params) -> Params:
    """The list of layers as one tree of stacked arrays [L, ...], the form that is scanned (TPU)."""
    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    return {**params, "layers": layers}
