"""Grid: the values that quantised weights can have, and the matrix regions that share a scale."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

FLOAT8 = jnp.float8_e4m3fn
_FLOAT8_MAX = 448.0


@dataclass(frozen=True)
class Grid:
    """Values that a quantised weight can have: a code times its matrix region's scale; hashable.

    Attributes:
        bits: bits per code.
        is_float: True for float8_e4m3fn codes, False for integers.
        rows: rows per region.
        columns: columns per region; None for a whole row.
        scale_dtype: dtype in which scales are stored; codes are chosen for the rounded scales.
    """

    bits: int
    is_float: bool
    rows: int
    columns: int | None
    scale_dtype: np.dtype

    @property
    def code_dtype(self) -> np.dtype:
        """dtype of an array of codes."""
        return np.dtype(FLOAT8 if self.is_float else np.int8)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales for a matrix of `shape` [out, in]; regions at the edges may be smaller."""
        return -(-shape[0] // self.rows), -(-shape[1] // (self.columns or shape[1]))

    def scales(self, weight: Float[Array, "out in"]) -> Float[Array, "row_regions column_regions"]:
        """Return the scales that map each region's largest magnitude to the end of the grid.

        An integer grid ends halfway between its largest positive and negative codes, as in compressed-tensors.
        """
        (num_rows, num_columns), (R, C) = weight.shape, self.scale_shape(weight.shape)
        columns = self.columns or num_columns
        padding = ((0, R * self.rows - num_rows), (0, C * columns - num_columns))
        regions = jnp.pad(jnp.abs(weight), padding).reshape(R, self.rows, C, columns)
        largest = jnp.max(regions, axis=(1, 3))
        return self.stored(largest / (_FLOAT8_MAX if self.is_float else 2 ** (self.bits - 1) - 0.5))

    def stored(self, scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return scales as a file stores them; 1 instead of 0."""
        rounded = scale.astype(self.scale_dtype).astype(scale.dtype)
        return jnp.where(rounded == 0, jnp.ones_like(rounded), rounded)

    def spread(self, scale: Float[Array, "row_regions column_regions"], shape: tuple[int, ...]) -> Any:
        """Repeat regions' scales, so that each weight of a matrix of `shape` has its own."""
        rows = jnp.repeat(scale, self.rows, axis=0)[: shape[0]]
        return jnp.repeat(rows, self.columns or shape[1], axis=1)[:, : shape[1]]

    def nearest(self, scaled: Float[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """Return the codes nearest to weights that are divided by their scales; ties go to even codes."""
        if self.is_float:  # values beyond the largest would become NaN
            return jnp.clip(scaled, -_FLOAT8_MAX, _FLOAT8_MAX).astype(FLOAT8)
        half = 2 ** (self.bits - 1)
        return jnp.clip(jnp.round(scaled), -half, half - 1).astype(jnp.int8)

    def encode(
        self, weight: Float[Array, "out in"], scale: Float[Array, "row_regions column_regions"]
    ) -> Shaped[Array, "out in"]:
        """Return the code whose value is nearest to each weight, given the regions' scales."""
        return self.nearest(weight / self.spread(scale, weight.shape))

    def decode(
        self, codes: Shaped[Array, "out in"], scale: Float[Array, "row_regions column_regions"]
    ) -> Float[Array, "out in"]:
        """Return the weights that codes and regions' scales stand for."""
        return codes.astype(scale.dtype) * self.spread(scale, codes.shape)

    def rounded(
        self, weight: Float[Array, "out in"], scale: Float[Array, "row_regions column_regions"]
    ) -> Float[Array, "out in"]:
        """Return the value on the grid that is nearest to each weight, given the regions' scales."""
        return self.decode(self.encode(weight, scale), scale)
