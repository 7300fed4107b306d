"""Row norms of adapted matrices (DoRA, arXiv 2402.09353), computed when an adapter is written to its slot.

An adapter with magnitudes m multiplies the outputs of W + B A by m / norm(W + B A), row by row. The norms depend on the
weights that are served, also quantised ones, which are read in blocks of rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.adapters import Factors
from jaxserve.layers.linear import MeshAxes, Weight, as_matrix

_BLOCK_ROWS = 256


def scaled(factors: Factors, weight: Weight, axis: MeshAxes | None, *, is_table: bool) -> Factors:
    """Return one adapter's new factors with factors on outputs in place of magnitudes.

    Args:
        factors: the factors, whose `scale` has the magnitudes, NaN for rows without one.
        weight: the model's matrix.
        axis: mesh axes along which each device has some of the summed elements; None if it has all.
        is_table: True for an embedding, which is stored transposed, with a row per token.
    """
    assert factors.scale is not None, "the stacks have magnitudes"
    magnitudes = factors.scale[0]

    def computed() -> Float[Array, " out"]:
        squares = (_column_squares if is_table else _row_squares)(factors, weight)
        norms = jnp.sqrt(squares if axis is None else lax.psum(squares, axis))
        return jnp.where(jnp.isnan(magnitudes) | (norms == 0), 1, magnitudes / norms)

    # Weights are only read for adapters with magnitudes; all devices decide alike, as they sum over columns.
    is_any = jnp.any(~jnp.isnan(magnitudes))
    scale = lax.cond(is_any, computed, lambda: jnp.ones_like(magnitudes))
    return dataclasses.replace(factors, scale=scale[None])


def _row_squares(factors: Factors, weight: Weight) -> Float[Array, " out"]:
    """Return sums of squares for the adapted matrix [out, in], by row."""
    matrix, found, first = as_matrix(weight), [], 0
    for a, b in factors.unpacked():
        num_rows = len(b)
        size = min(_BLOCK_ROWS, num_rows)

        def add(index: Array, squares: Array, *, a: Any = a, b: Any = b, first: int = first, size: int = size) -> Array:
            start = jnp.minimum(index * size, len(b) - size)
            own = lax.dynamic_slice_in_dim(b, start, size)
            rows = matrix.block(first + start, size).astype(jnp.float32)
            rows += jnp.dot(own, a, precision=lax.Precision.HIGHEST)
            return lax.dynamic_update_slice_in_dim(squares, jnp.sum(rows * rows, axis=1), start, 0)

        found.append(lax.fori_loop(0, -(-num_rows // size), add, jnp.zeros(num_rows, jnp.float32)))
        first += num_rows
    return jnp.concatenate(found)


def _column_squares(factors: Factors, weight: Weight) -> Float[Array, " D"]:
    """Return sums of squares for an adapted embedding [V, D], by column: DoRA has a magnitude for each."""
    matrix, (a, b) = as_matrix(weight), factors.unpacked_table()
    num_tokens = matrix.shape[0]
    size = min(_BLOCK_ROWS, num_tokens)

    def add(index: Array, squares: Array) -> Array:
        start = jnp.minimum(index * size, num_tokens - size)
        own = lax.dynamic_slice_in_dim(a, start, size)
        rows = matrix.block(start, size).astype(jnp.float32) + jnp.dot(own, b.T, precision=lax.Precision.HIGHEST)
        is_new = start + jnp.arange(size) >= index * size  # the last block begins in the one before
        return squares + jnp.sum(jnp.where(is_new[:, None], rows * rows, 0), axis=0)

    return lax.fori_loop(0, -(-num_tokens // size), add, jnp.zeros(len(b), jnp.float32))
