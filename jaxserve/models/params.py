"""ParamSpec: one spec per tensor, which determines shape, sharding, random init, Hugging Face names and storage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from numpy.typing import NDArray

from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS, PackedMatrix, Packer
from jaxserve.quant import QuantizedMatrix, block_size, quantize
from jaxserve.sharding import held_heads, named_sharding, split_dimension
from jaxserve.weights import StoredTensor, host_buffer
from jaxserve.weights.rows import Params, build_tree, leaf_at
from jaxserve.weights.stored_tensor import Part, host_rows

__all__ = [
    "ParamSpec",
    "Params",
    "ScannedLayers",
    "build_tree",
    "matrix_transform",
    "split_array",
    "stack_layers",
    "step_bytes",
    "unsplit",
]

_SLAB_SIZE = 64 << 10  # elements that each thread converts at once: they fit in its cache

# A parameter tree is {"embed", "layers": [{...}] or ScannedLayers, "final_norm", "lm_head" unless tied}.


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a model.

    Attributes:
        path: keys into the parameter tree, e.g. ("layers", 3, "qkv_proj").
        shape: shape of the tensor in the engine; matrices are [out, in].
        axes: logical axis of each dimension, which determines its sharding.
        hf_names: tensors of a Hugging Face checkpoint, concatenated along axis 0.
        hf_rows: length of axis 0 of each of `hf_names`.
        init: "normal", "ones" or "zeros", for random weights.
        gated: True if SwiGLU follows the product: the first half of the rows is the gate, the second the up projection.
        heads: number of heads of each of `hf_names` whose rows belong to heads, which are not split within a head.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_names: tuple[str, ...]
    hf_rows: tuple[int, ...]
    init: str = "normal"
    gated: bool = False
    heads: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """True if the tensor is a matrix; only matrices are quantised."""
        return len(self.shape) > 1

    @property
    def split_dimension(self) -> int | None:
        """Dimension that is split over devices; None if each device has the whole tensor."""
        return split_dimension(self.axes)


def matrix_transform(
    specs: Sequence[ParamSpec], *, quantization: str | None = None, packed: bool = False
) -> Callable[[ParamSpec, StoredTensor], Array | QuantizedMatrix | PackedMatrix]:
    """Return the function by which `weights.load` quantises or packs each matrix; norms and biases are unchanged.

    Matrices are quantised or packed slab by slab: the host never holds a whole matrix in both forms.

    If a tensor has a NamedSharding, each device converts its own part. The result then has global arrays but the static
    fields of one part, and is for use in a shard_map.

    Args:
        specs: specs of all tensors; an embedding table that is not also the head is not packed.
        quantization: `EngineConfig.quantization`.
        packed: True to pack for the native CPU kernels.
    """
    tied = all(spec.path != ("lm_head",) for spec in specs)

    def place(spec: ParamSpec, tensor: StoredTensor) -> Array | QuantizedMatrix | PackedMatrix:
        block = scale_block(spec, tensor.shape[1]) if spec.is_matrix and quantization == "int8" else None
        if spec.is_matrix and packed and (tied or spec.path != ("embed",)):
            return _pack(tensor, block=block, gated=spec.gated)
        return _quantize(tensor, block) if block else tensor.place()

    def transform(spec: ParamSpec, tensor: StoredTensor) -> Array | QuantizedMatrix | PackedMatrix:
        sharding = tensor.sharding
        if not isinstance(sharding, NamedSharding) or spec.split_dimension is None:
            return place(spec, tensor)
        return _join([place(spec, shard) for shard in _shards(spec, tensor, sharding)], spec, sharding)

    return transform


def split_array(spec: ParamSpec, array: Array, mesh: Mesh) -> Array:
    """Lay out a whole tensor, for example of random weights, over devices in the layout of `matrix_transform`."""
    if spec.split_dimension == 0:
        array = array.at[_rows_held(spec, mesh.size)].get(mode="fill", fill_value=0)
    return jax.device_put(array, named_sharding(mesh, spec.axes))


def unsplit(specs: Sequence[ParamSpec], params: Params) -> Params:
    """Convert a tree in the layout of `matrix_transform` to one that `weights.save` accepts.

    Each tensor is assembled in host memory only when it is written. Quantised and packed matrices are not converted;
    `weights.save` rejects them.
    """

    def leaf(spec: ParamSpec) -> Any:
        array = leaf_at(params, spec.path)
        is_laid_out = isinstance(array, Array) and isinstance(array.sharding, NamedSharding)
        return _Unsplit(spec, array) if is_laid_out and spec.split_dimension == 0 else array

    return build_tree(specs, leaf)


@dataclass(frozen=True)
class _Unsplit:
    """Tensor whose rows are read from the devices that hold them."""

    spec: ParamSpec
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def is_fully_addressable(self) -> bool:
        return self.array.is_fully_addressable

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        _, firsts = np.unique(_rows_held(self.spec, self.array.sharding.num_devices), return_index=True)
        wanted = firsts[: len(self)][rows]  # positions of the rows in the array
        out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        for shard in self.array.addressable_shards:
            low, high, _ = shard.index[0].indices(len(self.array))
            here = (low <= wanted) & (wanted < high)
            if here.any():
                own = wanted[here] - low
                first = own.min()
                out[here] = host_rows(shard.data, slice(first, own.max() + 1))[own - first]
        return out

    def __len__(self) -> int:
        return self.shape[0]


def _rows_held(spec: ParamSpec, num_devices: int) -> NDArray[np.int64]:
    """Return the rows of a tensor that each device holds, device by device; the index `num_rows` is a row of zeros."""
    num_rows = spec.shape[0]
    parts = np.split(np.arange(num_rows), np.cumsum(spec.hf_rows)[:-1])
    shares = [np.concatenate(_share(spec, parts, index, num_devices)) for index in range(num_devices)]
    return np.concatenate([np.pad(s, (0, len(shares[0]) - len(s)), constant_values=num_rows) for s in shares])


def scale_block(spec: ParamSpec, num_columns: int) -> int:
    """Return the block size for `num_columns` columns on a device: the whole matrix's if no block is cut in two."""
    block = block_size(spec.shape[1])
    return block_size(num_columns) if num_columns % block else block


