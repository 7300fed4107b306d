"""Tensor, expert and data parallelism: the mesh, and the table from logical axes of tensors to mesh axes.

Matrices are split as in Megatron-LM (Shoeybi et al. 2019): those before attention and SwiGLU by their rows (heads,
ffn), those after by their columns, so that a layer sums over the devices twice; embedding and head by the vocabulary.
All devices of a model take part. Those of routed experts are divided twice: whole experts along the expert axis, and
each expert, as above, over the devices that have it.

Along the data axis devices have rows, with their pages, of their own: attention and MLPs, whose matrices all of them
hold, are those of a device's own tokens. Routed experts and the vocabulary are divided along it, too. There the devices
exchange tokens: each gathers those of all, computes its part of them, and gets the sums of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError

DATA = "data"  # mesh axis along which devices have rows and pages of their own
MESH_AXES = (DATA, "tensor", "expert", "pipeline")  # the last has size 1
TENSOR = ("tensor", "expert")  # mesh axes over which heads and MLPs are split
EXPERTS = (DATA, "expert")  # mesh axes along which devices have experts of their own
MODEL = (DATA, "tensor", "expert")  # mesh axes of all devices of a model, over which the vocabulary is split

MeshAxes = str | tuple[str, ...]

_MESH_AXES: dict[str | None, MeshAxes | None] = {
    "vocab": MODEL,
    "heads": TENSOR,
    "ffn": TENSOR,
    "expert": EXPERTS,
    "expert_ffn": "tensor",
    "expert_rows": MODEL,  # experts and the rows of each, in one dimension
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
    """Return the mesh over the first `num_devices` of `devices`, by default of all devices; None for one device.

    `num_expert_shards`, the number of shares of whole experts, divides the number of devices; `num_data_shards`, the
    size of the data axis, divides that.

    With many processes, the mesh has the first devices of each: all processes must take part.

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
    tensor_parallel_size: int, data_parallel_size: int, expert_parallel_size: int = 1, num_data_shards: int = 1
) -> list[Mesh | None]:
    """Return the mesh of each replica, over consecutive devices; [None] for one replica on one device.

    The last two sizes are as in `tensor_mesh`.

    Raises:
        ConfigError: there are fewer devices, or they belong to several processes.
    """
    if data_parallel_size == 1:
        return [
            tensor_mesh(tensor_parallel_size, num_expert_shards=expert_parallel_size, num_data_shards=num_data_shards)
        ]
    if jax.process_count() > 1:
        raise ConfigError(
            f"data_parallel_size must be 1 in a run over many processes, got {data_parallel_size} and "
            f"{jax.process_count()} processes; spread a batch over a fleet with jaxserve batch --ray"
        )
    size, devices = tensor_parallel_size, jax.devices()
    if size * data_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size x data_parallel_size must be at most the number of devices, got {size} x "
            f"{data_parallel_size} and {len(devices)}; lower one{_more_devices(devices, size * data_parallel_size)}"
        )
    firsts = range(0, size * data_parallel_size, size)
    return [make_mesh(devices[first : first + size], expert_parallel_size, num_data_shards) for first in firsts]


def make_mesh(devices: Sequence[jax.Device], num_expert_shards: int = 1, num_data_shards: int = 1) -> Mesh:
    """Return the mesh over the devices of one replica.

    Those that have the same rows follow each other. Among these, devices that have the same experts are as far apart as
    there are shares of experts.
    """
    sizes = num_data_shards, -1, num_expert_shards // num_data_shards, 1
    return Mesh(np.array(devices).reshape(sizes), MESH_AXES)


def tensor_size(mesh: Mesh | None) -> int:
    """Return the number of devices that a model is split over; 1 without a mesh."""
    return 1 if mesh is None else num_parts(mesh, MODEL)


def num_parts(mesh: Mesh | AbstractMesh, axes: MeshAxes | None) -> int:
    """Return the number of parts into which mesh axes divide a dimension."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _more_devices(devices: Sequence[jax.Device], wanted: int) -> str:
    on_cpu = devices[0].platform == "cpu"
    return f", or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} for virtual ones" if on_cpu else ""


def named_sharding(mesh: Mesh | AbstractMesh, axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of a tensor with these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(_MESH_AXES[axis] for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_dimension(axes: Sequence[str | None]) -> int | None:
    """Return the dimension that tensor parallelism splits, given the logical axes of a tensor; None if there is none.

    Whole experts may be divided along another one.
    """
    return next((dim for dim, axis in enumerate(axes) if _MESH_AXES[axis] not in (None, EXPERTS)), None)


def split_axes(axes: Sequence[str | None]) -> MeshAxes | None:
    """Return the mesh axes over which the dimension is split that tensor parallelism splits."""
    dimension = split_dimension(axes)
    return None if dimension is None else _MESH_AXES[axes[dimension]]


def part_of(mesh: Mesh | AbstractMesh, index: int, axes: MeshAxes | None) -> int:
    """Return the number of the part that device `index` of a mesh has of a dimension split over mesh axes."""
    places = dict(zip(mesh.axis_names, np.unravel_index(index, mesh.axis_sizes), strict=True))
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    part = 0
    for name in names:
        part = part * mesh.shape[name] + int(places[name])
    return part


def whole_shape(mesh: Mesh | AbstractMesh, part: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
    """Return the shape of a tensor of which each device of a mesh holds `part`; any further dimensions are whole."""
    return tuple(size * num_parts(mesh, _MESH_AXES[axis]) for size, axis in zip_longest(part, axes))


def joined(mesh: Mesh, part: Any, larger: Mapping[MeshAxes, Any]) -> Any:
    """Return the shapes and shardings of global arrays of which each device of a mesh holds `part`.

    Args:
        mesh: mesh of the devices.
        part: tree of shapes and dtypes on one device.
        larger: the same tree for a device with a larger share, by the mesh axes over which such shares are divided: an
            array is split over them in the dimension in which it is larger here, and replicated if there is none.
    """

    def join(own: jax.ShapeDtypeStruct, *more: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes: list[MeshAxes | None] = [
            next((axes for axes, other in zip(larger, more, strict=True) if other.shape[dim] > size), None)
            for dim, size in enumerate(own.shape)
        ]
        shape = tuple(size * num_parts(mesh, each) for size, each in zip(own.shape, axes, strict=True))
        return jax.ShapeDtypeStruct(shape, own.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(join, part, *larger.values())


def specs_of(tree: Any) -> Any:
    """Return the PartitionSpec of each array of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def over_devices(program: Callable[..., Any], mesh: Mesh, args: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """Map a program over one device's part of `args` to one over the global arrays: each device runs it on its part."""
    # Unchecked, because native and Pallas calls do not declare along which axes their results vary.
    return jax.shard_map(program, mesh=mesh, in_specs=specs_of(tuple(args)), out_specs=out_specs, check_vma=False)


def held_heads(num_heads: int, index: int, num_devices: int) -> list[int]:
    """Return the heads that device `index` holds: an even share of all heads.

    If the number of devices does not divide them, each head is held by as few devices as make them divide.
    """
    copies = math.lcm(num_heads, num_devices) // num_heads
    share = num_heads * copies // num_devices
    return [head // copies for head in range(index * share, (index + 1) * share)]
