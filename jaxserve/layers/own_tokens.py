"""Exchange of tokens between devices along a mesh axis on which each has tokens of its own.

The tokens of all devices lie one device's after the other's, equally many of each, padding included.
"""

from jax import lax
from jaxtyping import Array, Shaped


def all_tokens(x: Shaped[Array, "T *sizes"], axis: str | None) -> Shaped[Array, "all *sizes"]:
    """Return the tokens of all devices along an axis; x where there is none."""
    return x if axis is None else lax.all_gather(x, axis, axis=0, tiled=True)


def own_tokens(x: Shaped[Array, "all *sizes"], axis: str | None) -> Shaped[Array, "T *sizes"]:
    """Return a device's own tokens of those of all."""
    if axis is None:
        return x
    num_tokens = x.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * num_tokens, num_tokens)


def sum_of_own_tokens(y: Shaped[Array, "all D"], axis: str | None) -> Shaped[Array, "T D"]:
    """Return the sum over the devices of what each has computed for the tokens of all, for a device's own tokens."""
    return y if axis is None else lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True)
