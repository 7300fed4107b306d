"""Targets of the planner: chips with the figures of their data sheets, and their arrangement."""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.environment import gpu_memory_fraction
from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels.deviceless import H100, H200, TPU7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, Chip


@dataclass(frozen=True)
class DataSheet:
    """Figures of a chip from its maker, and its description for the compiler.

    Attributes:
        chip: chip that programs are compiled for.
        memory_bytes: memory of one chip; for a TPU, the memory that its compiler leaves to programs.
        bytes_per_s: memory bandwidth.
        flops_per_s: rate of dense matrix products, by dtype.
        link_bytes_per_s: bandwidth in one direction of a link to a neighbour, or to the switch between all chips.
        directions: number of dimensions of the chips' arrangement.
        devices_per_chip: jax devices per chip.
    """

    chip: Chip
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    directions: int = 1
    devices_per_chip: int = 1

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return self.memory_bytes // self.devices_per_chip

    def limit_bytes(self, gpu_memory_utilization: float) -> int:
        """Return the memory of one device that XLA may allocate at this `gpu_memory_utilization`."""
        share = 1.0 if self.chip.platform == "tpu" else gpu_memory_fraction() or gpu_memory_utilization
        return int(self.memory_bytes * share) // self.devices_per_chip


@dataclass(frozen=True)
class Target:
    """Chips of one kind; `sheet` is None for the CPU of this machine.

    Attributes:
        name: name that the user gave.
        kind: kind of the chips, key of their price.
        sheet: data sheet of one chip.
        shape: number of chips in each dimension.
    """

    name: str
    kind: str
    sheet: DataSheet | None
    shape: tuple[int, ...] = (1,)

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Number of jax devices, over which the model is split."""
        return self.num_chips * self.devices_per_chip

    @property
    def devices_per_chip(self) -> int:
        """Number of jax devices per chip."""
        return self.sheet.devices_per_chip if self.sheet else 1

    @property
    def platform(self) -> str:
        """Name of the platform in jax."""
        return self.sheet.chip.platform if self.sheet else "cpu"

    @property
    def num_links(self) -> int:
        """Number of links from each chip: one per dimension, or two where four or more chips can form a ring."""
        return sum(min(2, size // 2) if self.sheet and self.sheet.directions > 1 else 1 for size in self.shape)

    @property
    def topology(self) -> str:
        """Shape in the form that `Chip.devices` takes."""
        return "x".join(map(str, self.shape if len(self.shape) > 1 else (1, 1, *self.shape)))


def _hopper(chip: Chip, gb: int, tb_per_s: float) -> DataSheet:
    """Return the data sheet of a Hopper GPU.

    All have, dense and thus half of the figures with sparsity, 989.5 TFLOP/s in bfloat16 and float16 and half of that
    in TF32, in which XLA multiplies float32; NVLink has 900 GB/s in both directions together.
    """
    return DataSheet(
        chip=chip,
        memory_bytes=gb * 10**9,
        bytes_per_s=tb_per_s * 1e12,
        flops_per_s={"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 494.7e12},
        link_bytes_per_s=450e9,
    )


# Memory and bandwidth of the SXM modules, from NVIDIA's data sheets. Devices report more memory: 85 GB and 150 GB.
_HOPPER = {"h100": _hopper(H100, gb=80, tb_per_s=3.35), "h200": _hopper(H200, gb=141, tb_per_s=4.8)}


def _tpu(
    chip: Chip, gib: float, gb_per_s: int, tflops: int, link_gb_per_s: int, directions: int, devices_per_chip: int = 1
) -> DataSheet:
    """Return the data sheet of a TPU; an exact float32 product takes six in bfloat16."""
    return DataSheet(
        chip=chip,
        memory_bytes=int(gib * 2**30),
        bytes_per_s=gb_per_s * 1e9,
        flops_per_s={"bfloat16": tflops * 1e12, "float16": tflops * 1e12, "float32": tflops * 1e12 / 6},
        link_bytes_per_s=link_gb_per_s * 1e9,
        directions=directions,
        devices_per_chip=devices_per_chip,
    )


# Bandwidth and bfloat16 FLOP/s of a chip are from Google Cloud's documentation of each generation. It gives the
# bandwidth between chips as the sum over all links and both directions: four links on v5e and v6e, six on the others.
# The memory is what the compiler leaves to programs.
_TPUS = {
    "v4": _tpu(TPU_V4, gib=30.75, gb_per_s=1200, tflops=275, link_gb_per_s=50, directions=3),
    "v5e": _tpu(TPU_V5E, gib=15.75, gb_per_s=819, tflops=197, link_gb_per_s=50, directions=2),
    "v5p": _tpu(TPU_V5P, gib=95.74, gb_per_s=2765, tflops=459, link_gb_per_s=100, directions=3),
    "v6e": _tpu(TPU_V6E, gib=31.25, gb_per_s=1638, tflops=918, link_gb_per_s=100, directions=2),
    "tpu7x": _tpu(
        TPU7X, gib=2 * 94.75, gb_per_s=7380, tflops=2307, link_gb_per_s=100, directions=3, devices_per_chip=2
    ),
}
KINDS = (*_HOPPER, *_TPUS)
_GPUS = re.compile(rf"({'|'.join(_HOPPER)})(?:x([1-8]))?")
_TPU_SHAPE = re.compile(rf"({'|'.join(_TPUS)}):([1-9]\d*(?:x[1-9]\d*)+)")

SWEPT = (
    *("h100", "h100x2", "h100x4", "h100x8"),
    *("h200", "h200x2", "h200x4", "h200x8"),
    *("v4:2x2x1", "v4:2x2x2"),
    *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4"),
    *("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2"),
    *("v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4"),
    *("tpu7x:1x1x1", "tpu7x:2x2x1"),
)
"""Names of the targets that a sweep compares by default."""


def parse_target(name: str) -> Target:
    """Return the target of this name, whether or not its compiler is installed.

    Raises:
        ConfigError: there is no such target.
    """
    if name == "cpu":
        return Target(name, name, None)
    if match := _GPUS.fullmatch(name):
        return Target(name, match[1], _HOPPER[match[1]], (int(match[2] or 1),))
    if (match := _TPU_SHAPE.fullmatch(name)) is None:
        raise ConfigError(
            f"target must be cpu, h100, h100x2 to h100x8, h200, h200x2 to h200x8, or one of {list(_TPUS)} with how "
            f"many chips lie in each direction, as v6e:2x4, got {name!r}"
        )
    sheet, shape = _TPUS[match[1]], tuple(map(int, match[2].split("x")))
    if len(shape) != sheet.directions:
        example = f"{match[1]}:{'x'.join('221'[: sheet.directions])}"
        raise ConfigError(f"{match[1]} must have chips in {sheet.directions} directions, as {example}, got {name!r}")
    return Target(name, match[1], sheet, shape)


def find_target(name: str, compilers: Path) -> Target:
    """Return the target of this name.

    Args:
        name: name that the user gave.
        compilers: folder for the error message to suggest if the target's compiler is not installed.

    Raises:
        ConfigError: there is no such target, or its compiler is not installed.
    """
    target = parse_target(name)
    if target.sheet is not None and (reason := target.sheet.chip.unavailable()) is not None:
        packages = shlex.join(target.sheet.chip.requirements())
        raise ConfigError(
            f"to plan for {name}, programs must be compiled for it, but {reason}; install it beside your environment: "
            f"pip install --target {shlex.quote(str(compilers))} --no-deps {packages}"
        )
    return target
