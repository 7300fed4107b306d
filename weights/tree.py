"""Checkpoint tensors made from a parameter tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError, Mismatch
from jaxserve.weights.rows import FLOATS, Params, Path, TensorRow, hf_row_counts, leaf_at
from jaxserve.weights.stored_tensor import Tensor, host_rows


@dataclass(frozen=True)
class _ParamRows:
    """One checkpoint tensor: rows `begin` to `end` of a parameter, transposed if the checkpoint stores [in, out].

    `num_matrices` is None unless the tensor is a stack of matrices.
    """

    array: Any
    begin: int
    end: int
    transposed: bool
    num_matrices: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = ((self.end - self.begin) // (self.num_matrices or 1), *self.array.shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.num_matrices is None else (self.num_matrices, *shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        rows = np.asarray(host_rows(self.array, slice(self.begin, self.end)), dtype)
        if self.num_matrices is not None:
            rows = rows.reshape(self.num_matrices, -1, rows.shape[1])
        return np.ascontiguousarray(rows.swapaxes(-1, -2)) if self.transposed else rows


def checkpoint_tensors(specs: Sequence[TensorRow], params: Params, advice: str) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name, still on their devices.

    Raises:
        CheckpointError: `params` differs from `specs` (all differences named); the message ends with `advice`.
    """
    found = Mismatch()
    tensors: dict[str, Tensor] = {}
    for row in specs:
        array, name = _leaf_or_none(params, row.path), "/".join(map(str, row.path))
        if array is None:
            found.missing.append(name)
        elif (dtype := getattr(array, "dtype", type(array).__name__)) not in FLOATS:
            found.mistyped.append(f"{name} {dtype}")
        elif not getattr(array, "is_fully_addressable", True):
            raise CheckpointError(f"all of {name} must be on devices of this process, got one of several processes")
        elif array.shape != row.shape:
            found.misshapen.append(f"{name} {array.shape} instead of {row.shape}")
        else:
            counts = hf_row_counts(row)
            parts = zip(counts.items(), accumulate(counts.values()), strict=True)
            num_matrices = row.num_matrices if row.stacked else None
            tensors |= {
                hf_name: _ParamRows(array, end - num_rows, end, row.transposed, num_matrices)
                for (hf_name, num_rows), end in parts
            }
    found.raise_if_any("params", advice)
    return tensors


def _leaf_or_none(params: Params, path: Path) -> Any:
    """Return the leaf under `path`; None if there is none."""
    try:
        return leaf_at(params, path)
    except (KeyError, IndexError, TypeError):
        return None
