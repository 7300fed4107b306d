"""Plain weights: float arrays in the activation dtype."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.layers.weight_formats.weight_format import Leaf, Row, WeightFormat
from jaxserve.weights import StoredTensor


class Plain(WeightFormat):
    """Tensors as the checkpoint has them, vectors included."""

    name = "plain"

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return the activation dtype: the kernels multiply floats in it."""
        return dtype

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return one leaf, the tensor."""
        return (Leaf(shape, dtype, row.axes),)

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Return the rows unchanged."""
        return (rows,)

    def weight(self, *leaves: Any) -> Any:
        """Return the array."""
        (array,) = leaves
        return array

    def convert(self, row: Row, tensor: StoredTensor) -> Array:
        """Put the tensor on its devices without a copy."""
        return tensor.place()


FORMAT = Plain()
