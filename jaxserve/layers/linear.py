"""Matrix products with weights stored [out, in], as Hugging Face has them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def linear(
    weight: Float[Array, "out in"],
    x: Float[Array, "T in"],
    bias: Float[Array, " out"] | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "T out"]:
    """`x @ weight.T + bias`, accumulated in float32, in `dtype` (default: that of x).

    One token is multiplied from the other side: XLA:CPU reads a row-major matrix up to eight times faster as W·x.
    """
    dtype = dtype or x.dtype
    if x.shape[0] == 1:
        y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).T
    else:
        y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    y = y.astype(dtype)
    return y if bias is None else y + bias[None, :].astype(dtype)
