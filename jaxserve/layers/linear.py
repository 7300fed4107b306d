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
from jaxserve.quant import QuantizedMatrix
from pallas_kernels import packed_linear
from pallas_kernels.packed_linear import PackedMatrix

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
) -> Float[Array, "T outputs"]:
    """`after(before(x) @ weight.T + bias) + residual`, accumulated in float32, in `dtype` (default: that of x).

    Products of float32 are exact float32, not the TF32 or bfloat16 that accelerators take by default.
    Packed matrices go to the native kernels, all of this in one call. Those that are gated, and they alone, must have
    `swiglu` after.
    """
    dtype = dtype or x.dtype
    if isinstance(weight, PackedMatrix):
        assert after is (swiglu if weight.gated else None), "a matrix is packed for what comes after its product"
        norm = None if before is None else (before.weight, before.eps)
        return packed_linear.multiply(weight, x, rms_norm=norm, bias=bias, residual=residual).astype(dtype)
    y = _multiply(weight, before(x) if before else x).astype(dtype)
    if bias is not None:
        y += bias[None, :].astype(dtype)
    y = after(y) if after else y
    return y if residual is None else residual + y


def embed(table: Matrix, token_ids: Int[Array, " T"], dtype: jax.typing.DTypeLike) -> Float[Array, "T D"]:
    """Rows of the embedding, clipped to those there are, in `dtype`."""
    if isinstance(table, QuantizedMatrix):
        return table.rows(token_ids).astype(dtype)
    if isinstance(table, PackedMatrix):
        return packed_linear.rows(table, token_ids).astype(dtype)
    return table.at[token_ids].get(mode="clip").astype(dtype)


def _multiply(weight: Float[Array, "out in"] | QuantizedMatrix, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
    """One token is multiplied from the other side: XLA:CPU reads a row-major matrix up to eight times faster as W·x."""
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
