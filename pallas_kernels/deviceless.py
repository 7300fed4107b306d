"""Compile programs for accelerators that are not attached, so that any machine can check the result.

A compiled program has its HLO, `memory_analysis()` and, for GPUs, the assembler's report. It cannot be run, and on a
GPU XLA may choose other matmul algorithms, since it measures candidates on the device.

For TPUs, libtpu should be told beforehand to leave TPUs alone (`jaxserve.system.environment.leave_tpus_alone`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, Sharding, SingleDeviceSharding

_GPU = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: %(core_shared)d
  threads_per_core_limit: %(core_threads)d
  core_count: %(num_cores)d
  fpus_per_core: %(core_fpus)d
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: %(bandwidth)d
  l2_cache_size: %(cache)d
  clock_rate_ghz: %(clock)s
  device_memory_size: %(memory)d
  shared_memory_per_block_optin: %(block_shared)d
  cuda_compute_capability { %(capability)s }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "%(name)s"
"""  # XLA's description of a GPU, a text proto

HOST_MEMORY = "pinned_host"  # host memory that devices copy from and to
_CUDA_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


class UnknownTopologyError(ValueError):
    """Raised if libtpu cannot compile for the requested shape of a TPU slice."""


@dataclass(frozen=True)
class Chip:
    """Type of accelerator that programs can be compiled for without having one.

    Attributes:
        device_kind: jax's `device_kind` of the chip.
        platform: "gpu" or "tpu".
        num_cores: number of GPU multiprocessors, or TensorCores per TPU device.
        topology_name: name for `jax.experimental.topologies`, without the shape.
        options: options for `get_topology_desc`, such as XLA's description of a GPU.
        capability: compute capability of a GPU, such as "8.9".
    """

    device_kind: str
    platform: str
    num_cores: int
    topology_name: str
    options: tuple[tuple[str, str], ...] = ()
    capability: str = ""

    def unavailable(self) -> str | None:
        """Return the reason why this machine cannot compile for the chip (a missing package), or None if it can."""
        if self.platform == "tpu":
            return None if importlib.util.find_spec("libtpu") else "libtpu was not found"
        for package in _CUDA_PLUGIN:
            try:
                version = metadata.version(package)
            except metadata.PackageNotFoundError:
                return f"{package} {jax.__version__} was not found"
            if version != jax.__version__:  # jax would refuse it later, with a traceback
                return f"{package} must have the version of jax, {jax.__version__}, and {version} was found"
        return None

    def requirements(self) -> list[str]:
        """Return pip requirements for the packages that compile for this chip, to install without dependencies."""
        if self.platform == "tpu":
            needs = (need.split(";")[0].strip() for need in metadata.requires("jax") or ())
            return [next((need for need in needs if need.startswith("libtpu")), "libtpu")]
        return [*(f"{package}=={jax.__version__}" for package in _CUDA_PLUGIN), "nvidia-cuda-nvcc", "nvidia-nvvm"]

    def compile(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate_argnums: tuple[int, ...] = (),
        mesh: Mesh | None = None,
    ) -> jax.stages.Compiled:
        """Lower and compile one function for the chip; see `lower` for the arguments."""
        return self.compile_all([self.lower(function, args, donate_argnums, mesh)])[0]

    def compile_all(self, programs: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
        """Compile programs that `lower` returned, and return them in the same order.

        Programs for GPUs are compiled in parallel, since one compilation hardly keeps a core busy. Programs for TPUs
        are compiled one after the other: libtpu sometimes crashed when it compiled two large ones simultaneously.
        """
        with _uncached(), ThreadPoolExecutor(len(programs) if self.platform == "gpu" else 1) as pool:
            return list(pool.map(lambda program: program.compile(), programs))

    def lower(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate_argnums: tuple[int, ...] = (),
        mesh: Mesh | None = None,
        compiler_options: Mapping[str, str | bool] | None = None,
        out_shardings: Any = None,
    ) -> jax.stages.Lowered:
        """Trace and lower `function` for one chip, or for the chips of a mesh.

        Args:
          function: function to compile.
          args: its arguments: pytrees with arrays, or with their shapes and dtypes; for a mesh, also with shardings.
          donate_argnums: indices of arguments to donate, as in `jax.jit`.
          mesh: mesh made from `devices`; None for one chip.
          compiler_options: XLA options, as in `jax.jit`.
          out_shardings: shardings of the results; None leaves them to XLA.
        """
        one = SingleDeviceSharding(self.devices("1x1x1")[0])

        def sharding_of(leaf: Any) -> Sharding:
            sharding: Sharding | None = getattr(leaf, "sharding", None)
            if mesh is not None:
                assert sharding is not None, "an argument of a mesh's program has a sharding"
                return sharding
            on_host = sharding is not None and sharding.memory_kind == HOST_MEMORY
            return one.with_memory_kind(HOST_MEMORY) if on_host else one

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), tuple(args))
        abstract = self.mesh() if mesh is None else mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(abstract):
            readable = _READABLE if self.platform == "tpu" else {}
            options: dict[str, Any] = {"compiler_options": {**(compiler_options or {}), **readable}}
            if out_shardings is not None:
                options["out_shardings"] = out_shardings
            traced = jax.jit(function, donate_argnums=donate_argnums, **options).trace(*shapes)
            return traced.lower(lowering_platforms=("cuda" if self.platform == "gpu" else "tpu",))

    def devices(self, shape: str) -> list[Any]:
        """Return jax device descriptions for several chips, to make a mesh from.

        Args:
          shape: number of chips in each direction, such as "1x1x4" for GPUs or "2x4" for TPUs.

        Raises:
          UnknownTopologyError: libtpu has no such shape for this chip.
        """
        return _devices(self, shape)

    def mesh(self) -> AbstractMesh:
        """Return an abstract mesh with the chip's kind and core count, which kernels read at trace time."""
        properties: dict[str, Any] = {"device_kind": self.device_kind, "num_cores": self.num_cores}
        try:
            device = _Device(**properties, platform=self.platform)
        except TypeError:  # jax 0.10 has no platform there
            device = _Device(**properties)
        device.capabilities[self.device_kind] = self.capability
        return AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)


