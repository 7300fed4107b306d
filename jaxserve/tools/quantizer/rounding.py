"""Choice of codes and scales for a matrix: nearest values, scales by output error, and GPTQ."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Shaped

from jaxserve.tools.quantizer.grid import Grid

Codes = Shaped[Array, "out in"]
Scales = Float[Array, "row_regions column_regions"]

_DAMPING = 0.01  # fraction of the mean diagonal that is added to a Hessian, as in the paper
_BLOCK = 128  # columns whose errors are spread over the later ones by one matmul
_RATIOS = tuple(1.1 - 0.025 * step for step in range(27))  # tried scales, relative to `Grid.scales`


def output_error(difference: Float[Array, "out in"], gram: Float[Array, "in in"]) -> Float[Array, ""]:
    """Return the squared change of a matrix's outputs for a change of its weights, over the inputs of a Gram matrix."""
    return jnp.sum(jnp.matmul(difference, gram, precision=lax.Precision.HIGHEST) * difference)


@partial(jax.jit, static_argnames="grid")
def round_to_nearest(weight: Float[Array, "out in"], grid: Grid) -> tuple[Codes, Scales]:
    """Return a matrix's nearest codes on the grid and its scales, by which the largest weight has the largest code."""
    scale = grid.scales(weight)
    return grid.encode(weight, scale), scale


@partial(jax.jit, static_argnames="grid")
def search_scales(weight: Float[Array, "out in"], gram: Float[Array, "in in"], grid: Grid) -> Scales:
    """Return the scales whose nearest codes change each region's outputs least.

    A smaller scale clips the largest weights and rounds the others finer (AWQ's clipping).
    Regions have one row.
    """
    largest = grid.scales(weight)
    out, num_groups = largest.shape
    size = grid.columns or weight.shape[1]
    groups = jnp.arange(num_groups)
    blocks = gram.reshape(num_groups, size, num_groups, size)[groups, :, groups]  # [groups, size, size]

    def try_ratio(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        """Return the least errors and their scales so far, with the scales `largest * ratio` tried, too."""
        scale = grid.stored(largest * ratio)
        difference = (weight - grid.rounded(weight, scale)).reshape(out, num_groups, size)
        spread = jnp.einsum("ogi,gij->ogj", difference, blocks, precision=lax.Precision.HIGHEST)
        error = jnp.sum(spread * difference, axis=-1)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    start = (jnp.full_like(largest, jnp.inf), largest)
    (_, scale), _ = lax.scan(try_ratio, start, jnp.asarray(_RATIOS, weight.dtype))
    return scale


@partial(jax.jit, static_argnames="grid")
def gptq(weight: Float[Array, "out in"], gram: Float[Array, "in in"], scale: Scales, grid: Grid) -> Codes:
    """Return a matrix's codes, rounded column by column so that later ones compensate errors (GPTQ, Frantar 2022).

    Columns with the largest inputs come first ("act-order"). The scales are given, so that the file does not depend on
    this order ("static groups").

    Args:
        weight: matrix; its dtype is the compute dtype.
        gram: Gram matrix of its inputs, which is the Hessian up to a factor.
        scale: scales for regions with one row.
        grid: grid of the codes.
    """
    diagonal = jnp.diagonal(gram)
    order = jnp.argsort(-diagonal)
    ridge = jnp.where(diagonal == 0, 1, _DAMPING * jnp.mean(diagonal))  # inputs that are always zero have no effect
    hessian = (gram + jnp.diag(ridge))[order][:, order]
    scales = grid.spread(scale, weight.shape).T[order]
    w = weight.T[order]  # [in, out]: a step reads and writes rows
    num_columns, out = w.shape
    padding = -num_columns % _BLOCK
    columns = jnp.arange(num_columns + padding)
    factor = jnp.pad(_inverse_factor(hessian), (0, padding))
    factor += jnp.diag(jnp.where(columns < num_columns, 0, 1).astype(w.dtype))
    w, scales = (jnp.pad(x, ((0, padding), (0, 0)), constant_values=1) for x in (w, scales))

    def round_block(block: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Round a block of columns; return the weights, compensated in later columns, and all codes so far."""
        w, codes = carry
        start = block * _BLOCK
        rows = lax.dynamic_slice_in_dim(factor, start, _BLOCK)
        within = lax.dynamic_slice_in_dim(rows, start, _BLOCK, axis=1)
        block_scales = lax.dynamic_slice_in_dim(scales, start, _BLOCK)

        def round_column(column: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """Round a column; return the block's weights, compensated in later columns, its errors and its codes."""
            w, errors, codes = carry
            code = grid.nearest(w[column] / block_scales[column])
            error = (w[column] - code.astype(w.dtype) * block_scales[column]) / within[column, column]
            w -= within[column][:, None] * error[None, :]  # earlier columns: the factor is upper triangular
            return w, errors.at[column].set(error), codes.at[column].set(code)

        here = lax.dynamic_slice_in_dim(w, start, _BLOCK)
        empty = jnp.zeros((_BLOCK, out), codes.dtype)
        _, errors, block_codes = lax.fori_loop(0, _BLOCK, round_column, (here, jnp.zeros_like(here), empty))
        later = jnp.where(columns[None, :] < start + _BLOCK, 0, rows)
        w -= jnp.matmul(later.T, errors, precision=lax.Precision.HIGHEST)
        return w, lax.dynamic_update_slice_in_dim(codes, block_codes, start, axis=0)

    codes = jnp.zeros(w.shape, grid.code_dtype)
    _, codes = lax.fori_loop(0, len(w) // _BLOCK, round_block, (w, codes))
    return jnp.zeros_like(codes[:num_columns]).at[order].set(codes[:num_columns]).T


def _inverse_factor(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the upper triangular R with R.T @ R = inv(matrix), without computing the inverse.

    If J reverses the order, J @ matrix @ J = L @ L.T, and the upper triangular J @ L @ J is R's inverse.
    """
    lower = jnp.linalg.cholesky(matrix[::-1, ::-1])
    return solve_triangular(lower[::-1, ::-1], jnp.eye(len(matrix), dtype=matrix.dtype), lower=False)
