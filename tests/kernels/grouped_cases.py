"""Cases of grouped matmuls that the tests of all backends share, with their reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from numpy.typing import NDArray

from jaxserve.pallas_kernels.grouped_matmul import Problem


class Arguments(NamedTuple):
    """Arguments of a backend's `multiply`, except the problem."""

    x: Float[Array, "M K"]
    matrices: Float[Array, "layers GN K"]
    group_sizes: Int32[Array, " G"]
    layer: Int32[Array, ""]


@dataclass(frozen=True)
class Case:
    """A grouped matmul of random numbers.

    Attributes:
        name: name in reports.
        group_sizes: rows of each group.
        num_rest: rows after the last group.
        num_outputs: rows of each matrix.
        num_inputs: columns of each matrix.
        dtype: dtype of rows and matrices.
        result_dtype: dtype of the results.
        num_layers: layers in the stack of matrices.
        layer: index of the layer whose matrices are multiplied.
    """

    name: str
    group_sizes: tuple[int, ...]
    num_rest: int = 0
    num_outputs: int = 64
    num_inputs: int = 128
    dtype: str = "bfloat16"
    result_dtype: str = "float32"
    num_layers: int = 1
    layer: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes) + self.num_rest

    def problem(self, platform: str) -> Problem:
        dtype = jnp.dtype(self.dtype)
        return Problem(
            num_rows=self.num_rows,
            num_groups=len(self.group_sizes),
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            dtype=dtype,
            matrix_dtype=dtype,
            result_dtype=jnp.dtype(self.result_dtype),
            platform=platform,
        )

    def arguments(self, stale: float = 0.0) -> Arguments:
        """Return the arguments, with `stale` in all rows and matrices that must not affect the result."""
        x, matrices = self._random_inputs()
        group_sizes, first = np.array(self.group_sizes, np.int32), self.layer * len(self.group_sizes)
        is_read = np.zeros(len(matrices), bool)
        is_read[first + np.flatnonzero(group_sizes)] = True
        matrices[~is_read] = stale
        x[sum(self.group_sizes) :] = stale
        dtype = jnp.dtype(self.dtype)
        stack = matrices.reshape(self.num_layers, -1, self.num_inputs)
        arrays = (x.astype(dtype), stack.astype(dtype), group_sizes, np.int32(self.layer))
        return Arguments(*map(jax.device_put, arrays))

    def expected(self) -> NDArray[np.float32]:
        """Multiply one group after the other in float32; rows after the last group are zeros."""
        x, matrices = self._random_inputs()
        y = np.zeros((len(x), self.num_outputs), np.float32)
        ends, first = np.cumsum(self.group_sizes), self.layer * len(self.group_sizes)
        for matrix, size, end in zip(matrices[first:], self.group_sizes, ends, strict=False):
            y[end - size : end] = x[end - size : end] @ matrix.T
        return y

    def _random_inputs(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return random x and matrices, rounded to values that are exact in `dtype`."""
        rng, dtype = np.random.default_rng(0), jnp.dtype(self.dtype)
        num_matrices = self.num_layers * len(self.group_sizes)
        shapes = (self.num_rows, self.num_inputs), (num_matrices, self.num_outputs, self.num_inputs)
        x, matrices = (rng.normal(size=shape).astype(dtype).astype(np.float32) for shape in shapes)
        return x, matrices


_RAGGED = (7, 9, 0, 1, 15, 40, 0, 3)

CASES: tuple[Case, ...] = (
    Case("one_token", (0, 1, 0)),
    Case("one_group_has_all", (0, 37, 0)),
    Case("all_groups_are_empty", (0, 0, 0), num_rest=5),
    Case("empty_groups_at_both_ends", (0, 0, 5, 0, 0, 20, 7, 0), num_rest=3),
    Case("boundaries_inside_tiles", _RAGGED, num_rest=6, num_inputs=256),
    Case("boundaries_at_tiles", (16, 32, 0, 48, 16)),
    Case("several_boundaries_in_a_tile", (1, 2, 1, 0, 3, 1, 4, 1, 2, 20)),
    Case("rows_of_many_tiles", (100, 0, 150, 21), num_inputs=256, num_rest=70),
    Case("uneven_blocks_of_outputs", _RAGGED, num_outputs=320, num_inputs=256),
    Case("a_layer_among_others", _RAGGED, num_rest=2, num_layers=3, layer=1),
    Case("results_of_half_precision", _RAGGED, num_rest=6, result_dtype="bfloat16"),
    Case("many_inputs", _RAGGED, num_outputs=128, num_inputs=768),
)
BY_NAME = {case.name: case for case in CASES}

TPU_CASES = (*CASES, replace(BY_NAME["many_inputs"], name="float32", dtype="float32"))
GPU_CASES = (
    *CASES,
    replace(BY_NAME["boundaries_inside_tiles"], name="float16", dtype="float16"),
    Case("few_inputs", _RAGGED, num_outputs=192, num_inputs=96),
)
