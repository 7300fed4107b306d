"""Matrices in float8 (e4m3) with a float32 scale per row, max|w| / 448; activations are rounded too, token by token.

Layer matrices are as `jaxserve quantize --scheme fp8` writes them; embedding and head are quantised too. Memory is a
quarter of float32's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.layers.weight_formats.activations import E4M3_MAX
from jaxserve.layers.weight_formats.stored import SchemeFormat
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.layers.weight_formats.weight_format import Leaf, Row, slab_rows
from jaxserve.weights import Activation, Scheme, StoredTensor, host_buffer

_SCHEME = Scheme(
    "fp8",
    "e4m3",
    "plain",
    (("elements", "weight"), ("scale", "weight_scale")),
    activation=Activation("e4m3", None, dynamic=True),
)


class Float8Rows(SchemeFormat):
    """`StoredMatrix` with e4m3 elements for every matrix; devices with different columns have the same scales."""

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Return the elements and scales of whole rows."""
        scale = scales(rows)
        return rounded(rows, scale), scale[:, None]

    def convert(self, row: Row, tensor: StoredTensor) -> StoredMatrix:
        """Read whole rows for their scales, then a device's columns for its elements."""
        elements, grid = self.leaves(row, tensor.shape, tensor.dtype)
        buffer, scale = host_buffer(elements.shape, elements.dtype), host_buffer(grid.shape, grid.dtype)

        def add(start: int, rows: NDArray[Any], scales: NDArray[np.float32]) -> None:
            """Write elements and scales to the buffers, from row `start` on."""
            some = slice(start, start + len(rows))
            buffer[some], scale[:, some] = rows, scales.T

        self.each_slab(row, tensor, (elements, grid), add)
        return self.weight(*(jax.device_put(array, tensor.sharding) for array in (buffer, scale)))

    def each_slab(self, row: Row, tensor: StoredTensor, leaves: Sequence[Leaf], use: Callable[..., None]) -> None:
        """Read whole rows for their scales, then a device's columns for its elements; see `WeightFormat.each_slab`."""
        scale, whole = np.empty((tensor.shape[0], 1), np.float32), tensor.whole_rows()

        def add_scales(start: int, rows: NDArray[Any]) -> None:
            """Compute the scales for rows from `start` on."""
            scale[start : start + len(rows), 0] = scales(rows)

        def use_elements(start: int, rows: NDArray[Any]) -> None:
            """Round rows from `start` on."""
            own = scale[start : start + len(rows)]
            use(start, rounded(rows, own[:, 0]), own)

        whole.each_slab(slab_rows(whole.shape[1]), add_scales)
        tensor.each_slab(slab_rows(tensor.shape[1]), use_elements)


FORMAT = Float8Rows(_SCHEME)


def scales(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Return a scale per row, max|w| / 448."""
    return np.abs(rows.astype(np.float32, copy=False)).max(axis=1) / np.float32(E4M3_MAX)


@np.errstate(invalid="ignore")  # rows with weights that are not finite have no finite scale either
def rounded(rows: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[Any]:
    """Round rows, or some columns in them, to the nearest elements, half to even; zeros stay zero."""
    multiples = rows.astype(np.float32, copy=False) / np.where(scale == 0, 1, scale)[:, None]
    return np.clip(multiples, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
