"""ParamSpec: one row per tensor. It drives shapes, sharding, random init, Hugging Face names, storage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.quant import QuantizedMatrix, quantize
from pallas_kernels.packed_linear import PackedMatrix, pack
from weights.rows import Params, build_tree

__all__ = ["ParamSpec", "Params", "build_tree", "matrix_transform", "stack_layers", "step_bytes"]

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


def matrix_transform(
    specs: Sequence[ParamSpec], *, quantization: str | None = None, packed: bool = False
) -> Callable[[ParamSpec, Array], Array | QuantizedMatrix | PackedMatrix]:
    """What `weights.load` makes of each tensor as it comes. Norms and biases stay as they are.

    Args:
        specs: of all tensors; an embedding table that is not also the head is never multiplied, nor packed.
        quantization: of EngineConfig.
        packed: for the native CPU kernels.
    """
    tied = all(spec.path != ("lm_head",) for spec in specs)

    def transform(spec: ParamSpec, array: Array) -> Array | QuantizedMatrix | PackedMatrix:
        if not spec.is_matrix:
            return array
        matrix = quantize(array) if quantization == "int8" else array
        return _pack(matrix) if packed and (tied or spec.path != ("embed",)) else matrix

    return transform


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
