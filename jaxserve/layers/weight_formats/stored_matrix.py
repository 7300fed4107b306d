"""StoredMatrix: a matrix on the device as a quantised checkpoint has it.

All schemes have this layout: elements, scales by row and column group, zero points. Per-tensor and per-block scales are
repeated for each row, so that devices can take any rows.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxserve.layers.linear import LinearContext
from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.weight_formats import activations
from jaxserve.layers.weight_formats.matrix_inputs import MatrixInputs
from jaxserve.layers.weight_formats.scaled_matrix import ScaledMatrix
from jaxserve.pallas_kernels.elements import INT4_ZERO, e2m1_floats, scale_floats, unpacked
from jaxserve.pallas_kernels.grouped_matmul import QuantizedStack
from jaxserve.weights import Scheme


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredMatrix(ScaledMatrix):
    """A matrix [out, in] or a stack of matrices, quantised in any scheme that a checkpoint can have.

    Attributes:
        elements: quantised elements: one per byte, or two four-bit ones per byte, see `elements.packed`.
        scale: a scale for each matrix row and each column group; float16 scales as their bits.
        row_scale: second scale per row, in schemes with a scale for the whole tensor.
        zero: zero point for each scale.
        minimum: minimum for each scale, subtracted from elements times scales, in schemes without zero points.
        inputs: column order and quantisation of the inputs.
        scheme: the checkpoint's quantisation scheme.
    """

    elements: Shaped[Array, "*stack out in_bytes"]
    scale: Shaped[Array, "*stack groups out"]
    row_scale: Float32[Array, "*stack out 1"] | None
    zero: Shaped[Array, "*stack groups out"] | None
    minimum: Float32[Array, "*stack groups out"] | None
    inputs: MatrixInputs
    scheme: Scheme = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in], after the stack's dimensions."""
        *outer, in_bytes = self.elements.shape
        return (*outer, in_bytes * (2 if self.scheme.is_packed else 1))

    def quantized(self) -> QuantizedStack:
        """Return the operand for the matmul kernels; `self` must be a stack."""
        return QuantizedStack(self.elements, self.scale, self.zero, self.scheme.elements, self.minimum)

    def row_factor(self) -> Float32[Array, " out"] | None:
        """Return the second scale by row."""
        if self.row_scale is None:
            return None
        return (1 / self.row_scale if self.scheme.divides else self.row_scale)[:, 0]

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float32[Array, "M out"]:
        """Compute the grouped matmul, with x quantised if the scheme quantises activations."""
        x, factor = self.quantize_inputs(x, context)
        y = super().multiply_groups(x, group_sizes, context)
        return y if factor is None else y * factor

    def quantize_inputs(
        self, x: Float[Array, "T in"], context: LinearContext
    ) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
        """Return x in column order, quantised and with a factor if the scheme quantises activations."""
        return self.inputs.quantize(x, context.axis)

    def rows_arrays(self) -> tuple[StoredRows, ...]:
        """Return elements, scales and the other arrays by row."""
        row_scale = () if self.row_scale is None else (StoredRows(self.row_scale),)
        grids = (StoredRows(grid, axis=1) for grid in (self.zero, self.minimum) if grid is not None)
        return StoredRows(self.elements), StoredRows(self.scale, axis=1), *row_scale, *grids

    def dequantize(self, *arrays: Array) -> Float32[Array, "rows in"]:
        """Return matrix rows for the inputs that `quantize_inputs` returns."""
        return _dequantize(self.scheme, *arrays)

    def rows(self, ids: Int[Array, " T"]) -> Float32[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones; the matrix must not be split by columns."""
        return self.inputs.restore(super().rows(ids))


def _dequantize(
    scheme: Scheme,
    elements: Shaped[Array, "rows in_bytes"],
    scale: Shaped[Array, "rows groups"],
    *optional: Shaped[Array, "rows _"],
) -> Float32[Array, "rows in"]:
    """Return matrix rows in float32, from the same rows of each array.

    Args:
        scheme: the matrix's scheme.
        elements: elements, two per byte if they have four bits.
        scale: scale for each group.
        optional: second scale, zero points and minima, as far as the scheme has them.
    """
    q, rest = _floats(scheme, elements), iter(optional)
    has_minimum = scheme.has("minimum")
    wide = scale_floats(scale)
    if scheme.has("global_scale"):
        further = next(rest)
        wide = activations.divide(wide, further) if scheme.divides else wide * further
    spread = partial(_spread, q.shape[-1])
    if scheme.has("zero"):
        q = q - spread(next(rest).astype(jnp.float32))
    elif scheme.elements == "int4" and not has_minimum:
        q = q - INT4_ZERO
    w = q * spread(wide)
    return w - spread(next(rest)) if has_minimum else w


def _floats(scheme: Scheme, elements: Shaped[Array, "rows in_bytes"]) -> Float32[Array, "rows in"]:
    """Return a scheme's elements as floats; four-bit integers range from 0 to 15."""
    if not scheme.is_packed:
        return elements.astype(jnp.float32)
    codes = unpacked(elements)
    return e2m1_floats(codes.astype(jnp.int32)) if scheme.elements == "e2m1" else codes.astype(jnp.float32)


def _spread(in_size: int, grid: Float32[Array, "rows groups"]) -> Float32[Array, "rows _"]:
    """Repeat each group's value for its columns; a single group's value is left to broadcasting."""
    num_groups = grid.shape[-1]
    return grid if num_groups == 1 else jnp.repeat(grid, in_size // num_groups, axis=-1)
