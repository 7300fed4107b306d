"""Cases of quantised matmuls that the tests of all backends share, with their reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int32
from numpy.typing import NDArray

from jaxserve.pallas_kernels.elements import FLOAT16_BITS, INT4_ZERO, PACKED, packed
from jaxserve.pallas_kernels.grouped_matmul import QuantizedProblem, QuantizedStack

E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)


class Arguments(NamedTuple):
    """Arguments of a backend's `multiply`, except the problem."""

    x: Float[Array, "T K"]
    matrix: QuantizedStack
    layer: Int32[Array, ""]


class _Values(NamedTuple):
    """Values of one layer: elements [N, K] and grids [groups, N]."""

    elements: NDArray[np.float32]
    scale: NDArray[np.float32]
    zero: NDArray[np.float32] | None
    minimum: NDArray[np.float32] | None


@dataclass(frozen=True)
class Case:
    """A matmul of random values.

    Attributes:
        name: name in reports.
        elements: element type, such as "int4".
        group_size: columns per group; None if each row has one scale.
        has_zero: True if groups have zero points.
        has_minimum: True if groups have minima.
        scale_dtype: dtype of the scales.
        num_rows: number of rows of x.
        num_outputs: rows of the matrix.
        num_inputs: columns of the matrix.
        result_dtype: dtype of the results.
        num_layers: layers in the stack of matrices.
        layer: index of the layer whose matrix is multiplied.
    """

    name: str
    elements: str = "int4"
    group_size: int | None = 128
    has_zero: bool = False
    has_minimum: bool = False
    scale_dtype: str = "float32"
    num_rows: int = 5
    num_outputs: int = 256
    num_inputs: int = 512
    result_dtype: str = "float32"
    num_layers: int = 1
    layer: int = 0

    def problem(self, platform: str) -> QuantizedProblem:
        return quantized_problem(*self.arguments()[:2], self.result_dtype, platform)

    def arguments(self, stale: float = 0.0) -> Arguments:
        """Return the arguments, with the scales of other layers multiplied by `stale`."""
        layers = [self._values(layer) for layer in range(self.num_layers)]
        elements = np.stack([self._stored(values.elements) for values in layers])
        scale = np.stack([values.scale if i == self.layer else values.scale * stale for i, values in enumerate(layers)])
        scale = scale.astype(jnp.dtype(self.scale_dtype))
        scale = scale.view(FLOAT16_BITS) if scale.dtype == np.float16 else scale
        zeros = [values.zero.astype(np.uint8) for values in layers if values.zero is not None]
        minima = [values.minimum for values in layers if values.minimum is not None]
        grids = (scale, *(np.stack(grid) if grid else None for grid in (zeros, minima)))
        elements, scale, zero, minimum = map(jax.device_put, (elements, *grids))
        matrix = QuantizedStack(elements, scale, zero, self.elements, minimum=minimum)
        return Arguments(jax.device_put(self._x()), matrix, jax.device_put(np.int32(self.layer)))

    def expected(self, is_rounded: bool = True) -> NDArray[np.float32]:
        """Multiply in float32, with dequantised elements rounded to bfloat16 or not."""
        elements, scale, zero, minimum = self._values(self.layer)
        if self.elements == "e2m1":
            elements = elements.astype(np.uint8).view(E2M1).astype(np.float32)
        elif self.elements == "int4" and zero is None and minimum is None:
            elements = elements - INT4_ZERO
        x, size = self._x().astype(np.float32), self.num_inputs // len(scale)
        q = elements if zero is None else elements - np.repeat(zero.T, size, axis=1)
        if len(scale) == 1:
            y: NDArray[np.float32] = (x @ q.T) * scale
            return y
        matrix = q * np.repeat(scale.T, size, axis=1)
        if minimum is not None:
            matrix = matrix - np.repeat(minimum.T, size, axis=1)
        return x @ matrix.astype(ml_dtypes.bfloat16 if is_rounded else np.float32).astype(np.float32).T

    def _x(self) -> NDArray[ml_dtypes.bfloat16]:
        return np.random.default_rng(0).normal(size=(self.num_rows, self.num_inputs)).astype(ml_dtypes.bfloat16)

    def _values(self, layer: int) -> _Values:
        rng, shape = np.random.default_rng(1 + layer), (self.num_outputs, self.num_inputs)
        grid = (self.num_inputs // (self.group_size or self.num_inputs), self.num_outputs)
        if self.elements == "e4m3":
            elements = rng.normal(size=shape).astype(E4M3).astype(np.float32)
        else:
            low, high = (0, 16) if self.elements in PACKED else (-128, 128)
            elements = rng.integers(low, high, shape).astype(np.float32)
        # With few bits in the scales, subtracting minima gives the same result with and without rounding first.
        dtype = jnp.dtype("bfloat16" if self.has_minimum else self.scale_dtype)
        scale = rng.uniform(0.01, 0.02, grid).astype(dtype).astype(np.float32)
        zero = rng.integers(0, 16, grid).astype(np.float32) if self.has_zero else None
        minimum = rng.uniform(0, 0.2, grid).astype(np.float32) if self.has_minimum else None
        return _Values(elements, scale, zero, minimum)

    def _stored(self, elements: NDArray[np.float32]) -> NDArray[np.generic]:
        if self.elements in PACKED:
            return packed(elements.astype(np.uint8))
        return elements.astype(E4M3 if self.elements == "e4m3" else np.int8)


def quantized_problem(
    x: Float[Array, "T K"], matrix: QuantizedStack, result_dtype: str, platform: str
) -> QuantizedProblem:
    """Return the static parameters of `x @ matrix.T`."""
    num_outputs, num_inputs = matrix.shape
    return QuantizedProblem(
        num_rows=len(x),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        dtype=x.dtype,
        matrix_dtype=matrix.elements.dtype,
        result_dtype=jnp.dtype(result_dtype),
        platform=platform,
        elements=matrix.kind,
        num_scale_groups=matrix.scale.shape[1],
        has_zero=matrix.zero is not None,
        has_minimum=matrix.minimum is not None,
        scale_dtype=matrix.scale.dtype,
    )


CASES: tuple[Case, ...] = (
    Case("int8_by_channel", "int8", None, num_rows=33),
    Case("int8_by_group", "int8", 64),
    Case("e4m3_by_block", "e4m3", 128, num_rows=1),
    Case("e4m3_by_channel", "e4m3", None),
    Case("int4_by_channel", "int4", None),
    Case("int4_by_group", num_rows=40, num_inputs=1024, result_dtype="bfloat16"),
    Case("small_groups", group_size=32, num_inputs=768, num_outputs=384),
    Case("many_groups", group_size=32, num_inputs=1024),
    Case("large_groups", group_size=512, num_inputs=1024),
    Case("zero_points", has_zero=True, group_size=64),
    Case("zero_points_by_channel", has_zero=True, group_size=None),
    Case("a_layer_among_others", num_layers=3, layer=1),
    Case("rows_of_many_tiles", "int8", num_rows=200),
    Case("few_outputs", "int8", num_outputs=128),
    Case("minima", group_size=32, num_inputs=1024, has_minimum=True),
    Case("e2m1_and_e4m3", "e2m1", group_size=16, scale_dtype="float8_e4m3fn"),
    Case("int8_and_float16", "int8", 32, num_rows=40, num_inputs=1024, scale_dtype="float16"),
    Case("e2m1_and_bfloat16", "e2m1", group_size=32, num_rows=40, scale_dtype="bfloat16"),
    Case("a_partial_block_of_outputs", has_zero=True, num_outputs=208, group_size=64, num_layers=2),
)
BY_NAME = {case.name: case for case in CASES}
