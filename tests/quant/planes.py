"""A weight format for tests: bfloat16 in two planes of bytes, exact for weights that are bfloat16 already."""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

from jaxserve.layers.linear import FloatMatrix, LinearContext, Matrix
from jaxserve.layers.weight_formats.weight_format import Leaf, Row, WeightFormat


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Planes(Matrix):
    high: Array
    low: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    def multiply(self, x: Array, context: LinearContext) -> Array:
        return FloatMatrix(joined(self.high, self.low).astype(x.dtype)).multiply(x, context)

    def rows(self, ids: Array) -> Array:
        return joined(*(plane.at[ids].get(mode="clip") for plane in (self.high, self.low)))


def joined(high: Array, low: Array) -> Array:
    return lax.bitcast_convert_type(high.astype(jnp.uint16) << 8 | low, jnp.bfloat16)


class PlanesFormat(WeightFormat):
    name = "planes"

    def at(self, row: Row) -> WeightFormat | None:
        return self if row.is_matrix and row.path[-1] != "o_proj" else None  # formats leave out what they want

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        return (Leaf(shape, np.dtype(np.uint8), row.axes),) * 2

    def encode(self, rows: np.ndarray, leaves: Any) -> tuple[np.ndarray, ...]:
        bits = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
        return (bits >> 8).astype(np.uint8), (bits & 255).astype(np.uint8)

    def weight(self, *leaves: Any) -> Planes:
        return Planes(*leaves)


FORMAT = PlanesFormat()
