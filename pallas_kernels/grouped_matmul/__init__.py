"""Grouped matmul: rows of x, sorted by group, times the transposed matrix of their group; a dense matmul is one group.

Contract, the same for all backends:

- The first `group_sizes[0]` rows of x belong to group 0, the next `group_sizes[1]` rows to group 1, and so on. Groups
  may be empty. Rows after the last group get zeros.
- Shapes do not depend on the group sizes, which are data. No row is dropped, however uneven the groups are.
- Sums are float32, whatever the dtypes. The result may be rounded to another dtype.
- Kernels read one layer's matrices in place in the stack of all layers: a slice would be a copy.

Matrices have one of four formats:

- `[G, N, K]`: one layer's floats;
- `[layers, G * N, K]`: all layers' floats;
- `PackedMatrix`, for the native kernels (`packed_linear.pack` with `num_matrices`), which apply SwiGLU if it is gated;
- `QuantizedStack`: all layers' int8, int4, fp8 or fp4 elements, for one group.

Each group of consecutive columns in a quantised matrix `[N, K]` has a scale per row, and perhaps a zero point or a
minimum: arrays `[groups, N]`. An element stands for `(q - zero) * scale` or `q * scale - minimum`. Kernels round scaled
elements to x's dtype, or multiply a group's float32 sum by its scale, which rounds nothing; a single scale per row
always multiplies the sum. XLA's matmul, which the caller provides, may round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.grouped_matmul import native, xla
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu import float_matmul as gpu_floats
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu import quantized_matmul as gpu_quantized
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu import float_matmul as tpu_floats
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu import quantized_matmul as tpu_quantized
from jaxserve.pallas_kernels.grouped_matmul.problem import Matrices, Problem, QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.op import AUTO, XLA, Op, scoped
from jaxserve.pallas_kernels.packed_linear import PackedMatrix
from jaxserve.pallas_kernels.target import target_platform

__all__ = [
    "GROUPED_MATMUL",
    "QUANTIZED_MATMUL",
    "Backend",
    "Matrices",
    "Problem",
    "QuantizedProblem",
    "QuantizedStack",
    "default_matmul_backend",
    "grouped_matmul",
    "using_matmul_backend",
]

_default_backend: ContextVar[str] = ContextVar("default_backend", default=AUTO)


@runtime_checkable
class Backend(Protocol):
    """Implementation of grouped matmuls for one or more matrix formats."""

    def unsupported_reason(self, problem: Any) -> str | None:
        """Return the reason why this backend cannot run a `Problem`, or None if it can."""

    def multiply(
        self,
        problem: Any,
        x: Float[Array, "M K"],
        matrices: Any,
        group_sizes: Any,
        layer: Int[Array, ""],
    ) -> Float[Array, "M out"]:
        """Multiply each row of x by its group's transposed matrix; rows after the last group may get any values.

        Args:
            problem: static parameters, a `Problem` or `QuantizedProblem`.
            x: rows, sorted by group.
            matrices: matrices for all layers: a float array `[layers, G * N, K]`, a `PackedMatrix`, or a
                `QuantizedStack`.
            group_sizes: rows per group, `[G]`; None for a `QuantizedStack`: all rows have the layer's one matrix.
            layer: layer whose matrices are used.

        Returns:
            Results in float32 or in the problem's result dtype.
        """


GROUPED_MATMUL: Op[Backend] = Op(
    "grouped_matmul",
    {"native": native, "mosaic_gpu": gpu_floats.KERNEL, "mosaic_tpu": tpu_floats.KERNEL, XLA: xla},
)
"""Matmuls with packed or float matrices."""

QUANTIZED_MATMUL: Op[Backend] = Op(
    "quantized_matmul", {"mosaic_gpu": gpu_quantized.KERNEL, "mosaic_tpu": tpu_quantized.KERNEL, XLA: xla}
)
"""Matmuls with quantised matrices."""


def using_matmul_backend(backend: str) -> AbstractContextManager[None]:
    """Run `grouped_matmul` calls with backend="auto" on this backend while they are traced inside the context.

    Args:
        backend: "xla", or "auto" to choose the best backend for each call.
    """
    return scoped(_default_backend, backend)


def default_matmul_backend() -> str:
    """Return the backend that the enclosing `using_matmul_backend` selects, "auto" by default."""
    return _default_backend.get()


def grouped_matmul(
    x: Float[Array, "M in"],
    matrices: Matrices,
    group_sizes: Int[Array, " groups"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
    num_shards: int = 1,
    row_factor: Float[Array, " out"] | None = None,
    xla_matmul: Callable[[], Float[Array, "M out"]] | None = None,
    input_format: str = "float32",
    backend: str = AUTO,
) -> Float[Array, "M out"]:
    """Compute `y[m] = matrix[g] @ x[m]` for each row m, with the matrix of the row's group g.

    Args:
        x: rows, sorted by group.
        matrices: each group's matrix `[out, in]`, in a format that the package describes.
        group_sizes: rows in each group, at most M together; later rows get zeros. None for quantised matrices, whose
            only group has all rows.
        layer: layer index if `matrices` is a stack of all layers; None if it has one layer.
        dtype: result dtype.
        num_shards: number of expert-parallel shards from which x gathers rows; see `Problem`.
        row_factor: factor for each matrix row (output) of a quantised matrix, applied to a kernel's result;
            `xla_matmul` must include it.
        xla_matmul: fallback that computes a quantised matmul if no kernel can; only the weight format knows its
            layouts.
        input_format: format to which packed matrices' kernels round x, one of `packed_linear.INPUT_FORMATS`.
        backend: "auto" or a backend name in `GROUPED_MATMUL` or `QUANTIZED_MATMUL`.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        UnsupportedBackendError: the requested backend cannot run this call.
    """
    result_dtype = jnp.dtype(dtype if row_factor is None else jnp.float32)
    problem = _bind(x, matrices, group_sizes, layer, result_dtype, num_shards, input_format)
    op = QUANTIZED_MATMUL if isinstance(problem, QuantizedProblem) else GROUPED_MATMUL
    requested = default_matmul_backend() if backend == AUTO else backend
    chosen = op.select(requested, lambda candidate: candidate.unsupported_reason(problem))
    if chosen == XLA and isinstance(problem, QuantizedProblem):
        assert xla_matmul is not None, "XLA multiplies quantised matrices only by `xla_matmul`"
        return xla_matmul().astype(dtype)
    if layer is None and not isinstance(matrices, PackedMatrix | QuantizedStack):
        matrices = matrices.reshape(1, -1, problem.num_inputs)
    index = jnp.asarray(0 if layer is None else layer, jnp.int32)
    y = op.backends[chosen].multiply(problem, x, matrices, group_sizes, index)
    y = (y if row_factor is None else y * row_factor[None]).astype(dtype)
    if group_sizes is None or chosen == "native":  # the native kernels write zeros after the last group
        return y
    is_in_group = jnp.arange(x.shape[0]) < group_sizes.sum()
    return jnp.where(is_in_group[:, None], y, 0)


def _bind(
    x: Float[Array, "M in"],
    matrices: Matrices,
    group_sizes: Int[Array, " groups"] | None,
    layer: int | Int[Array, ""] | None,
    result_dtype: jnp.dtype,
    num_shards: int,
    input_format: str,
) -> Problem:
    """Check the shapes and dtypes of `grouped_matmul`'s arguments, and return its static parameters.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if isinstance(matrices, QuantizedStack):
        (num_matrices, N, K), stored = (1, *matrices.shape), matrices.elements
    elif isinstance(matrices, PackedMatrix):
        num_matrices, N, K, stored = matrices.num_matrices, matrices.num_outputs, matrices.num_inputs, matrices.weights
    elif layer is None:
        (num_matrices, N, K), stored = matrices.shape, matrices
    else:
        (_, rows, K), num_matrices, stored = matrices.shape, 0 if group_sizes is None else group_sizes.size, matrices
        if num_matrices == 0 or rows % num_matrices:
            raise ValueError(f"matrices must be [layers, G * N, K] for {num_matrices} groups, got {matrices.shape}")
        N = rows // num_matrices
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x must be [M, {K}], as the matrices have {K} columns, got {x.shape}")
    sizes = {"num_rows": x.shape[0], "num_groups": num_matrices, "num_outputs": N, "num_inputs": K}
    dtypes = {"dtype": x.dtype, "matrix_dtype": stored.dtype, "result_dtype": result_dtype}
    common: dict[str, Any] = {**sizes, **dtypes, "platform": target_platform()}
    if isinstance(matrices, QuantizedStack):
        assert group_sizes is None, "quantised matrices have one group of rows"
        if matrices.scale.shape[2] != N:
            raise ValueError(f"scales must be [layers, groups, {N}], got {matrices.scale.shape}")
        return QuantizedProblem(
            **common,
            elements=matrices.kind,
            num_scale_groups=matrices.scale.shape[1],
            has_zero=matrices.zero is not None,
            has_minimum=matrices.minimum is not None,
            scale_dtype=matrices.scale.dtype,
        )
    if group_sizes is None or group_sizes.shape != (num_matrices,) or group_sizes.dtype != jnp.int32:
        found = "None" if group_sizes is None else f"{group_sizes.dtype} of shape {group_sizes.shape}"
        raise ValueError(f"group_sizes must be int32 of shape ({num_matrices},), one for each matrix, got {found}")
    is_packed = isinstance(matrices, PackedMatrix)
    return Problem(**common, is_packed=is_packed, num_shards=num_shards, input_format=input_format)
