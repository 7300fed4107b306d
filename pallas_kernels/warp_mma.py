"""Properties of NVIDIA GPUs with warp-level matrix instructions (mma): all from Ampere on.

Hopper and the data centre's Blackwell have faster instructions too, consumer GPUs only these.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jaxserve.pallas_kernels.target import TargetChip

_BARRIER_BYTES = 1024
# KiB of shared memory that a thread block can use, by compute capability. Others of a generation have the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED_KIB = 99
FIRST = (8, 0)
INTERPRETED = TargetChip("interpreter", num_cores=3, memory_bytes=_LEAST_SHARED_KIB * 1024 - _BARRIER_BYTES)


def capability() -> tuple[int, int] | None:
    """Return the target GPU's compute capability; None if jax does not know it, as on machines without a GPU."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    found = getattr(device, "compute_capability", None)
    if found is None:
        local = [x for x in jax.local_devices() if device is None or x.device_kind == device.device_kind]
        found = next((getattr(x, "compute_capability", None) for x in local), None)
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(found))  # AMD's GPUs have names there, such as gfx942
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def has_tma() -> bool:
    """Return whether the target GPU has TMA, which copies to shared memory and arrives at barriers."""
    found = capability()
    return found is None or found >= (9, 0)


def unsupported_reason() -> str | None:
    """Return the reason why the target GPU lacks the instructions, or None if it has them."""
    found = capability()
    if found is None:
        return "jax does not know the target GPU's compute capability"
    if found < FIRST:
        return "it needs compute capability {}.{}, and the target GPU has {}.{}".format(*FIRST, *found)
    return None


def target_chip() -> TargetChip:
    """Return the target GPU's name, number of multiprocessors, and shared memory per thread block."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    num_cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or 1
    shared_kib = _SHARED_KIB.get(capability() or FIRST, _LEAST_SHARED_KIB)
    return TargetChip(device.device_kind, int(num_cores), shared_kib * 1024 - _BARRIER_BYTES)
