"""ParamSpec: one row per tensor. It drives shapes, sharding, random init, Hugging Face names, storage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.quant import QuantizedMatrix, quantize
from pallas_kernels.packed_linear import PackedMatrix, pack
from weights.rows import Params, build_tree, leaf_at

__all__ = [
    "TRANSFORMS",
    "ParamSpec",
    "Params",
    "build_tree",
    "pack_matrices",
    "quantize_matrix",
    "stack_layers",
    "step_bytes",
]

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

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it: all that may be quantised."""
        return len(self.shape) > 1


def quantize_matrix(spec: ParamSpec, array: Array) -> Array | QuantizedMatrix:
    """The tensor of `spec` in int8 if it is a matrix; norms and biases stay as they are. A transform of `load`."""
    return quantize(array) if spec.is_matrix else array


# EngineConfig.quantization -> what `weights.load` does with each tensor
TRANSFORMS: dict[str | None, Callable[[ParamSpec, Array], Array | QuantizedMatrix] | None] = {
    None: None,
    "int8": quantize_matrix,
}


def pack_matrices(params: Params, specs: Sequence[ParamSpec]) -> Params:
    """Packs every matrix that is multiplied by for the native CPU kernels, in place, one after the other."""
    for spec in specs:
        only_gathered = spec.path == ("embed",) and "lm_head" in params
        if spec.is_matrix and not only_gathered:
            parent = leaf_at(params, spec.path[:-1])
            parent[spec.path[-1]] = _pack(parent[spec.path[-1]])
    return params


def _pack(matrix: Array | QuantizedMatrix) -> PackedMatrix:
    return pack(matrix.q, matrix.scale) if isinstance(matrix, QuantizedMatrix) else pack(matrix)


def stack_layers(params: Params) -> Params:
    """The list of layers as one tree of stacked arrays [L, ...], the form that is scanned (TPU).

    Takes the tensors out of `params["layers"]` as it goes, so that only one of them at a time is held twice.
    """
    layers = params["layers"]
    stacked = {name: _stack(*[layer.pop(name) for layer in layers]) for name in list(layers[0])}
    return {**params, "layers": stacked}


def step_bytes(params: Params) -> int:
    """Bytes of weights that a step reads: all, but for an embedding table that is not also the head."""
    read = {name: tensors for name, tensors in params.items() if name != "embed" or "lm_head" not in params}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _stack(*tensors: Array | QuantizedMatrix) -> Array | QuantizedMatrix:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tensors)
