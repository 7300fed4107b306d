"""ParamSpec: a tensor's shape, sharding, random init, Hugging Face names and storage."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from numpy.typing import NDArray

from jaxserve.layers.experts import Experts
from jaxserve.layers.sharding import (
    EXPERTS,
    held_heads,
    named_sharding,
    num_parts,
    part_of,
    split_axes,
    split_dimension,
    whole_shape,
)
from jaxserve.layers.weight_formats import packed, plain
from jaxserve.layers.weight_formats.weight_format import FormatChoice
from jaxserve.weights import StoredTensor, rows
from jaxserve.weights.rows import build_tree, leaf_at
from jaxserve.weights.stored_tensor import Part, host_rows

Params = rows.Params
# A parameter tree is {"embed", "layers": [{...}] or ScannedLayers, "final_norm", "lm_head" unless tied}. Some models
# add "lm_head_bias", POSITION_EMBED with learned positions, or LAYER_EMBED and LAYER_PROJECTION with the table and the
# matrix that make per-layer inputs. A norm is an array, or a tree of weight and bias.
POSITION_EMBED, LAYER_EMBED, LAYER_PROJECTION = "position_embed", "layer_embed", "layer_projection"
VISION = "vision"  # key of the vision tower's parameters, in models that take images
EXPERT_MATRICES = ("experts_gate_up", "experts_down")  # all experts' matrices, concatenated along axis 0


@dataclass(frozen=True)
class ParamSpec:
    """One model tensor.

    Attributes:
        path: keys into the parameter tree, e.g. ("layers", 3, "qkv_proj").
        shape: shape in the engine; matrices are [out, in].
        axes: each dimension's logical axis, which determines its sharding.
        hf_names: Hugging Face checkpoint tensors, concatenated along axis 0; a fused tensor is named once per part.
        hf_rows: number of rows for each entry of `hf_names`.
        init: "normal", "ones" or "zeros", for random weights.
        gated: True if SwiGLU follows the matmul: the first half of the rows is the gate, the second the up projection.
        heads: number of heads in each tensor in `hf_names`; heads are never split. Empty if rows have no heads.
        transposed: True if checkpoints have the matrix as [in, out].
        stacked: True if a tensor in `hf_names` holds several matrices; it is named once per matrix, or per part.
        experts: experts whose matrices are concatenated in this one; None for a single matrix.
        exact: True if a matrix is never quantised, or a vector is float32 whatever the model's dtype.
        is_array: True if the block computes with the array itself; it is then not packed for native kernels.
        unread: other tensors that a checkpoint may have and that this model ignores.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_names: tuple[str, ...]
    hf_rows: tuple[int, ...]
    init: str = "normal"
    gated: bool = False
    heads: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False
    experts: Experts | None = None
    exact: bool = False
    is_array: bool = False
    unread: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """True if the tensor is a matrix; only matrices are quantised.

        Position tables, kernels of convolutions, and norms with different weights per head count as vectors.
        """
        return 1 < len(self.shape) < 4 and self.init == "normal" and self.path[-1] != POSITION_EMBED

    @property
    def num_matrices(self) -> int:
        """Number of matrices with equal shapes that are concatenated along axis 0."""
        return 1 if self.experts is None else self.experts.num_held

    @property
    def token_rows(self) -> int:
        """Maximum number of matrix rows (outputs) that one token is multiplied by on a device.

        With experts, these are the rows of all experts that the token chooses: one device may have all of them.
        """
        num_chosen = 1 if self.experts is None else self.experts.per_token
        return self.shape[0] // self.num_matrices * num_chosen

    @property
    def mean_token_rows(self) -> int:
        """Number of matrix rows that one token is multiplied by on one expert shard, averaged over the shards."""
        return self.token_rows if self.experts is None else self.token_rows // self.experts.num_shards

    def dtype(self, dtype: np.dtype, matrix_dtype: jax.typing.DTypeLike | None) -> np.dtype:
        """Return the tensor's dtype unless it is quantised: `dtype`, or `matrix_dtype` for matrices if given."""
        if not self.is_matrix:
            return jnp.dtype(jnp.float32) if self.exact else dtype
        return dtype if matrix_dtype is None or self.is_array else jnp.dtype(matrix_dtype)

    @property
    def split_dimension(self) -> int | None:
        """Dimension that tensor parallelism splits; None if each device has the whole tensor."""
        return split_dimension(self.axes)

    def on_device(self, num_devices: int) -> "ParamSpec":
        """Return the spec with one device's experts; the shape remains the whole tensor's."""
        return dataclasses.replace(self, experts=self.experts and self.experts.local(num_devices, EXPERTS))


def without_tower(params: Params) -> Params:
    """Return parameters without those of the vision tower, which steps do not read."""
    return {name: each for name, each in params.items() if name != VISION}


