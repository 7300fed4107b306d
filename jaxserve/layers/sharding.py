"""Tensor, expert and data parallelism: the mesh, and the table from logical tensor axes to mesh axes.

Matrices are split as in Megatron-LM (Shoeybi et al. 2019) over all devices: matrices before attention and SwiGLU by
rows (heads, ffn), matrices after them by columns, so that a layer sums over the devices twice; embedding and head by
the vocabulary. Routed experts are split twice: whole experts along the expert axis, and each expert, as above, over the
devices that have it.

Along the data axis devices have different requests and KV pages: each computes attention and MLPs, whose matrices are
replicated along this axis, only for its own tokens. Routed experts and the vocabulary are split along the data axis
too: each device gathers all tokens, computes its part, and gets the sums for its own tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxserve.errors import ConfigError

DATA = "data"  # mesh axis along which devices have different requests and pages
MESH_AXES = (DATA, "tensor", "expert", "pipeline")  # the last has size 1
TENSOR = ("tensor", "expert")  # mesh axes over which heads and MLPs are split
EXPERTS = (DATA, "expert")  # mesh axes along which devices have different experts
MODEL = (DATA, "tensor", "expert")  # all axes of one model's mesh; the vocabulary is split over them

MeshAxes = str | tuple[str, ...]

_MESH_AXES: dict[str | None, MeshAxes | None] = {
    "vocab": MODEL,
    "heads": TENSOR,
    "ffn": TENSOR,
    "expert": EXPERTS,
    "expert_ffn": "tensor",
    "expert_rows": MODEL,  # experts and their rows, in one dimension
    "embed": None,
    None: None,
}


def tensor_mesh(
    num_devices: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    num_expert_shards: int = 1,
    num_data_shards: int = 1,
) -> Mesh | None:
    """Return the mesh over the first `num_devices` entries in `devices`, by default all devices; None for one device.

    `num_expert_shards`, the number of shards with whole experts, divides the number of devices; `num_data_shards`, the
    data axis's size, divides `num_expert_shards`.

    With several processes, the mesh has the first devices in each: all processes must take part.

    Raises:
        ConfigError: there are fewer devices, or they cannot be divided evenly among the processes.
    """
    devices = jax.devices() if devices is None else devices
    if num_devices > len(devices):
        raise ConfigError(
            f"tensor_parallel_size must be at most the number of devices, got {num_devices} and {len(devices)}; "
            f"lower it{_more_devices(devices, num_devices)}"
        )
    processes = sorted({device.process_index for device in devices})
    if num_devices % len(processes):
        raise ConfigError(
            f"tensor_parallel_size must be a multiple of the number of processes, got {num_devices} and "
            f"{len(processes)}; start fewer, or take devices of each"
        )
    share = num_devices // len(processes)
    taken = [d for process in processes for d in [d for d in devices if d.process_index == process][:share]]
    return make_mesh(taken, num_expert_shards, num_data_shards) if num_devices > 1 else None


def replica_meshes(
    tensor_parallel_size: int,
    data_parallel_size: int,
    expert_parallel_size: int = 1,
    num_data_shards: int = 1,
    pipeline_parallel_size: int = 1,
) -> list[Mesh | None]:
    """Return the meshes of each replica's stages; they take consecutive devices. A single one on one device has None.

    Args:
        tensor_parallel_size: devices per stage.
        data_parallel_size: number of replicas.
        expert_parallel_size: `num_expert_shards` in `tensor_mesh`.
        num_data_shards: size of each mesh's data axis.
        pipeline_parallel_size: stages per replica.

    Raises:
        ConfigError: there are too few devices; there are several replicas or stages, and several processes; or one
            replica's devices cannot be divided evenly among the processes.
    """
    num_meshes = data_parallel_size * pipeline_parallel_size
    if num_meshes == 1:
        return [
            tensor_mesh(tensor_parallel_size, num_expert_shards=expert_parallel_size, num_data_shards=num_data_shards)
        ]
    if jax.process_count() > 1 and pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size must be 1 in a run over many processes, got {pipeline_parallel_size} and "
            f"{jax.process_count()} processes; take tensor_parallel_size",
            about=("pipeline_parallel_size",),
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"data_parallel_size must be 1 in a run over many processes, got {data_parallel_size} and "
            f"{jax.process_count()} processes; spread a batch over a fleet with jaxserve batch --ray"
        )
    size, devices = tensor_parallel_size, jax.devices()
    if size * num_meshes > len(devices):
        sizes = {
            "tensor_parallel_size": size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
        }
        named = {name: count for name, count in sizes.items() if count > 1 or name != "pipeline_parallel_size"}
        raise ConfigError(
            f"{' x '.join(named)} must be at most the number of devices, got {' x '.join(map(str, named.values()))} "
            f"and {len(devices)}; lower one{_more_devices(devices, size * num_meshes)}"
        )
    firsts = range(0, size * num_meshes, size)
    return [make_mesh(devices[first : first + size], expert_parallel_size, num_data_shards) for first in firsts]


def make_mesh(devices: Sequence[jax.Device], num_expert_shards: int = 1, num_data_shards: int = 1) -> Mesh:
    """Return the mesh over one replica's devices.

    Devices with the same requests are consecutive. Among these, devices with the same experts are
    `num_expert_shards / num_data_shards` apart.
    """
    sizes = num_data_shards, -1, num_expert_shards // num_data_shards, 1
    return Mesh(np.array(devices).reshape(sizes), MESH_AXES)


def tensor_size(mesh: Mesh | None) -> int:
    """Return the number of devices over which a model is split; 1 without a mesh."""
    return 1 if mesh is None else num_parts(mesh, MODEL)


def num_parts(mesh: Mesh | AbstractMesh, axes: MeshAxes | None) -> int:
    """Return the number of parts into which mesh axes divide a dimension."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _more_devices(devices: Sequence[jax.Device], wanted: int) -> str:
    """Return the advice to simulate `wanted` devices on a CPU, empty for other platforms."""
    on_cpu = devices[0].platform == "cpu"
    return f", or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} for virtual ones" if on_cpu else ""


