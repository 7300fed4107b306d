"""Compiling for chips that are not there: any machine can check what a program becomes on an accelerator.

The result is a compiled program with its HLO, `memory_analysis()` and the assembler's report. It cannot be run, and its
matrix products are not those a chip would choose: XLA measures them there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True)
class Chip:
    """An accelerator as the compiler knows it.

    Attributes:
        device_kind: what jax calls it.
        platform: "gpu" or "tpu".
        num_cores: multiprocessors.
        target_config: XLA's description of the chip.
    """

    device_kind: str
    platform: str
    num_cores: int
    target_config: str

    def unavailable(self) -> str | None:
        """Why nothing can be compiled for it here; None if it can."""
        plugins = importlib.util.find_spec("jax_plugins")
        if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
            return (
                f"jax-cuda13-plugin and jax-cuda13-pjrt {jax.__version__} are not installed "
                "(pip install --no-deps is enough to compile)"
            )
        return None

    def compile(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate_argnums: tuple[int, ...] = (),
        mesh: Mesh | None = None,
    ) -> jax.stages.Compiled:
        """Compiles `function` for one chip, or for those of a mesh.

        Args:
          function: what `jax.jit` takes.
          args: arrays, or their shapes and dtypes, in pytrees; for a mesh, their shardings over it too.
          donate_argnums: as of `jax.jit`.
          mesh: of `devices`; None for one chip.
        """
        one = SingleDeviceSharding(self.devices(1)[0])
        sharding_of = (lambda _: one) if mesh is None else (lambda x: x.sharding)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), tuple(args))
        abstract = self.mesh() if mesh is None else mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(abstract), _uncached():
            traced = jax.jit(function, donate_argnums=donate_argnums).trace(*shapes)
            return traced.lower(lowering_platforms=("cuda",)).compile()

    def devices(self, count: int) -> list[Any]:
        """As many of them as jax describes devices: side by side in one machine."""
        return _devices(self, count)

    def mesh(self) -> AbstractMesh:
        """What kernels ask for facts of the chip while they are traced."""
        facts: dict[str, Any] = {"device_kind": self.device_kind, "num_cores": self.num_cores}
        try:
            device = AbstractDevice(**facts, platform=self.platform)
        except TypeError:  # jax 0.10 has no platform there
            device = AbstractDevice(**facts)
        return AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Keeps programs out of jax's persistent cache: without the chip, they could not be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


@functools.cache
def _devices(chip: Chip, count: int) -> list[Any]:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=chip.device_kind, topology=f"1x1x{count}", target_config=chip.target_config
    )
    return list(topology.devices)


H200 = Chip("NVIDIA H200", "gpu", 132, _H200)
