"""Weight-only int4 by blocks: B consecutive weights in a matrix row share one float32 scale, max|w| / 7.

Elements have 15 values. With B = 64 a matrix takes 0.141 times its float32 bytes.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int8
from numpy.typing import NDArray

from jaxserve.layers.weight_formats.int8 import PAIRS, IntegerBlocks, num_blocks, quantize
from jaxserve.layers.weight_formats.weight_format import Leaf, Row
from jaxserve.pallas_kernels.elements import INT4_ZERO, packed

_INT4_MAX = 7  # symmetric: -8 is not used


class Int4Blocks(IntegerBlocks):
    """Weight format that stores every matrix in int4 blocks."""

    name = "int4"

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return int4, with a scale per block."""
        return jnp.int4

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return the shapes of `q` and `scale`, with two elements per byte if the block size is even.

        Blocks are as long as in the whole matrix, but shorter in a shard that would cut a block in two.
        """
        num_rows, in_size = shape
        blocks = num_blocks(row, in_size)
        is_paired = in_size // blocks % 2 == 0
        elements = Leaf((num_rows, in_size // 2), PAIRS, row.axes)
        if not is_paired:
            elements = Leaf((num_rows, in_size), np.dtype(np.int8), row.axes)
        return elements, Leaf.grid(num_rows, blocks, np.dtype(np.float32), row.axes)

    def elements(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Quantise rows with one block per scale; return the elements, one per byte, and the scales."""
        return quantize(rows, rows.shape[1] // leaves[1].shape[0], _INT4_MAX)

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Quantise rows; return the elements, two per byte if `leaves` has them so, and the scales."""
        q, scale = self.elements(rows, leaves)
        return (paired(q) if leaves[0].dtype == PAIRS else q), scale


FORMAT = Int4Blocks()


def paired(q: Int8[np.ndarray, "out in"]) -> NDArray[np.uint8]:
    """Pack int4 elements two per byte, `[out, in / 2]`, each as an unsigned number: the element plus INT4_ZERO.

    The low bits hold a row's first half, the high bits its second half.
    """
    return packed((q + np.int8(INT4_ZERO)).view(np.uint8))
