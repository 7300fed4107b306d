"""Operands and static parameters by which a backend decides if it can run a grouped matmul."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxserve.pallas_kernels.elements import FLOAT16_BITS, PACKED
from jaxserve.pallas_kernels.packed_linear import PackedMatrix

ELEMENTS = ("int8", "int4", "e4m3", "e2m1")
SCALES = ("float32", "bfloat16", FLOAT16_BITS.name, "float8_e4m3fn")
# Matrix rows: other numbers cut the scale lines that TMA copies, and XLA transposes them for TPUs.
OUTPUT_ALIGNMENT = 16


class QuantizedStack(NamedTuple):
    """All layers' quantised matrices, `[layers, out, in]`.

    Attributes:
        elements: elements, or bytes with two elements each (see `elements.packed`).
        scale: scale for each matrix row and each group of consecutive columns; float16 as `FLOAT16_BITS`.
        zero: zero point for each scale; None for the element type's default.
        kind: element type, "int8", "e4m3", "int4" or "e2m1".
        minimum: minimum for each scale, only without zero points.
    """

    elements: Shaped[Array, "layers out in_bytes"]
    scale: Shaped[Array, "layers groups out"]
    zero: Shaped[Array, "layers groups out"] | None
    kind: str
    minimum: Float[Array, "layers groups out"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of one layer's matrix, `(out, in)`, in elements."""
        _, num_outputs, row_bytes = self.elements.shape
        return num_outputs, row_bytes * (2 if self.kind in PACKED else 1)

    @property
    def offset(self) -> Shaped[Array, "layers groups out"] | None:
        """Zero points, or minima if there are none, or None."""
        return self.minimum if self.zero is None else self.zero