class _Device(AbstractDevice):
    """Abstract device with a compute capability; without one, Mosaic GPU assumes Hopper.

    It is looked up by kind, since jax compares and hashes only the dataclass's fields.
    """

    capabilities: ClassVar[dict[str, str]] = {}

    @property
    def compute_capability(self) -> str:
        """The GPU's compute capability, such as "8.9"."""
        if not (found := self.capabilities.get(self.device_kind)):
            raise AttributeError(f"the compute capability of a {self.device_kind} is not known")
        return found


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Turn jax's persistent compilation cache off inside the context.

    The cache could not load the programs again without the chip.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


@functools.cache
def _devices(chip: Chip, shape: str) -> list[Any]:
    """Return jax device descriptions for chips in a shape such as "2x4"; see `Chip.devices`."""
    options = dict(chip.options)
    if chip.platform == "gpu":
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=chip.topology_name, topology=shape, **options
        )
        return list(topology.devices)
    sizes = [min(2, int(size)) for size in shape.split("x")][:2]
    topology_name = f"{chip.topology_name}:{shape}"
    try:
        topology = topologies.get_topology_desc(topology_name, "tpu", chips_per_host_bounds=(*sizes, 1), **options)
    except jax.errors.JaxRuntimeError as error:
        raise UnknownTopologyError(f"libtpu has no topology {topology_name}: {error}") from error
    return list(topology.devices)


# Without this option, the HLO text of programs that offload scatters to sparse cores cannot be read.
_READABLE = {"xla_tpu_sparse_core_maximum_preloaded_async_calls": "0"}


# By compute capability: shared memory per multiprocessor in KiB, its threads and its float32 units. A thread block can
# have all shared memory except 1 KiB.
_CAPABILITIES = {(8, 0): (164, 2048, 64), (8, 9): (100, 1536, 128), (9, 0): (228, 2048, 128)}
_CAPABILITIES |= {(10, 0): (228, 2048, 128), (12, 0): (100, 1536, 128)}


def _gpu(
    name: str, capability: tuple[int, int], num_cores: int, *, clock: float, gb_per_s: float, cache_mib: int, gb: float
) -> Chip:
    """Return the chip for an NVIDIA GPU.

    Args:
        name: jax's `device_kind`.
        capability: compute capability, major and minor.
        num_cores: number of multiprocessors.
        clock: boost clock in GHz.
        gb_per_s: memory bandwidth in GB/s.
        cache_mib: L2 cache in MiB.
        gb: memory in GB (1e9 bytes).
    """
    shared_kib, threads, fpus = _CAPABILITIES[capability]
    text = "major: {} minor: {}".format(*capability)
    if capability >= (9, 0):
        text += " feature_extension: ACCELERATED_FEATURES"
    values = {
        "name": name,
        "capability": text,
        "num_cores": num_cores,
        "core_shared": shared_kib * 1024,
        "block_shared": (shared_kib - 1) * 1024,
        "core_threads": threads,
        "core_fpus": fpus,
        "bandwidth": round(gb_per_s * 1e9),
        "cache": cache_mib * 2**20,
        "clock": clock,
        "memory": round(gb * 1e9),
    }
    return Chip(name, "gpu", num_cores, name, (("target_config", _GPU % values),), "{}.{}".format(*capability))


# Memory as the devices report it: less than the data sheet's with error correction, more if it counts in GiB.
A100_40GB = _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, clock=1.41, gb_per_s=1555.0, cache_mib=40, gb=42.3)
A100 = _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, clock=1.41, gb_per_s=2039.0, cache_mib=40, gb=84.9)
L4 = _gpu("NVIDIA L4", (8, 9), 58, clock=2.04, gb_per_s=300.0, cache_mib=48, gb=23.6)
L40S = _gpu("NVIDIA L40S", (8, 9), 142, clock=2.52, gb_per_s=864.0, cache_mib=96, gb=47.7)
RTX_4090 = _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, clock=2.52, gb_per_s=1008.0, cache_mib=72, gb=25.3)
H100 = _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, clock=1.98, gb_per_s=3352.32, cache_mib=50, gb=84.9)
H200 = _gpu("NVIDIA H200", (9, 0), 132, clock=1.98, gb_per_s=4800.0, cache_mib=60, gb=150.0)
B200 = _gpu("NVIDIA B200", (10, 0), 148, clock=1.965, gb_per_s=7672.0, cache_mib=126, gb=191.5)
RTX_5090 = _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, clock=2.41, gb_per_s=1792.0, cache_mib=96, gb=33.7)
RTX_PRO_6000 = _gpu(
    *("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188),
    clock=2.62,
    gb_per_s=1792.0,
    cache_mib=128,
    gb=102.0,
)
TPU_V4 = Chip("TPU v4", "tpu", 2, "v4", (("chip_config_name", "megacore"),))
TPU_V5E = Chip("TPU v5 lite", "tpu", 1, "v5e")
TPU_V5P = Chip("TPU v5", "tpu", 2, "v5p")
TPU_V6E = Chip("TPU v6 lite", "tpu", 1, "v6e")
TPU7X = Chip("TPU7x", "tpu", 1, "tpu7x")  # one device is half a chip
