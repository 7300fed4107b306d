"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.packed_linear import PackedMatrix

Matrices = Float[Array, "G N K"] | PackedMatrix


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it."""

    is_packed: bool
    platform: str


@runtime_checkable
class Backend(Protocol):
    """Module that multiplies groups in one particular way."""

    def supports(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def multiply(self, x: Float[Array, "M K"], matrices: Any, group_sizes: Int32[Array, " G"]) -> Float[Array, "M out"]:
        """Return the products in float32; see `grouped_matmul`."""