Matrices = Float[Array, "G N K"] | Float[Array, "layers GN K"] | PackedMatrix | QuantizedStack


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static parameters for a grouped matmul.

    Attributes:
        num_rows: x rows, M.
        num_groups: number of groups, G.
        num_outputs: rows per matrix, N.
        num_inputs: columns per matrix, K.
        dtype: x dtype.
        matrix_dtype: dtype that stores the matrix elements.
        result_dtype: result dtype.
        platform: platform to compile for.
        is_packed: True if the matrices are packed for the native kernels.
        num_shards: number of expert-parallel shards whose rows x holds; each has the same number of groups. The other
            shards' rows come after the last local group.
        input_format: format to which the native kernels round x, one of `packed_linear.INPUT_FORMATS`.
    """

    num_rows: int
    num_groups: int = 1
    num_outputs: int
    num_inputs: int
    dtype: jnp.dtype
    matrix_dtype: jnp.dtype
    result_dtype: jnp.dtype
    platform: str
    is_packed: bool = False
    num_shards: int = 1
    input_format: str = "float32"

    @property
    def kernel_dtype(self) -> jnp.dtype:
        """Dtype that kernels for float matrices write: the result dtype if the matrices have it, else float32."""
        return self.result_dtype if self.result_dtype == self.matrix_dtype else jnp.dtype(jnp.float32)

    @property
    def mean_rows(self) -> int:
        """Mean number of x rows per group, rounded up to a power of two."""
        return _power_of_two(-(-self.num_rows // (self.num_groups * self.num_shards)))

    @property
    def stored_columns(self) -> int:
        """Number of stored columns per matrix row: one per element, or one per byte with two elements."""
        return self.num_inputs

    @property
    def shape_class(self) -> dict[str, int | str]:
        """Properties that all problems with the same tuned block sizes have in common."""
        return {
            "mean_rows": self.mean_rows,
            "num_outputs": self.num_outputs,
            "num_inputs": self.num_inputs,
            "dtype": self.matrix_dtype.name,
        }

    def unsupported_reason(self, dtypes: Collection[str], *, outputs: int, inputs: int) -> str | None:
        """Return the reason why a Pallas kernel for float matrices cannot run this problem, or None if it can.

        Args:
            dtypes: dtypes for x and the matrices that the kernel supports.
            outputs: number that must divide the matrix rows.
            inputs: number that must divide the matrix columns.
        """
        if self.is_packed:
            return "packed matrices are for the native kernels"
        if self.matrix_dtype.name not in dtypes or self.dtype != self.matrix_dtype:
            return f"rows and matrices must both be one of {dtypes}, not {self.dtype} and {self.matrix_dtype}"
        if self.num_inputs % inputs:
            return f"columns of matrices must be a multiple of {inputs}, not {self.num_inputs}"
        if self.num_outputs % outputs:
            return f"rows of matrices must be a multiple of {outputs}, not {self.num_outputs}"
        return None


@dataclass(frozen=True, kw_only=True)
class QuantizedProblem(Problem):
    """Static parameters for a matmul of all x rows with one quantised matrix.

    Attributes:
        elements: element type, such as "int4".
        num_scale_groups: number of column groups that have a scale each; 1 if each matrix row has one scale.
        has_zero: True if the groups have zero points.
        has_minimum: True if the groups have minima.
        scale_dtype: scale dtype.
    """

    elements: str
    num_scale_groups: int
    has_zero: bool
    has_minimum: bool
    scale_dtype: jnp.dtype

    @property
    def group_size(self) -> int:
        """Number of consecutive matrix columns that share a scale."""
        return self.num_inputs // self.num_scale_groups

    @property
    def per_byte(self) -> int:
        """Number of elements per stored byte: 2 if they have 4 bits, one from each half of a matrix row; else 1."""
        return 2 if self.elements in PACKED else 1

    @property
    def stored_columns(self) -> int:
        """Number of bytes per stored matrix row."""
        return self.num_inputs // self.per_byte

    @property
    def scales_elements(self) -> bool:
        """True if scales or minima differ between columns; False if one scale multiplies a whole row's sum."""
        return self.num_scale_groups > 1 or self.has_minimum

    @property
    def offset_bytes(self) -> int:
        """Number of bytes per zero point (1) or minimum (4); 0 if there are neither."""
        return 1 if self.has_zero else 4 * self.has_minimum

    @property
    def matrix_bytes(self) -> int:
        """Number of bytes in one layer's matrix, including scales, zero points and minima."""
        group_bytes = self.scale_dtype.itemsize + self.offset_bytes
        return self.num_outputs * (self.stored_columns + self.num_scale_groups * group_bytes)

    @property
    def shape_class(self) -> dict[str, int | str]:
        """Properties that all problems with the same tuned block sizes have in common."""
        return {
            "num_rows": _power_of_two(self.num_rows),
            "num_outputs": self.num_outputs,
            "num_inputs": self.num_inputs,
            "num_groups": self.num_scale_groups,
            "elements": self.elements,
            "scale_dtype": self.scale_dtype.name,
        }

    def block_groups(self, columns: int) -> int:
        """Return how many scale groups a block with `columns` matrix columns overlaps."""
        return max(1, columns // self.group_size)

    def unsupported_elements(self, dtypes: Collection[str]) -> str | None:
        """Return the reason why no Pallas kernel that takes these x dtypes can run this problem, or None if one may."""
        if self.elements not in ELEMENTS:
            return f"elements must be one of {ELEMENTS}, not {self.elements}"
        if self.num_outputs % OUTPUT_ALIGNMENT:
            return f"rows of the matrix must be a multiple of {OUTPUT_ALIGNMENT}, not {self.num_outputs}"
        if self.dtype.name not in dtypes or self.scale_dtype.name not in SCALES:
            names = f"{self.dtype} and {self.scale_dtype}"
            return f"rows must be one of {tuple(dtypes)} and scales one of {SCALES}, not {names}"
        return None


def _power_of_two(x: int) -> int:
    """Round x up to a power of two."""
    return 1 << max(0, x - 1).bit_length()
