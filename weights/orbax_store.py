"""Orbax checkpoints with the tensors of a Hugging Face checkpoint: same names, dtypes and shapes.

The tensors are in a folder next to config.json. They depend neither on the number of devices nor on quantisation in
serving. They are stored in chunks, so that each device reads little more than its own rows and columns.

Orbax writes them; TensorStore, on which Orbax is built, reads slices in any thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.mapped_array import MappedArray
from jaxserve.weights.stored_tensor import Tensor, Tensors

FOLDER = "orbax"
_STATE = "state"  # folder that Orbax creates for an array tree
_ARRAY = "/zarr.json"  # suffix of each array's name
_CHUNK_BYTES = 1 << 20  # minimum that Orbax advises
_GROUP_BYTES = 64 << 20  # maximum size of one write
_CACHED_BANDS = 2  # chunk rows in the shared cache: with one, many chunks are read twice


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor, or a slice, that is read when it is converted to a numpy array.

    Attributes:
        store: a tensorstore.TensorStore.
        source: path of the checkpoint, for messages.
    """

    store: Any
    source: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.store.dtype.numpy_dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def T(self) -> "ChunkedTensor":  # noqa: N802 (numpy's name)
        """Transpose, still unread."""
        return ChunkedTensor(self.store.T, self.source)

    def swapaxes(self, axis1: int, axis2: int, /) -> "ChunkedTensor":
        """Return the tensor with two axes exchanged, still unread."""
        order = list(range(len(self.shape)))
        order[axis1], order[axis2] = axis2, axis1
        return ChunkedTensor(self.store.transpose(order), self.source)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | tuple[slice, ...]) -> "ChunkedTensor":
        if isinstance(index, int):
            return ChunkedTensor(self.store[index], self.source)
        index = index if isinstance(index, tuple) else (index,)
        bounds = [part.indices(size) for part, size in zip(index, self.shape, strict=False)]
        view = self.store[tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)]
        return ChunkedTensor(view.translate_to[(0,) * view.rank], self.source)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        try:
            return np.asarray(self.store.read().result(), dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.source} must be readable, got a fault: {error}; convert it again") from error


def has_weights(directory: FilePath) -> bool:
    """Return whether a directory has an Orbax checkpoint."""
    return (directory / FOLDER).is_dir()


def open_tensors(directory: FilePath) -> Tensors:
    """Return every stored tensor by name, still unread; CheckpointError if the checkpoint is damaged."""
    folder = directory / FOLDER / _STATE
    try:
        bands = [_band_bytes(tensor.store) for tensor in _open(folder, cache_bytes=0).values()]
        return _open(folder, _CACHED_BANDS * max(bands))
    except ValueError as error:
        raise CheckpointError(f"{folder.parent} must be a complete Orbax checkpoint, got a fault: {error}") from error


def write_tensors(
    directory: FilePath, tensors: Mapping[str, Tensor], wrote: Callable[[int], object] = lambda _: None
) -> None:
    """Write every tensor unchanged; `wrote` gets the size of each write. The folder appears once it is complete."""
    from orbax.checkpoint import v1 as ocp  # noqa: PLC0415 - slow to import

    context, path = ocp.Context(), (directory / FOLDER).absolute()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.memory.deepcopy_host_arrays = False
    with context:
        for names in _groups(tensors):
            arrays = {name: np.asarray(tensors[name]) for name in names}
            ocp.partial.save(path, arrays)
            for name, array in arrays.items():
                if isinstance(tensor := tensors[name], MappedArray):
                    tensor.release()
                wrote(array.nbytes)
        ocp.partial.finalize(path)


def _open(folder: FilePath, cache_bytes: int) -> dict[str, ChunkedTensor]:
    """Open all tensors, with a shared cache for chunks; ValueError if the checkpoint is damaged.

    Args:
        folder: folder with the arrays.
        cache_bytes: size of the cache.
    """
    import tensorstore as ts  # noqa: PLC0415 - Hugging Face directories need none

    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}
    keys = [key.decode() for key in ts.KvStore.open(store, context=context).result().list().result()]
    names = [key.removesuffix(_ARRAY) for key in keys if key.endswith(_ARRAY)]
    if not names:
        raise ValueError("it holds no arrays")
    options = {"driver": "zarr3", "recheck_cached_data": False, "recheck_cached_metadata": False}
    opened = [
        ts.open({**options, "kvstore": {**store, "path": f"{name}/"}}, open=True, context=context) for name in names
    ]
    return {
        name: ChunkedTensor(future.result(), f"{name} in {folder.parent}")
        for name, future in zip(names, opened, strict=True)
    }


def _band_bytes(store: Any) -> int:
    """Return the bytes in a TensorStore's first row of chunks."""
    chunk_rows = (store.chunk_layout.read_chunk.shape or ())[:1]  # a scalar has none
    return prod((*chunk_rows, *store.shape[1:])) * store.dtype.numpy_dtype.itemsize


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[Sequence[str]]:
    """Yield tensor names in order, in groups that are written together: up to 64 MiB, or one larger tensor."""
    group: list[str] = []
    for name, tensor in tensors.items():
        if group and sum(tensors[other].nbytes for other in group) + tensor.nbytes > _GROUP_BYTES:
            yield group
            group = []
        group.append(name)
    yield group