def named_sharding(mesh: Mesh | AbstractMesh, axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding for a tensor with these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(_MESH_AXES[axis] for axis in axes)))


def from_every_host(array: NDArray[Any], sharding: NamedSharding) -> jax.Array:
    """Return an array over the devices of several processes, each of which has all of it on its host."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding for an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_dimension(axes: Sequence[str | None]) -> int | None:
    """Return the dimension that tensor parallelism splits, given a tensor's logical axes; None if there is none.

    Expert parallelism may split another dimension.
    """
    return next((dim for dim, axis in enumerate(axes) if _MESH_AXES[axis] not in (None, EXPERTS)), None)


def split_axes(axes: Sequence[str | None]) -> MeshAxes | None:
    """Return the mesh axes over which tensor parallelism splits the dimension `split_dimension`."""
    dimension = split_dimension(axes)
    return None if dimension is None else _MESH_AXES[axes[dimension]]


def part_of(mesh: Mesh | AbstractMesh, index: int, axes: MeshAxes | None) -> int:
    """Return the index of the shard that mesh device `index` holds, if a dimension is split over these mesh axes."""
    places = dict(zip(mesh.axis_names, np.unravel_index(index, mesh.axis_sizes), strict=True))
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    part = 0
    for name in names:
        part = part * mesh.shape[name] + int(places[name])
    return part


def whole_shape(mesh: Mesh | AbstractMesh, part: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
    """Return the global shape if each mesh device holds a shard with shape `part`; further dimensions are not split."""
    return tuple(size * num_parts(mesh, _MESH_AXES[axis]) for size, axis in zip_longest(part, axes))


def joined(mesh: Mesh, part: Any, larger: Mapping[MeshAxes, Any]) -> Any:
    """Return global shapes and shardings for arrays whose shapes on one device are `part`.

    Args:
        mesh: the mesh.
        part: tree with one device's shapes and dtypes.
        larger: same tree, by mesh axes, for a device that holds a larger fraction along them: an array is split over
            these axes in the dimension that is larger here, and replicated if there is none.
    """

    def join(own: jax.ShapeDtypeStruct, *more: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return an array's global shape and sharding.

        Args:
            own: shape on one device.
            more: shapes for the devices in `larger`.
        """
        axes: list[MeshAxes | None] = [
            next((axes for axes, other in zip(larger, more, strict=True) if other.shape[dim] > size), None)
            for dim, size in enumerate(own.shape)
        ]
        shape = tuple(size * num_parts(mesh, each) for size, each in zip(own.shape, axes, strict=True))
        return jax.ShapeDtypeStruct(shape, own.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(join, part, *larger.values())


def specs_of(tree: Any) -> Any:
    """Return the tree of PartitionSpecs for a tree of sharded arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def over_devices(program: Callable[..., Any], mesh: Mesh, args: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """Wrap a program that takes one device's shards of `args` in `shard_map`, so that it takes the global arrays."""
    # Unchecked, because native and Pallas calls do not declare along which axes their results vary.
    return jax.shard_map(program, mesh=mesh, in_specs=specs_of(tuple(args)), out_specs=out_specs, check_vma=False)


def held_heads(num_heads: int, index: int, num_devices: int) -> list[int]:
    """Return the heads that device `index` holds; each device holds the same number.

    If the number of devices does not divide the heads, each head is copied to the least number of devices that allows
    an even split.
    """
    copies = math.lcm(num_heads, num_devices) // num_heads
    share = num_heads * copies // num_devices
    return [head // copies for head in range(index * share, (index + 1) * share)]
