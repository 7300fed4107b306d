"""A tensor on its way out of a checkpoint: whole to its devices, or slab by slab through host memory."""

import dataclasses
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from jaxserve.weights.safetensors_file import release

_READ_BYTES = 4 << 20  # of a file at a time in each reader

Index = tuple[slice, ...]


@runtime_checkable
class Tensor(Protocol):
    """Numbers that come to the host when they become a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own, as an array has it."""

    @property
    def dtype(self) -> Any:
        """As it is stored."""

    @property
    def nbytes(self) -> int:
        """Size of its numbers."""

    def __array__(self) -> NDArray[Any]: ...


@runtime_checkable
class Part(Tensor, Protocol):
    """A tensor of a checkpoint, or a slice of one, read when it is copied: a view of a mapped file, say."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class HeldTensor:
    """A Part that is in memory, and the caller's."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Its own."""
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        """Size of its numbers."""
        return self.array.nbytes

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any, /) -> "HeldTensor":
        return HeldTensor(self.array[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.array


Tensors = Mapping[str, Part]
Piece = tuple[NDArray[Any], Part]  # where to copy, and from where


@dataclass(frozen=True)
class StoredTensor:
    """The concatenation of tensors of a checkpoint along axis 0, none of it read yet.

    Attributes:
        parts: tensors as they are stored.
        dtype: what it is read in.
        sharding: where it is placed; None for the default device.
        readers: threads that read.
        padding_rows: rows of zeros after all others.
    """

    parts: Sequence[Part]
    dtype: np.dtype
    sharding: Sharding | None
    readers: Executor
    padding_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (sum(len(part) for part in self.parts) + self.padding_rows, *self.parts[0].shape[1:])

    def with_parts(self, parts: Sequence[Part], sharding: Sharding, padding_rows: int = 0) -> "StoredTensor":
        """Another tensor, made of slices of these parts; still none of it is read."""
        return dataclasses.replace(self, parts=parts, sharding=sharding, padding_rows=padding_rows)

    def place(self) -> Array:
        """All of it, on its devices, of which each reads what it holds."""
        if self.sharding is None:
            return jax.device_put(self._read(None))
        return jax.make_array_from_callback(self.shape, self.sharding, self._read)

    def each_slab(self, num_rows: int, use: Callable[[int, NDArray[Any]], None]) -> None:
        """Call `use(start, rows)` for each `num_rows` rows, the last perhaps fewer, from several threads at once."""

        def read(start: int) -> None:
            end = min(start + num_rows, self.shape[0])
            slab = np.zeros((end - start, *self.shape[1:]), self.dtype)
            for piece in _pieces(slab, self.parts, (slice(start, end),)):
                _copy(piece)
            use(start, slab)

        list(self.readers.map(read, range(0, self.shape[0], num_rows)))

    def _read(self, index: Index | None) -> NDArray[Any]:
        index = index or (slice(None),)
        start, stop, _ = index[0].indices(self.shape[0])
        inner_shape = self.parts[0][:0, *index[1:]].shape[1:]
        out = host_buffer((stop - start, *inner_shape), self.dtype)
        list(self.readers.map(_copy, _pieces(out, self.parts, index)))
        return out


def host_buffer(shape: tuple[int, ...], dtype: np.dtype) -> NDArray[Any]:
    """Zeros in pages of their own.

    XLA:CPU takes over a buffer so aligned instead of copying it; and the pages go back to the system with the last
    array in them, where the heap would keep them.
    """
    pages = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), access=mmap.ACCESS_COPY)
    return np.ndarray(shape, dtype, pages)


def host_rows(array: Any, rows: slice) -> NDArray[Any]:
    """Rows of an array, on however many devices. jax keeps the host copy of an array that is read alive with it."""
    part = array[rows]
    return np.asarray(part.copy() if part is array else part)  # a slice of all of it is the array itself


def _pieces(out: NDArray[Any], parts: Sequence[Part], index: Index) -> Iterator[Piece]:
    """What to copy from where to fill `out` with the slice `index` of the concatenation of `parts`."""
    offset = -(index[0].start or 0)  # row of `out` where the part at hand would begin
    for part in parts:
        low, high = max(0, -offset), min(len(part), len(out) - offset)
        if low < high:
            yield from _blocks(out[offset + low : offset + high], part[low:high, *index[1:]])
        offset += len(part)


def _blocks(out: NDArray[Any], source: Part) -> Iterator[Piece]:
    """Blocks of rows small enough that several threads share one tensor."""
    step = max(1, _READ_BYTES * len(source) // max(1, source.nbytes))
    for row in range(0, len(source), step):
        yield out[row : row + step], source[row : row + step]


def _copy(piece: Piece) -> None:
    to, source = piece
    np.copyto(to, np.asarray(source), casting="unsafe")
    if isinstance(source, np.ndarray):
        release(source)
