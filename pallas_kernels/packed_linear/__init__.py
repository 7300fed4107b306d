"""Linear layers with matrices packed for the native CPU kernels, with 32-, 16-, 8- or 4-bit weights.

A token's result is bit-identical whatever other tokens there are. Inputs may be rounded to bfloat16, or to 8 bits
with a scale for each group in a token: see `INPUT_FORMATS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.packed_linear.matrix import (
    PANEL_ROWS,
    WEIGHT_DTYPES,
    PackedMatrix,
    Packer,
    abstract,
    pack,
    rows,
    unpack,
    unsupported,
)

__all__ = [
    "INPUT_FORMATS",
    "MAX_INT8_COLUMNS",
    "PANEL_ROWS",
    "LowRankTerms",
    "PackedMatrix",
    "Packer",
    "abstract",
    "multiply",
    "multiply_groups",
    "multiply_low_rank",
    "pack",
    "rows",
    "ungated",
    "unpack",
    "unsupported",
]

_FORMATS = {name: index for index, name in enumerate(WEIGHT_DTYPES)} | {"uint4": WEIGHT_DTYPES.index("int4")}
INPUT_FORMATS = ("float32", "int8", "float8_e4m3fn", "bfloat16")
"""Formats to which the kernels can round inputs: int8 for words, e4m3 and bfloat16 for such weights.

In 8 bits, a group's scale is its largest magnitude, divided by 127.5 or 448. Quotients by it are rounded half to even.
"""
MAX_INT8_COLUMNS = 1 << 16  # columns in a group with int8 inputs


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankTerms:
    """Low-rank terms that some tokens add to a matmul, before bias and activation; the others' outputs keep all bits.

    A token with matrices i has `(x @ W.T + x @ a[i].T @ b[i].T + shift[i]) * factor[i]` in place of `x @ W.T`. Outputs
    have parts, each with its own rows in `a`.

    Attributes:
      slots: 0 for tokens without terms, else 1 + i. In a grouped matmul each slot has a matrix per group, one
        after the other.
      a: packed matrices `[parts * rank, K]`.
      b: packed matrices `[N, rank]`, in panels with the same rows as the panels of W: gated if W is.
      part_sizes: outputs by part.
      shift: terms that do not depend on x; None for none. Only without groups.
      factor: factors on the sums, likewise.
      x: inputs of `a`, if W has other ones because their columns are in another order or quantised; None for W's.
    """

    slots: Int[Array, " T"]
    a: Shaped[Array, "panels K 1 rows"]
    b: Shaped[Array, "panels rank parts rows"]
    part_sizes: tuple[int, ...] = field(metadata={"static": True})
    shift: Float[Array, "S N"] | None = None
    factor: Float[Array, "S N"] | None = None
    x: Float[Array, "T K"] | None = None

    def operands(self) -> tuple[Array, ...]:
        """Return the native calls' last operands."""
        ends = jnp.asarray(np.cumsum(self.part_sizes), jnp.int32)
        optional = (jnp.zeros(0) if each is None else each.reshape(-1) for each in (self.shift, self.factor, self.x))
        return self.slots, self.a, self.b, ends, *(each.astype(jnp.float32) for each in optional)


