"""ParamSpec: one row per tensor. It drives shapes, sharding, random init, Hugging Face names, storage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.quant import QuantizedMatrix, block_size, quantize
from pallas_kernels.packed_linear import PANEL_ROWS, PackedMatrix, Packer
from weights import StoredTensor, host_buffer
from weights.rows import Params, build_tree

__all__ = ["ParamSpec", "Params", "build_tree", "matrix_transform", "stack_layers", "step_bytes"]

_SLAB_SIZE = 64 << 10  # numbers of a matrix on their way to their final form, in each thread: they stay in its cache

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
        gated: whether SwiGLU follows the product: the first half of the rows is the gate, the second what it gates.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_names: tuple[str, ...]
    hf_rows: tuple[int, ...]
    init: str = "normal"
    gated: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it: all that may be quantised."""
        return len(self.shape) > 1


def matrix_transform(
    specs: Sequence[ParamSpec], *, quantization: str | None = None, packed: bool = False
) -> Callable[[ParamSpec, StoredTensor], Array | QuantizedMatrix | PackedMatrix]:
    """What `weights.load` makes of each tensor as it comes. Norms and biases stay as they are.

    What is quantised or packed goes there slab by slab: the host never holds it in another form as well.

    Args:
        specs: of all tensors; an embedding table that is not also the head is never multiplied, nor packed.
        quantization: of EngineConfig.
        packed: for the native CPU kernels.
    """
    tied = all(spec.path != ("lm_head",) for spec in specs)

    def transform(spec: ParamSpec, tensor: StoredTensor) -> Array | QuantizedMatrix | PackedMatrix:
        quantized = spec.is_matrix and quantization == "int8"
        if spec.is_matrix and packed and (tied or spec.path != ("embed",)):
            return _pack(tensor, quantized=quantized, gated=spec.gated)
        return _quantize(tensor) if quantized else tensor.place()

    return transform


def _pack(tensor: StoredTensor, *, quantized: bool, gated: bool) -> PackedMatrix:
    N, K = tensor.shape
    dtype, num_blocks = (np.dtype(np.int8), K // block_size(K)) if quantized else (tensor.dtype, 0)
    packer = Packer(N, K, dtype, num_blocks, gated=gated)

    def add(start: int, rows: NDArray[Any]) -> None:
        packer.write(start, *(quantize(rows) if quantized else (rows,)))

    tensor.each_slab(_slab_rows(K), add)
    return packer.matrix()


def _quantize(tensor: StoredTensor) -> QuantizedMatrix:
    N, K = tensor.shape
    q, scale = host_buffer((N, K), np.dtype(np.int8)), host_buffer((N, K // block_size(K)), np.dtype(np.float32))

    def add(start: int, rows: NDArray[Any]) -> None:
        end = start + len(rows)
        q[start:end], scale[start:end] = quantize(rows)

    tensor.each_slab(_slab_rows(K), add)
    return QuantizedMatrix(jax.device_put(q), jax.device_put(scale))


def _slab_rows(in_size: int) -> int:
    """Whole panels."""
    return PANEL_ROWS * max(1, _SLAB_SIZE // (PANEL_ROWS * in_size))


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
