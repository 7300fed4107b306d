"""What can be planned for: chips by their data sheets, and how many of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from pallas_kernels.deviceless import H200, Chip


@dataclass(frozen=True)
class DataSheet:
    """A chip as its maker describes it, and as the compiler knows it.

    Attributes:
        chip: that programs are compiled for.
        memory_bytes: of one chip.
        bytes_per_s: of its memory.
        flops_per_s: of dense matrix products, by dtype.
        link_bytes_per_s: from one chip to the others, in one direction.
    """

    chip: Chip
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float


@dataclass(frozen=True)
class Target:
    """Chips of one kind in one machine; `sheet` is None for the CPU of this one."""

    name: str
    sheet: DataSheet | None
    num_chips: int = 1


# NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s; dense, half of the figures with sparsity: 989.5 TFLOP/s in bfloat16 and
# float16, half of that in TF32, in which XLA multiplies float32; NVLink 900 GB/s in both directions together.
_H200 = DataSheet(
    chip=H200,
    memory_bytes=141 * 10**9,
    bytes_per_s=4.8e12,
    flops_per_s={"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 494.7e12},
    link_bytes_per_s=450e9,
)

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("h200", _H200),
        *(Target(f"h200x{count}", _H200, count) for count in (2, 4, 8)),
        Target("cpu", None),
    )
}


def find_target(name: str) -> Target:
    """The target of this name.

    Raises:
        ConfigError: there is none, or nothing can be compiled for it here.
    """
    if name not in TARGETS:
        raise ConfigError(f"target must be one of {list(TARGETS)}, got {name!r}")
    target = TARGETS[name]
    if target.sheet is not None and (reason := target.sheet.chip.unavailable()) is not None:
        raise ConfigError(f"to plan for {name}, programs must be compiled for it, but {reason}")
    return target
