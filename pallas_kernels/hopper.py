"""Facts of Hopper GPUs, for which the Pallas kernels for GPUs are written."""

from __future__ import annotations

import jax

NAMES = ("H100", "H200", "H800", "H20", "GH200")
NUM_CORES = 132
SHARED_BYTES = 232448 - 2048  # shared memory of a multiprocessor, less the barriers
WARPGROUP_ROWS = 64  # rows of a wgmma instruction
WARPGROUP_THREADS = 128
REGISTERS = 65536  # registers of a multiprocessor
MOST_REGISTERS = 256  # registers that a thread can ask for


def other_chip() -> str | None:
    """Return the reason why the chip that is compiled for lacks the instructions, or None if it has them."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        is_hopper = any(name in device.device_kind for name in NAMES)
        return None if is_hopper else f"its instructions are those of Hopper GPUs, not of a {device.device_kind}"
    for local in jax.local_devices():
        capability = getattr(local, "compute_capability", None)
        if capability is not None and str(capability) != "9.0":
            return f"its instructions are those of Hopper GPUs (9.0), not of {local.device_kind} ({capability})"
    return None


def num_cores() -> int:
    """Return the number of multiprocessors of the chip that is compiled for."""
    if (device := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return int(device.num_cores or NUM_CORES)
    return int(getattr(jax.devices()[0], "core_count", NUM_CORES))


def name() -> str:
    """Return the name of the chip that is compiled for, such as "h200"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return next((name.lower() for name in sorted(NAMES, key=len, reverse=True) if name in kind), kind)


def computing_registers(loading: int, *, num_loading: int, num_computing: int) -> int:
    """Return the most registers that a thread of the computing warpgroups can have beside the loading ones.

    A thread block starts with as many for each thread as divide evenly, in eights. What loading threads give back is
    all that computing ones can get: a thread that asks for more waits forever.

    Args:
        loading: registers of a loading thread.
        num_loading: number of loading warpgroups.
        num_computing: number of computing warpgroups.
    """
    num_warpgroups = num_loading + num_computing
    at_start = REGISTERS // (num_warpgroups * WARPGROUP_THREADS) // 8 * 8
    assert loading % 8 == 0, "threads have registers in eights"
    assert loading <= at_start, "loading threads give registers back"
    left = (num_warpgroups * at_start - num_loading * loading) // num_computing // 8 * 8
    return min(left, MOST_REGISTERS)
