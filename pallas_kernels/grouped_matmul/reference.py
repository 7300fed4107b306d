"""Reference of the grouped product: float32 in NumPy, one group after the other. Only tests import it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def multiply(x: Floats, matrices: Floats, group_sizes: NDArray[np.int32], first: int = 0) -> Floats:
    """Return the product of each row with the transposed matrix of its group, and zeros behind the last group."""
    y = np.zeros((len(x), matrices.shape[1]), np.float32)
    ends = np.cumsum(group_sizes)
    for matrix, size, end in zip(matrices[first:], group_sizes, ends, strict=False):
        y[end - size : end] = x[end - size : end] @ matrix.T
    return y