def matrix_transform(
    specs: Sequence[ParamSpec],
    form: FormatChoice = plain.FORMAT,
    *,
    native: bool = False,
    matrix_dtype: jax.typing.DTypeLike | None = None,
) -> Callable[[ParamSpec, StoredTensor], Any]:
    """Return the function with which `weights.load` converts tensors to a weight format.

    If a tensor has a NamedSharding, each device converts its own shard. The result then has global arrays but one
    shard's static fields, and is meant for shard_map.

    Args:
        specs: all specs; an embedding table that is not also the LM head is not packed.
        form: weight format, or a choice of formats; norms and biases, among others, are plain.
        native: True to pack matrices for the native CPU kernels.
        matrix_dtype: dtype for matrices that stay floats; None for the same dtype as other tensors.
    """
    is_multiplied = multiplied(specs)

    def transform(spec: ParamSpec, tensor: StoredTensor) -> Any:
        """Return the parameter for one tensor: its shards converted to its weight format and joined."""
        own = form.at(spec) or plain.FORMAT
        if own is plain.FORMAT:
            tensor = dataclasses.replace(tensor, dtype=spec.dtype(tensor.dtype, matrix_dtype))
        is_packed = native and is_multiplied(spec) and own.native_dtype(tensor.dtype) is not None
        convert = partial(packed.pack, own) if is_packed else own.convert
        sharding = tensor.sharding
        if not isinstance(sharding, NamedSharding) or spec.split_dimension is None:
            return convert(spec, tensor)
        shards = list(_shards(spec, tensor, sharding))
        spec = spec.on_device(sharding.mesh.size)
        described = own, spec, shards[0].shape, tensor.dtype
        axes = packed.leaf_axes(*described) if is_packed else [leaf.axes for leaf in own.leaves(*described[1:])]
        return _join([convert(spec, shard) for shard in shards], axes, sharding.mesh)

    return transform


def multiplied(specs: Sequence[ParamSpec]) -> Callable[[ParamSpec], bool]:
    """Return a test for the specs: True for matrices that matmuls read, which can be packed for native kernels.

    Embeddings are among them only if they are tied, which means that `specs` have no LM head.
    """
    tied = all(spec.path != ("lm_head",) for spec in specs)
    looked_up = ((LAYER_EMBED,),) if tied else ((LAYER_EMBED,), ("embed",))  # tables that no matmul reads
    return lambda spec: spec.is_matrix and not spec.is_array and spec.path not in looked_up


def split_array(spec: ParamSpec, array: Array, mesh: Mesh) -> Array:
    """Shard a whole tensor, for example random weights, in the same layout as `matrix_transform`."""
    if spec.split_dimension == 0:
        array = _rows_or_zeros(array, jax.device_put(_rows_held(spec, mesh)))
    return jax.device_put(array, named_sharding(mesh, spec.axes))


@jax.jit
def _rows_or_zeros(array: Array, rows: Array) -> Array:
    """Return rows of an array, zeros for out-of-range indices; jitted as one program instead of one per operation."""
    return array.at[rows].get(mode="fill", fill_value=0)


def unsplit(specs: Sequence[ParamSpec], params: Params) -> Params:
    """Convert a tree in `matrix_transform`'s layout to one that `weights.save` accepts.

    Each tensor is assembled in host memory only when it is written. Quantised and packed matrices are not converted;
    `weights.save` rejects them.
    """

    def leaf(spec: ParamSpec) -> Any:
        """Return a tensor's array, or a view that reads whole rows from the devices."""
        array = leaf_at(params, spec.path)
        if isinstance(array, Array) and isinstance(array.sharding, NamedSharding) and spec.split_dimension == 0:
            return _Unsplit(spec, array, array.sharding.mesh)
        return array

    return build_tree(specs, leaf)


@dataclass(frozen=True)
class _Unsplit:
    """Tensor whose rows are read from the devices that hold them."""

    spec: ParamSpec
    array: Array
    mesh: Mesh | AbstractMesh

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def is_fully_addressable(self) -> bool:
        """True if this process has all shards."""
        return self.array.is_fully_addressable

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        _, firsts = np.unique(_rows_held(self.spec, self.mesh), return_index=True)
        wanted = firsts[: len(self)][rows]  # the rows' positions in the array
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


def _rows_held(spec: ParamSpec, mesh: Mesh | AbstractMesh) -> NDArray[np.int64]:
    """Return each shard's row indices, concatenated over shards; index `num_rows` means a zero row, as padding.

    Devices that hold the same shard count once.
    """
    num_rows = spec.shape[0]
    parts = np.split(np.arange(num_rows), np.cumsum(spec.hf_rows)[:-1])
    firsts = range(num_parts(mesh, split_axes(spec.axes)))  # the first devices have all parts, in order
    all_slices = [np.concatenate(device_slices(spec, parts, index, mesh)[0]) for index in firsts]
    return np.concatenate([np.pad(s, (0, len(all_slices[0]) - len(s)), constant_values=num_rows) for s in all_slices])


