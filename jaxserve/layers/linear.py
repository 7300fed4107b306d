"""Matrix products with weights stored [out, in], as Hugging Face has them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import packed_linear
from pallas_kernels.packed_linear import PackedMatrix


def linear(
    weight: Float[Array, "out in"] | PackedMatrix,
    x: Float[Array, "T in"],
    bias: Float[Array, " out"] | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "T out"]:
    """`x @ weight.T + bias`, accumulated in float32, in `dtype` (default: that of x).

    Products of float32 are exact float32, not the TF32 or bfloat16 that accelerators take by default.
    One token is multiplied from the other side: XLA:CPU reads a row-major matrix up to eight times faster as W·x.
    Packed matrices go to the native kernels.
    """
    dtype = dtype or x.dtype
    y = _multiply(weight, x).astype(dtype)
    return y if bias is None else y + bias[None, :].astype(dtype)


def embed(weight: Float[Array, "V D"] | PackedMatrix, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of the embedding, clipped to those there are."""
    if isinstance(weight, PackedMatrix):
        return packed_linear.rows(weight, token_ids)
    return weight.at[token_ids].get(mode="clip")


def _multiply(weight: Float[Array, "out in"] | PackedMatrix, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
    if isinstance(weight, PackedMatrix):
        return packed_linear.multiply(weight, x)
    precision = lax.Precision.HIGHEST if x.dtype == weight.dtype == jnp.float32 else None
    dot = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return dot(weight, x).T if x.shape[0] == 1 else dot(x, weight)