def _shards(spec: ParamSpec, tensor: StoredTensor, sharding: NamedSharding) -> Iterator[StoredTensor]:
    """Yield the part of a tensor that each device of this process reads; the last parts are padded with zeros."""
    devices = list(sharding.mesh.devices.flat)
    shares = [_share(spec, tensor.parts, index, len(devices)) for index in range(len(devices))]
    num_rows = sum(map(len, shares[0]))
    for device, parts in zip(devices, shares, strict=True):
        if device.process_index != jax.process_index():  # read by its own process
            continue
        yield tensor.with_parts(parts, SingleDeviceSharding(device), num_rows - sum(map(len, parts)))


def _share(spec: ParamSpec, parts: Sequence[Part], index: int, num_devices: int) -> list[Part]:
    """Return device `index`'s slices of the parts of a tensor."""
    if spec.split_dimension == 1:
        return [part[:, _slice(part.shape[1] // num_devices, index)] for part in parts]
    if not spec.heads:
        return [part[_slice(-(-len(part) // num_devices), index)] for part in parts]
    return [
        part[_slice(len(part) // num_heads, head)]
        for part, num_heads in zip(parts, spec.heads, strict=True)
        for head in held_heads(num_heads, index, num_devices)
    ]


def _slice(size: int, index: int) -> slice:
    return slice(index * size, (index + 1) * size)


def _join(shards: Sequence[Any], spec: ParamSpec, sharding: NamedSharding) -> Any:
    """Join trees of local arrays, one per device, to a tree of global arrays; static fields are one device's."""

    def join(*leaves: Array) -> Array:
        sizes = enumerate(leaves[0].shape)
        shape = tuple(size * sharding.mesh.size if dim == spec.split_dimension else size for dim, size in sizes)
        return jax.make_array_from_single_device_arrays(shape, sharding, leaves)

    return jax.tree.map(join, *shards)


def _pack(tensor: StoredTensor, *, block: int | None, gated: bool) -> PackedMatrix:
    """Pack a matrix, quantised in blocks of `block` columns unless that is None."""
    N, K = tensor.shape
    dtype, num_blocks = (np.dtype(np.int8), K // block) if block else (tensor.dtype, 0)
    packer = Packer(N, K, dtype, num_blocks, gated=gated)

    def add(start: int, rows: NDArray[Any]) -> None:
        packer.write(start, *(quantize(rows, block) if block else (rows,)))

    tensor.each_slab(_slab_rows(K), add)
    return packer.matrix(tensor.sharding)


def _quantize(tensor: StoredTensor, block: int) -> QuantizedMatrix:
    N, K = tensor.shape
    q, scale = host_buffer((N, K), np.dtype(np.int8)), host_buffer((N, K // block), np.dtype(np.float32))

    def add(start: int, rows: NDArray[Any]) -> None:
        end = start + len(rows)
        q[start:end], scale[start:end] = quantize(rows, block)

    tensor.each_slab(_slab_rows(K), add)
    return QuantizedMatrix(*(jax.device_put(array, tensor.sharding) for array in (q, scale)))


def _slab_rows(in_size: int) -> int:
    """Return the rows of a slab, a multiple of the panel size."""
    return PANEL_ROWS * max(1, _SLAB_SIZE // (PANEL_ROWS * in_size))


class ScannedLayers(NamedTuple):
    """Layers in the form that is scanned (TPU).

    Attributes:
        periodic: for each place in the period of the layers' kinds, one tree of stacked arrays [periods, ...].
        rest: layers behind the last whole period.
    """

    periodic: tuple[Params, ...]
    rest: list[Params]


def stack_layers(params: Params, period: int, stack: Callable[..., Any] = lambda *arrays: jnp.stack(arrays)) -> Params:
    """Return a tree whose list of layers is stacked for a scan.

    Takes the tensors out of `params["layers"]` as it goes, so that only one of them at a time is held twice.

    Args:
        params: tree with a list of layers.
        period: number of layers after which their kinds repeat.
        stack: function of the arrays of alike layers, in their order.
    """
    layers = params["layers"]
    num_scanned = len(layers) // period * period

    def stack_alike(alike: list[Params]) -> Params:
        return {name: jax.tree.map(stack, *[layer.pop(name) for layer in alike]) for name in list(alike[0])}

    periodic = tuple(stack_alike(layers[place:num_scanned:period]) for place in range(period))
    return {**params, "layers": ScannedLayers(periodic, layers[num_scanned:])}


def step_bytes(params: Params) -> int:
    """Return the bytes of weights that a step reads on a device: all but an embedding table that is not the head."""
    read = {name: tensors for name, tensors in params.items() if name != "embed" or "lm_head" not in params}
    return device_bytes(read)


def device_bytes(tree: Any) -> int:
    """Return the bytes of a tree of arrays on one device."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
