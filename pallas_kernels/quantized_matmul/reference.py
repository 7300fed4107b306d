"""Reference of the product: float32 in NumPy. Only tests import it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def multiply(
    x: Floats, elements: Floats, scale: Floats, zero: Floats | None, minimum: Floats | None, rounded: np.dtype
) -> Floats:
    """Return the product of x with the transposed matrix.

    Args:
        x: rows [T, K].
        elements: values of the elements [N, K], before zero points are subtracted.
        scale: scales [groups, N].
        zero: zero points [groups, N].
        minimum: minima [groups, N].
        rounded: dtype to which scaled elements of groups are rounded.
    """
    size = elements.shape[1] // len(scale)
    q = elements if zero is None else elements - np.repeat(zero.T, size, axis=1)
    if len(scale) == 1:
        return (x @ q.T) * scale
    matrix = q * np.repeat(scale.T, size, axis=1)
    if minimum is not None:
        matrix = matrix - np.repeat(minimum.T, size, axis=1)
    return x @ matrix.astype(rounded).astype(np.float32).T
