"""Tensors in a checkpoint, read whole onto their devices or slab by slab through host memory."""

import dataclasses
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from jaxserve.weights.mapped_array import MappedArray

_READ_BYTES = 4 << 20  # file bytes per read

Index = tuple[slice, ...]


@runtime_checkable
class Tensor(Protocol):
    """Array that is read or copied to the host when it is converted to a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any:
        """Stored dtype."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __array__(self) -> NDArray[Any]: ...


@runtime_checkable
class Part(Tensor, Protocol):
    """A stored tensor, or a slice, that is read when it is copied, such as a view of a mapped file."""

    @property
    def T(self) -> Any:  # noqa: N802 (numpy's name)
        """Transpose, still unread."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Tensors = Mapping[str, Part]
MatrixPartT = TypeVar("MatrixPartT", bound="MatrixPart")
Bounds = tuple[int, int]  # first index, and the one after the last


@dataclass(frozen=True)
class MatrixPart(ABC):
    """Some rows and columns of a matrix, which is decoded when it is converted to a numpy array."""

    rows: Bounds
    columns: Bounds

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])

    @property
    def T(self) -> NDArray[Any]:  # noqa: N802 (numpy's name)
        """Transpose, decoded."""
        return np.asarray(self).T

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self: MatrixPartT, index: slice | tuple[slice, ...]) -> MatrixPartT:
        index = index if isinstance(index, tuple) else (index,)
        bounds = []
        for part, (start, stop) in zip((*index, slice(None))[:2], (self.rows, self.columns), strict=True):
            low, high, _ = part.indices(stop - start)
            bounds.append((start + low, start + max(low, high)))
        return dataclasses.replace(self, rows=bounds[0], columns=bounds[1])

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...


Piece = tuple[NDArray[Any], Part]  # copy target and source


@dataclass(frozen=True)
class StoredTensor:
    """Checkpoint tensors that are concatenated along axis 0, still unread.

    Attributes:
        parts: stored tensors.
        dtype: dtype of the result.
        sharding: sharding of the result; None for the default device.
        readers: threads that read.
        padding_rows: number of zero rows after all others.
        row_parts: the same rows with all of their columns; None if `parts` already have all.
    """

    parts: Sequence[Part]
    dtype: np.dtype
    sharding: Sharding | None
    readers: Executor
    padding_rows: int = 0
    row_parts: Sequence[Part] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts) + self.padding_rows, *self.parts[0].shape[1:])

    def with_parts(
        self,
        parts: Sequence[Part],
        sharding: Sharding,
        padding_rows: int = 0,
        row_parts: Sequence[Part] | None = None,
    ) -> "StoredTensor":
        """Return another tensor, made from slices of these parts, still unread."""
        return dataclasses.replace(self, parts=parts, sharding=sharding, padding_rows=padding_rows, row_parts=row_parts)

    def whole_rows(self) -> "StoredTensor":
        """Return the same rows with all columns."""
        return self if self.row_parts is None else dataclasses.replace(self, parts=self.row_parts, row_parts=None)

    def place(self) -> Array:
        """Return the whole tensor on its devices; each device reads only its own slices."""
        if self.sharding is None:
            return jax.device_put(self._read(None))
        return jax.make_array_from_callback(self.shape, self.sharding, self._read)

    def each_slab(self, num_rows: int, use: Callable[[int, NDArray[Any]], None]) -> None:
        """Call `use(start, rows)` for each `num_rows` rows, fewer at the end, from several threads."""

        def read(start: int) -> None:
            """Read one slab and pass it to `use`."""
            end = min(start + num_rows, self.shape[0])
            slab = np.zeros((end - start, *self.shape[1:]), self.dtype)
            for piece in _pieces(slab, self.parts, (slice(start, end),)):
                _copy(piece)
            use(start, slab)

        list(self.readers.map(read, range(0, self.shape[0], num_rows)))

    def each_slice(self, num_rows: int, use: Callable[[int, Part], None]) -> None:
        """Call `use(start, part)` for each `num_rows` rows in each part, still unread, from several threads."""
        starts = [0, *accumulate(map(len, self.parts))]
        slices = [
            (start + row, part[row : row + num_rows])
            for start, part in zip(starts, self.parts, strict=False)
            for row in range(0, len(part), num_rows)
        ]
        list(self.readers.map(lambda pair: use(*pair), slices))

    def _read(self, index: Index | None) -> NDArray[Any]:
        """Return a slice of the concatenated parts in host memory, None for all of it; several threads read."""
        index = index or (slice(None),)
        start, stop, _ = index[0].indices(self.shape[0])
        inner_shape = self.parts[0][:0, *index[1:]].shape[1:]
        out = host_buffer((stop - start, *inner_shape), self.dtype)
        list(self.readers.map(_copy, _pieces(out, self.parts, index)))
        return out


def host_buffer(shape: tuple[int, ...], dtype: np.dtype) -> NDArray[Any]:
    """Return zeros in separate memory pages.

    XLA:CPU adopts a page-aligned buffer instead of copying it, and the pages return to the system with the last array
    that uses them, whereas the heap would keep them.
    """
    pages = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), access=mmap.ACCESS_COPY)
    return np.ndarray(shape, dtype, pages)


def host_rows(array: Any, rows: slice) -> NDArray[Any]:
    """Return a copy of an array's rows, from any number of devices; jax would keep a whole host copy with the array."""
    part = array[rows]
    # Slicing all rows yields the array itself. `copy` would compile a program for each shape.
    return np.asarray(jax.device_put(part, may_alias=False) if part is array else part)


def _pieces(out: NDArray[Any], parts: Sequence[Part], index: Index) -> Iterator[Piece]:
    """Yield the copies (target, source) that fill `out` with the slice `index` of the concatenated parts."""
    offset = -(index[0].start or 0)  # row of `out` where the current part would begin
    for part in parts:
        low, high = max(0, -offset), min(len(part), len(out) - offset)
        if low < high:
            yield from _blocks(out[offset + low : offset + high], part[low:high, *index[1:]])
        offset += len(part)


def _blocks(out: NDArray[Any], source: Part) -> Iterator[Piece]:
    """Split a copy from `source` to `out` into row blocks, so small that several threads can read one tensor."""
    step = max(1, _READ_BYTES * len(source) // max(1, source.nbytes))
    for row in range(0, len(source), step):
        yield out[row : row + step], source[row : row + step]


def _copy(piece: Piece) -> None:
    """Read a part into its target, and drop its mapped pages."""
    to, source = piece
    np.copyto(to, np.asarray(source), casting="unsafe")
    if isinstance(source, MappedArray):
        source.release()