def _shards(spec: ParamSpec, tensor: StoredTensor, sharding: NamedSharding) -> Iterator[StoredTensor]:
    """Yield a tensor's shard, unread, for each of this process's devices; the last shards are padded with zero rows."""
    devices = list(sharding.mesh.devices.flat)
    all_slices = [device_slices(spec, tensor.parts, index, sharding.mesh) for index in range(len(devices))]
    num_rows = sum(map(len, all_slices[0][0]))
    for device, (parts, row_parts) in zip(devices, all_slices, strict=True):
        if device.process_index != jax.process_index():  # read by its own process
            continue
        yield tensor.with_parts(parts, SingleDeviceSharding(device), num_rows - sum(map(len, parts)), row_parts)


def device_slices(
    spec: ParamSpec, parts: Sequence[Part], index: int, mesh: Mesh | AbstractMesh
) -> tuple[list[Part], Sequence[Part] | None]:
    """Return device `index`'s slices of each part, and the parts with whole rows if it holds only some columns.

    A device only holds its own experts' matrices.
    """
    axes = split_axes(spec.axes) if spec.experts is None else "tensor"
    if spec.experts is not None and spec.is_matrix:  # biases are one array for all experts
        parts = parts[_slice(len(parts) // spec.experts.num_shards, part_of(mesh, index, EXPERTS))]
    shard, count = part_of(mesh, index, axes), num_parts(mesh, axes)
    if spec.split_dimension == 1:
        return [part[:, _slice(part.shape[1] // count, shard)] for part in parts], parts
    if not spec.heads:
        return [part[_slice(-(-len(part) // count), shard)] for part in parts], None
    return [
        part[_slice(len(part) // num_heads, head)]
        for part, num_heads in zip(parts, spec.heads, strict=True)
        for head in held_heads(num_heads, shard, count)
    ], None


def _slice(size: int, index: int) -> slice:
    """Return slice number `index` among slices with `size` elements."""
    return slice(index * size, (index + 1) * size)


def _join(shards: Sequence[Any], axes: Sequence[tuple[str | None, ...]], mesh: Mesh | AbstractMesh) -> Any:
    """Join the devices' trees of local arrays to one tree of global arrays; static fields are one device's.

    Args:
        shards: one tree per device.
        axes: logical axes of each leaf.
        mesh: mesh over the devices.
    """

    def join(parts: Sequence[Array], axes: tuple[str | None, ...]) -> Array:
        """Return the global array for one leaf, from each device's array."""
        shape = whole_shape(mesh, parts[0].shape, axes)
        return jax.make_array_from_single_device_arrays(shape, named_sharding(mesh, axes), parts)

    parts = zip(*map(jax.tree.leaves, shards), strict=True)
    return jax.tree.unflatten(jax.tree.structure(shards[0]), map(join, parts, axes))


class ScannedLayers(NamedTuple):
    """Layers stacked for a scan (TPU).

    Attributes:
        periodic: one tree with stacked arrays [periods, ...] for each layer in the period.
        rest: layers after the last whole period.
        first: layers before the first period.
    """

    periodic: tuple[Params, ...]
    rest: list[Params]
    first: list[Params]


def stack_layers(
    params: Params, period: int, stack: Callable[..., Any] = lambda *arrays: jnp.stack(arrays), *, num_first: int = 0
) -> Params:
    """Stack the list of layers for a scan.

    Removes each tensor from `params["layers"]` when it is stacked, so that only one at a time is held twice.

    Args:
        params: tree with a list of layers.
        period: number of layers after which specs repeat.
        stack: function that stacks equal layers' arrays, in layer order.
        num_first: number of layers before the first period.
    """
    first, layers = params["layers"][:num_first], params["layers"][num_first:]
    num_scanned = len(layers) // period * period

    def stack_alike(alike: list[Params]) -> Params:
        """Stack the arrays of layers with equal specs in one layer's tree, and remove them from these layers."""
        return {name: jax.tree.map(stack, *[layer.pop(name) for layer in alike]) for name in list(alike[0])}

    periodic = tuple(stack_alike(layers[index:num_scanned:period]) for index in range(period))
    return {**params, "layers": ScannedLayers(periodic, layers[num_scanned:], first)}


def lookup_tables(params: Params, *, has_logits: bool = True) -> Params:
    """Return the tables from which a step reads only one row per token; no embedding that gives logits too."""
    names = [POSITION_EMBED, LAYER_EMBED]
    names += [] if has_logits and "lm_head" not in params else ["embed"]
    return {name: params[name] for name in names if name in params}


def lookup_bytes(params: Params, specs: Sequence[ParamSpec], num_bytes: Callable[[Any], int]) -> int:
    """Return the bytes that each token reads from tables.

    Args:
        params: parameters.
        specs: one device's specs.
        num_bytes: function that returns a tensor's bytes on one device.
    """
    tables = [spec for spec in specs if spec.path in (("embed",), (POSITION_EMBED,), (LAYER_EMBED,))]
    return sum(num_bytes(leaf_at(params, spec.path)) // spec.shape[0] for spec in tables)


def step_bytes(params: Params) -> int:
    """Return the weight bytes that a step reads on a device, with all experts and without table rows."""
    tables = lookup_tables(params)
    return device_bytes({name: tensors for name, tensors in params.items() if name not in tables})


def device_bytes(tree: Any) -> int:
    """Return a tree's bytes on one device."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
