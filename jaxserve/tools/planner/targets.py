"""Targets: chips with their data sheets, and their topology."""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels import deviceless
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, Chip
from jaxserve.system.environment import gpu_memory_fraction


@dataclass(frozen=True)
class DataSheet:
    """The maker's figures for a chip, and its description for the compiler.

    Attributes:
        chip: chip that programs are compiled for.
        memory_bytes: memory per chip; for a TPU, the memory that its compiler leaves to programs.
        bytes_per_s: memory bandwidth.
        flops_per_s: dense matmul rate by dtype.
        link_bytes_per_s: bandwidth in one direction of a link to a neighbour, or to the switch between all chips.
        directions: number of topology dimensions.
        devices_per_chip: jax devices per chip.
        watts: maximum power, with memory and board; None if the maker does not publish it.
    """

    chip: Chip
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    directions: int = 1
    devices_per_chip: int = 1
    watts: float | None = None

    @property
    def device_bytes(self) -> int:
        """Memory per jax device."""
        return self.memory_bytes // self.devices_per_chip

    def limit_bytes(self, gpu_memory_utilization: float) -> int:
        """Return the memory per device that XLA may allocate at this `gpu_memory_utilization`."""
        fraction = 1.0 if self.chip.platform == "tpu" else gpu_memory_fraction() or gpu_memory_utilization
        return int(self.memory_bytes * fraction) // self.devices_per_chip


