"""Platform and chip to compile for: the current mesh's chip if it names one, else jax's default device."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class TargetChip:
    """Chip properties that determine a Pallas kernel's block sizes.

    Attributes:
        name: chip name in tables with tuned sizes, such as "h200" or "v6e".
        num_cores: number of GPU multiprocessors or TPU TensorCores.
        memory_bytes: bytes of shared memory that a GPU thread block can use, or of vector memory (VMEM) for a TPU
            kernel.
    """

    name: str
    num_cores: int
    memory_bytes: int


def target_platform() -> str:
    """Return the platform to compile for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind
    return "gpu" if "NVIDIA" in kind else "tpu" if kind.startswith("TPU") else kind.lower()
