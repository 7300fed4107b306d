"""Matrix products with weights stored [out, in], as Hugging Face has them: in float, quantised, or packed."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve import quant
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.norm import RmsNorm
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.packed_linear import PackedMatrix
from jaxserve.quant import QuantizedMatrix

Matrix = Float[Array, "out in"] | QuantizedMatrix | PackedMatrix


def linear(
    weight: Matrix,
    x: Float[Array, "T in"],
    bias: Float[Array, " out"] | None = None,
    *,
    before: RmsNorm | None = None,
    after: Callable[[Array], Array] | None = None,
    residual: Float[Array, "T outputs"] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    axis: str | None = None,
) -> Float[Array, "T outputs"]:
    """Return `after(before(x) @ weight.T + bias) + residual`, accumulated in float32, in `dtype` (default: that of x).

    Products of float32 are exact float32, not the TF32 or bfloat16 that accelerators use by default. Packed matrices go
    to the native kernels, which do all of this in one call. Gated matrices, and only they, must have `swiglu` after.
    Along the mesh axis `axis`, if one is given, each device has some columns of the matrix and of x: the products are
    summed over them before the bias.
    """
    dtype = dtype or x.dtype
    if axis is not None:
        y = lax.psum(linear(weight, x, before=before, dtype=dtype), axis)
        return _finish(y, bias, after, residual)
    if isinstance(weight, PackedMatrix):
        assert after is (swiglu if weight.gated else None), "a matrix is packed for what comes after its product"
        norm = None if before is None else (before.weight, before.eps)
        return packed_linear.multiply(weight, x, rms_norm=norm, bias=bias, residual=residual).astype(dtype)
    y = _multiply(weight, before(x) if before else x).astype(dtype)
    return _finish(y, bias, after, residual)


def embed(
    table: Matrix, token_ids: Int[Array, " T"], dtype: jax.typing.DTypeLike, *, axis: str | None = None
) -> Float[Array, "T D"]:
    """Return rows of the embedding in `dtype`; token ids are clipped to the range.

    Along the mesh axis `axis`, if one is given, each device has as many rows of the table, in order; ids beyond the
    last row get zeros.
    """
    if axis is not None:
        num_rows = table.shape[0]
        local_ids = token_ids - lax.axis_index(axis) * num_rows
        is_here = (local_ids >= 0) & (local_ids < num_rows)
        return lax.psum(jnp.where(is_here[:, None], embed(table, local_ids, dtype), 0), axis)
    if isinstance(table, QuantizedMatrix):
        return table.rows(token_ids).astype(dtype)
    if isinstance(table, PackedMatrix):
        return packed_linear.rows(table, token_ids).astype(dtype)
    return table.at[token_ids].get(mode="clip").astype(dtype)


def _finish(
    y: Float[Array, "T out"],
    bias: Float[Array, " out"] | None,
    after: Callable[[Array], Array] | None,
    residual: Float[Array, "T outputs"] | None,
) -> Float[Array, "T outputs"]:
    if bias is not None:
        y += bias[None, :].astype(y.dtype)
    y = after(y) if after else y
    return y if residual is None else residual + y


def _multiply(weight: Float[Array, "out in"] | QuantizedMatrix, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
    """Multiply; one token from the other side, as XLA:CPU reads a row-major matrix up to eight times faster as W·x."""
    if isinstance(weight, QuantizedMatrix):
        return quant.multiply(weight, x)
    precision = lax.Precision.HIGHEST if x.dtype == weight.dtype == jnp.float32 else None
    dot = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return dot(weight, x).T if x.shape[0] == 1 else dot(x, weight)
