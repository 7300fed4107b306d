"""Token exchange along a mesh axis, for devices with different tokens (data-parallel attention).

Each device has the same number of tokens, padding included; gathered tokens are in device order.
"""

from jax import lax
from jaxtyping import Array, Shaped


def all_tokens(x: Shaped[Array, "T *sizes"], axis: str | None) -> Shaped[Array, "all *sizes"]:
    """Gather all devices' tokens along an axis; return x without an axis."""
    return x if axis is None else lax.all_gather(x, axis, axis=0, tiled=True)


def local_tokens(x: Shaped[Array, "all *sizes"], axis: str | None) -> Shaped[Array, "T *sizes"]:
    """Return this device's slice of all devices' tokens."""
    if axis is None:
        return x
    num_tokens = x.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * num_tokens, num_tokens)


def sum_local_tokens(y: Shaped[Array, "all D"], axis: str | None) -> Shaped[Array, "T D"]:
    """Sum the outputs that each device has computed for all tokens; return the sums for this device's tokens."""
    return y if axis is None else lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True)