def multiply(
    matrix: PackedMatrix,
    x: Float[Array, "T K"],
    *,
    rms_norm: tuple[Float[Array, " K"], float] | None = None,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "T out"] | None = None,
    num_live: Int[Array, ""] | None = None,
    input_format: str = "float32",
    terms: LowRankTerms | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T out"]:
    """Return `x @ matrix.T + bias`, then SwiGLU if it is gated, then `+ residual`, in one native call.

    All is computed in float32 and rounded once.

    Args:
      matrix: packed matrix `[N, K]`.
      x: inputs.
      rms_norm: weight and epsilon: x is replaced by x / sqrt(mean(x^2) + epsilon) * weight.
      bias: bias before SwiGLU; none by default.
      residual: residual that is added last; none by default.
      num_live: number of tokens to compute, at the beginning; results of the others are zero. By default all.
      input_format: format to which x is rounded after the norm, one of `INPUT_FORMATS`.
      terms: low-rank terms of some tokens, for x after the norm, before it is rounded.
      dtype: result dtype.

    Raises:
      ValueError: shapes do not fit.
      RuntimeError: the native kernels are missing; see `unsupported`.
    """
    if (reason := native.unavailable()) is not None:
        raise RuntimeError(reason)
    assert matrix.num_matrices == 1, "several matrices are for grouped_matmul"
    norm, eps = rms_norm or (None, 0.0)
    N, K = matrix.shape
    out = (x.shape[0], matrix.num_outputs)
    if x.shape[1] != K:
        raise ValueError(f"x {x.shape} does not fit a matrix {matrix.shape}")
    call = jax.ffi.ffi_call(native.LINEAR, jax.ShapeDtypeStruct(out, native.activation_dtype(dtype)))
    y: Array = call(
        x.astype(native.activation_dtype(x.dtype)),
        matrix.weights,
        matrix.scales,
        matrix.zeros.reshape(-1),
        _operand("norm", norm, (K,)),
        _operand("bias", bias, (N,)),
        _operand(
            "residual", residual, out, jnp.float32 if residual is None else native.activation_dtype(residual.dtype)
        ),
        jnp.zeros(0, jnp.int32) if num_live is None else num_live[None],
        *(() if terms is None else terms.operands()),
        eps=np.float32(eps),
        **_formats(matrix, input_format),
    )
    return y.astype(dtype)


def multiply_groups(
    matrix: PackedMatrix,
    x: Float[Array, "M K"],
    group_sizes: Int[Array, " G"],
    *,
    input_format: str = "float32",
    terms: LowRankTerms | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "M out"]:
    """Multiply each row of x by its group's matrix in one native call; apply SwiGLU if matrices are gated.

    Args:
      matrix: packed matrix for each group.
      x: rows, sorted by group.
      group_sizes: rows per group; rows after the last group get zeros.
      input_format: format to which x is rounded, one of `INPUT_FORMATS`.
      terms: low-rank terms of some rows.
      dtype: result dtype.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], matrix.num_outputs), native.activation_dtype(dtype))
    y: Array = jax.ffi.ffi_call(native.GROUPED_LINEAR, out)(
        x.astype(native.activation_dtype(x.dtype)),
        matrix.weights,
        matrix.scales,
        matrix.zeros.reshape(-1),
        group_sizes,
        *(() if terms is None else terms.operands()),
        **_formats(matrix, input_format),
    )
    return y.astype(dtype)


def multiply_low_rank(terms: LowRankTerms, x: Float[Array, "T K"], num_matrices: int) -> Float[Array, "T N"]:
    """Return only the terms, in float32; zeros for tokens without terms.

    Args:
      terms: the terms.
      x: their inputs.
      num_matrices: matrices in `terms.b`.
    """
    num_panels = len(terms.b) // num_matrices
    columns = jnp.zeros((num_panels, 0, 1, PANEL_ROWS), jnp.float32)
    nothing = PackedMatrix(columns, columns, columns, num_panels * PANEL_ROWS, 0)
    y = multiply(nothing, x[:, :0], terms=replace(terms, x=x))
    return ungated(y, sum(terms.part_sizes)) if terms.b.shape[2] == 2 else y[:, : sum(terms.part_sizes)]


def ungated(y: Float[Array, "T panels"], num_rows: int) -> Float[Array, "T N"]:
    """Reorder a gated matrix's outputs, 8 rows of the gate and 8 that it gates in turn, to `num_rows` in row order."""
    parts = jnp.swapaxes(y.reshape(len(y), -1, 2, PANEL_ROWS // 2), 1, 2).reshape(len(y), 2, -1)
    return parts[:, :, : num_rows // 2].reshape(len(y), -1)


def _formats(matrix: PackedMatrix, input_format: str) -> dict[str, np.int64]:
    """Return the attributes of native calls that describe a matrix and its inputs."""
    indices = _FORMATS[matrix.dtype], INPUT_FORMATS.index(input_format)
    return dict(zip(("weight_format", "input_format"), map(np.int64, indices), strict=True))


def _operand(
    name: str, array: Float[Array, "..."] | None, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Return an optional operand for the native call in a dtype: an empty array for None.

    Raises:
      ValueError: the array does not have this shape; the message has `name`.
    """
    if array is None:
        return jnp.zeros(0, dtype)
    if array.shape != shape:
        raise ValueError(f"a {name} must be {shape}, got {array.shape}")
    return array.astype(dtype)