@dataclass(frozen=True)
class Target:
    """Chips of the same type; `sheet` is None for this machine's CPU.

    Attributes:
        name: name that the user gave.
        kind: chip type, the key of its price.
        sheet: the chip's data sheet.
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
        """jax devices per chip."""
        return self.sheet.devices_per_chip if self.sheet else 1

    @property
    def platform(self) -> str:
        """jax's platform name."""
        return self.sheet.chip.platform if self.sheet else "cpu"

    @property
    def num_links(self) -> int:
        """Number of links per chip: one per dimension, or two if four or more chips can form a ring."""
        return sum(min(2, size // 2) if self.sheet and self.sheet.directions > 1 else 1 for size in self.shape)

    @property
    def topology(self) -> str:
        """Number of chips in each dimension as a string for `Chip.devices`, such as 2x2x1."""
        return "x".join(map(str, self.shape if len(self.shape) > 1 else (1, 1, *self.shape)))


def _sheet(
    chip: Chip,
    memory: float,
    gb_per_s: int,
    tflops: int | float,
    link_gb_per_s: int,
    directions: int = 1,
    num_devices: int = 1,
    watts: int | None = None,
) -> DataSheet:
    """Return a chip's data sheet.

    Args:
        chip: chip that programs are compiled for.
        memory: memory in bytes.
        gb_per_s: memory bandwidth.
        tflops: dense matmul rate in bfloat16 and float16.
        link_gb_per_s: bandwidth in one direction of a link between chips; a GPU without NVLink has PCI Express.
        directions: number of topology dimensions.
        num_devices: jax devices per chip.
        watts: maximum power; Google publishes none.
    """
    flops_per_s = tflops * 1e12
    slower = 6 if chip.platform == "tpu" else 2  # an exact float32 matmul takes six in bfloat16; a GPU's is in TF32
    return DataSheet(
        chip=chip,
        memory_bytes=int(memory),
        bytes_per_s=gb_per_s * 1e9,
        flops_per_s={"bfloat16": flops_per_s, "float16": flops_per_s, "float32": flops_per_s / slower},
        link_bytes_per_s=link_gb_per_s * 1e9,
        directions=directions,
        devices_per_chip=num_devices,
        watts=None if watts is None else float(watts),
    )


_GB, _GIB = 1e9, 2.0**30

# From NVIDIA's data sheets and architecture white papers, without sparsity: SXM modules, then PCI Express cards. Some
# devices report more memory: 85 GB for an H100, 150 GB for an H200. GeForce cards accumulate in float32 at half rate.
_GPUS = {
    "a100-40gb": _sheet(
        deviceless.A100_40GB, memory=40 * _GB, gb_per_s=1555, tflops=312.0, link_gb_per_s=300, watts=400
    ),
    "a100": _sheet(deviceless.A100, memory=80 * _GB, gb_per_s=2039, tflops=312.0, link_gb_per_s=300, watts=400),
    "h100": _sheet(deviceless.H100, memory=80 * _GB, gb_per_s=3350, tflops=989.5, link_gb_per_s=450, watts=700),
    "h200": _sheet(deviceless.H200, memory=141 * _GB, gb_per_s=4800, tflops=989.5, link_gb_per_s=450, watts=700),
    "b200": _sheet(deviceless.B200, memory=180 * _GB, gb_per_s=8000, tflops=2250.0, link_gb_per_s=900, watts=1000),
    "l4": _sheet(deviceless.L4, memory=24 * _GB, gb_per_s=300, tflops=121.0, link_gb_per_s=32, watts=72),
    "l40s": _sheet(deviceless.L40S, memory=48 * _GB, gb_per_s=864, tflops=362.0, link_gb_per_s=32, watts=350),
    "rtx4090": _sheet(deviceless.RTX_4090, memory=24 * _GB, gb_per_s=1008, tflops=165.2, link_gb_per_s=32, watts=450),
    "rtx5090": _sheet(deviceless.RTX_5090, memory=32 * _GB, gb_per_s=1792, tflops=209.5, link_gb_per_s=64, watts=575),
    "rtxpro6000": _sheet(
        deviceless.RTX_PRO_6000, memory=96 * _GB, gb_per_s=1792, tflops=503.8, link_gb_per_s=64, watts=600
    ),
}


# Bandwidth and bfloat16 FLOP/s are from Google Cloud's documentation. It gives the bandwidth between chips as the sum
# over all links and both directions: four links on v5e and v6e, six on the others. The memory is the part that the
# compiler leaves to programs.
_TPUS = {
    "v4": _sheet(TPU_V4, memory=30.75 * _GIB, gb_per_s=1200, tflops=275, link_gb_per_s=50, directions=3),
    "v5e": _sheet(TPU_V5E, memory=15.75 * _GIB, gb_per_s=819, tflops=197, link_gb_per_s=50, directions=2),
    "v5p": _sheet(TPU_V5P, memory=95.74 * _GIB, gb_per_s=2765, tflops=459, link_gb_per_s=100, directions=3),
    "v6e": _sheet(TPU_V6E, memory=31.25 * _GIB, gb_per_s=1638, tflops=918, link_gb_per_s=100, directions=2),
    "tpu7x": _sheet(
        TPU7X, memory=189.5 * _GIB, gb_per_s=7380, tflops=2307, link_gb_per_s=100, directions=3, num_devices=2
    ),
}
KINDS = (*_GPUS, *_TPUS)
_GPU_NAME = re.compile(rf"({'|'.join(sorted(_GPUS, key=len, reverse=True))})(?:x([1-8]))?")
_TPU_NAME = re.compile(rf"({'|'.join(_TPUS)})(?::([1-9]\d*(?:x[1-9]\d*)+))?")

SWEPT = (
    *("h100", "h100x2", "h100x4", "h100x8"),
    *("h200", "h200x2", "h200x4", "h200x8"),
    *("a100-40gb", "a100", "a100x8", "b200", "b200x8"),
    *("l4", "l40s", "l40sx8", "rtx4090", "rtx5090", "rtxpro6000"),
    *("v4:2x2x1", "v4:2x2x2"),
    *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4"),
    *("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2"),
    *("v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4"),
    *("tpu7x:1x1x1", "tpu7x:2x2x1"),
)
"""Targets that a sweep compares by default."""


def parse_target(name: str) -> Target:
    """Return the target with this name, whether or not its compiler is installed.

    Raises:
        ConfigError: there is no such target.
    """
    if name == "cpu":
        return Target(name, name, None)
    if match := _GPU_NAME.fullmatch(_without_separators(name)):
        return Target(name, match[1], _GPUS[match[1]], (int(match[2] or 1),))
    if (match := _TPU_NAME.fullmatch(name)) is None:
        raise ConfigError(
            f"target must be cpu, one of {list(_GPUS)} or two to eight of them, as h100x8, or one of {list(_TPUS)}, "
            f"alone for one chip or with the number of chips in each direction, as v6e:2x4, got {name!r}"
        )
    sheet = _TPUS[match[1]]
    shape = tuple(map(int, match[2].split("x"))) if match[2] else (1,) * sheet.directions
    if len(shape) != sheet.directions:
        example = f"{match[1]}:{'x'.join('221'[: sheet.directions])}"
        raise ConfigError(f"{match[1]} must have chips in {sheet.directions} directions, as {example}, got {name!r}")
    return Target(name, match[1], sheet, shape)


def _without_separators(name: str) -> str:
    """Return a GPU's name as written here: RTX-4090 and rtx_pro_6000 are rtx4090 and rtxpro6000."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    return plain if plain in _GPUS else re.sub(r"-(?!40gb)", "", plain)


_LARGER = {  # numbers of GPUs, and TPU slice shapes that Google Cloud offers, by number of directions
    1: ("2", "4", "8"),
    2: ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
}


def larger_targets(target: Target) -> Iterator[Target]:
    """Yield targets with more chips of the same type, in ascending order; none for a CPU."""
    if target.sheet is None:
        return
    separator = "x" if target.sheet.directions == 1 else ":"
    for name in _LARGER[target.sheet.directions]:
        shape = tuple(map(int, name.split("x")))
        if math.prod(shape) > target.num_chips:
            yield dataclasses.replace(target, name=f"{target.kind}{separator}{name}", shape=shape)


def missing_compiler(target: Target, compilers: Path) -> str | None:
    """Return a sentence with a target's missing compiler and the command that installs it; None if none is missing.

    Args:
        target: target to compile for.
        compilers: folder for the command to install into.
    """
    if target.sheet is None or (reason := target.sheet.chip.unavailable()) is None:
        return None
    packages = shlex.join(target.sheet.chip.requirements())
    return (
        f"programs cannot be compiled for {target.name}, as {reason}; install it outside your environment: "
        f"pip install --target {shlex.quote(str(compilers))} --no-deps {packages}"
    )
