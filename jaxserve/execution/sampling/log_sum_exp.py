"""Log-sum-exp by row, which normalises probabilities."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.pallas_kernels.target import target_platform

_BLOCK = 512  # columns added at once, a power of two


def log_sum_exp(x: Float32[Array, "R N"]) -> Float32[Array, " R"]:
    """Return `log(sum(exp(x)))` by row.

    XLA's own order depends on the program and the row count. On CPUs, whose native matmuls have one order, this sum has
    one too, so that a row's bits are the same in all programs.
    """
    return _in_order(x) if target_platform() == "cpu" else jax.nn.logsumexp(x, axis=1)


def _in_order(x: Float32[Array, "R N"]) -> Float32[Array, " R"]:
    """Add column blocks one after the other, then halves: all additions are explicit."""
    num_rows, num_columns = x.shape
    width = min(_BLOCK, 1 << (num_columns - 1).bit_length())
    if num_columns < width:
        x, num_columns = jnp.pad(x, ((0, 0), (0, width - num_columns)), constant_values=-jnp.inf), width
    largest = jnp.max(x, axis=1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)

    def add(index: Int32[Array, ""], sums: Float32[Array, "R width"]) -> Float32[Array, "R width"]:
        first = index * width
        start = jnp.minimum(first, num_columns - width)  # the last block may repeat columns
        block = jnp.exp(lax.dynamic_slice_in_dim(x, start, width, axis=1) - largest)
        return sums + jnp.where(start + jnp.arange(width) >= first, block, 0)

    sums = lax.fori_loop(0, -(-num_columns // width), add, jnp.zeros((num_rows, width), jnp.float32))
    while (width := width // 2) > 0:
        sums = sums[:, :width] + sums[:, width:]
    return jnp.log(sums[:, 0]) + largest[:, 0]
