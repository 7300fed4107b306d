"""Properties of Hopper GPUs, whose instructions most of the Pallas kernels for GPUs need."""

from __future__ import annotations

import jax

from jaxserve.pallas_kernels.target import TargetChip

NAMES = ("GH200", "H100", "H200", "H800", "H20")  # a name before the names that it contains
NUM_CORES = 132
SHARED_BYTES = 232448 - 2048  # shared memory per multiprocessor, less the barriers
WARPGROUP_ROWS = 64  # rows per wgmma instruction
WARPGROUP_THREADS = 128
REGISTERS = 65536  # registers per multiprocessor
MAX_REGISTERS = 256  # registers that a thread can request
INTERPRETED = TargetChip("interpreter", num_cores=3, memory_bytes=SHARED_BYTES)  # few, so that every core has some work


def unsupported_reason() -> str | None:
    """Return the reason why the target GPU cannot execute Hopper instructions, or None if it can.

    Also return None if no local device reports a compute capability, as on machines without a GPU.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        is_hopper = any(name in device.device_kind for name in NAMES)
        return None if is_hopper else f"its instructions are those of Hopper GPUs, not of a {device.device_kind}"
    for local in jax.local_devices():
        capability = getattr(local, "compute_capability", None)
        if capability is not None and str(capability) != "9.0":
            return f"its instructions are those of Hopper GPUs (9.0), not of {local.device_kind} ({capability})"
    return None


def target_chip() -> TargetChip:
    """Return the target GPU's name, number of multiprocessors, and shared memory per thread block."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        local = jax.devices()[0]
        kind, num_cores = local.device_kind, getattr(local, "core_count", NUM_CORES)
    else:
        kind, num_cores = device.device_kind, device.num_cores or NUM_CORES
    name = next((name.lower() for name in NAMES if name in kind), kind)
    return TargetChip(name, int(num_cores), SHARED_BYTES)


def computing_registers(loading: int, *, num_loading: int, num_computing: int) -> int:
    """Return how many registers each thread in a computing warpgroup can have.

    All threads start with equally many registers, a multiple of eight. Computing threads can gain only the
    registers that loading threads release: a thread that requests more waits forever.

    Args:
        loading: registers that each loading thread keeps, a multiple of eight.
        num_loading: loading warpgroups per thread block.
        num_computing: computing warpgroups per thread block.
    """
    num_warpgroups = num_loading + num_computing
    at_start = REGISTERS // (num_warpgroups * WARPGROUP_THREADS) // 8 * 8
    assert loading % 8 == 0, "register counts are multiples of eight"
    assert loading <= at_start, "loading threads release registers"
    left = (num_warpgroups * at_start - num_loading * loading) // num_computing // 8 * 8
    return min(left, MAX_REGISTERS)
