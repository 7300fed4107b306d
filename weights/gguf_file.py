"""The GGUF container: metadata without the vocabulary, and tensor views, from all shards of a model.

The gguf package reads it; it is imported only for such files.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError, listed
from jaxserve.weights.gguf_blocks import BLOCK_TYPES, Bytes
from jaxserve.weights.mapped_array import MappedArray

SUFFIX = ".gguf"
AGAIN = "download or convert it again"
_MAX_ELEMENTS = 4096  # longest metadata array that is read: some have an element per layer
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file: its type, its shape and a view of its bytes."""

    type: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    def floats(self) -> NDArray[Any]:
        """Return the view as floats; the type must be one of `FLOATS`."""
        return self.data.view(FLOATS[self.type]).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A file, its metadata without the vocabulary, and its tensors by name."""

    path: FilePath
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Architecture name, which is also the first component of its metadata keys."""
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        """Return an architecture key's value, None if absent; a list must have equal elements and yields one."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.fault(f"have one {self.architecture}.{key} for all layers", value)
            return value[0]
        return value

    def fault(self, must: str, got: object, advice: str = "use a file of such a model") -> CheckpointError:
        """Return the error for a file that must be otherwise.

        Args:
            must: rule that the file breaks, after "must".
            got: the value in the file.
            advice: remedy.
        """
        return CheckpointError(f"{self.path} must {must}, got {got}; {advice}")


def find_file(path: str | os.PathLike[str]) -> FilePath | None:
    """Return the file for a path: itself, or the only model in a directory; None if there is none.

    For a sharded model it is the first file, if that exists.
    """
    path = FilePath(path)
    if path.suffix == SUFFIX and path.is_file():
        found = {path}
    else:
        found = set(path.glob(f"*{SUFFIX}")) if path.is_dir() else set()
    if len(firsts := {list_shards(file)[0] for file in found}) != 1:
        return None
    return next((first for first in firsts if first.is_file()), next(iter(found)))


def list_shards(file: FilePath) -> list[FilePath]:
    """Return all files of the model that a shard's name belongs to, in order; only the file if it is no shard."""
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    return [file.with_name(f"{match[1]}-{i:05d}-of-{match[2]}{SUFFIX}") for i in range(1, int(match[2]) + 1)] or [file]


def open_file(path: str | os.PathLike[str]) -> GgufFile:
    """Return the model at a path, parsed again only if its files change; CheckpointError if they are damaged."""
    file = find_file(path)
    if file is None:
        raise CheckpointError(f"{path} must be a {SUFFIX} file, or a directory with one, got neither")
    stats = [(shard, shard.stat()) for shard in dict.fromkeys([file, *list_shards(file)]) if shard.is_file()]
    return parse(tuple((shard, stat.st_mtime_ns, stat.st_size) for shard, stat in stats))


@lru_cache(maxsize=4)  # config, weights and their check each want the parsed header
def parse(files: tuple[tuple[FilePath, int, int], ...]) -> GgufFile:
    """Return the model in these files, in shard order; times and sizes distinguish changed files in the cache."""
    path = files[0][0]
    first = _parse_file(path, files[0][2])
    num_shards = first.metadata.get("split.count") or 1
    if num_shards == 1:
        return first
    expected = list_shards(path)
    if first.metadata.get("split.no") != 0 or len(expected) != num_shards or expected[0] != path:
        name = f"{path.name} with split.no {first.metadata.get('split.no')} and split.count {num_shards}"
        raise first.fault("be the first of a model's files, named -00001-of-00003.gguf if there are 3", name, AGAIN)
    if absent := [file.name for file in expected if file not in [found for found, *_ in files]]:
        raise first.fault(f"have all {num_shards} files of the model beside it", f"{listed(absent)} absent", AGAIN)
    tensors = dict(first.tensors)
    for i, (file, _, num_bytes) in enumerate(files[1:], 1):
        shard = _parse_file(file, num_bytes)
        if [shard.metadata.get(key) for key in ("split.no", "split.count")] != [i, num_shards]:
            raise shard.fault(f"be number {i} of {num_shards} files", shard.metadata.get("split.no"), AGAIN)
        if again := tensors.keys() & shard.tensors.keys():
            raise shard.fault("have tensors that the files before it lack", listed(sorted(again)), AGAIN)
        tensors |= shard.tensors
    if (count := first.metadata.get("split.tensors.count")) not in (None, len(tensors)):
        raise first.fault(f"have {count} tensors in its {num_shards} files", len(tensors), AGAIN)
    return replace(first, tensors=tensors)


def _parse_file(path: FilePath, num_bytes: int) -> GgufFile:
    """Return one file's metadata and tensors; CheckpointError if it is damaged. `num_bytes` is its size."""
    try:
        with np.errstate(all="raise"):
            reader = _header_reader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items() if field.types}
            tensors = {
                tensor.name: GgufTensor(tensor.tensor_type.name, _shape(tensor), tensor.data.view(MappedArray))
                for tensor in reader.tensors
            }
    except ImportError as error:
        raise CheckpointError(f"{path} needs the gguf package: pip install 'jaxserve[gguf]'") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(
            f"{path} must be a complete GGUF file, got {num_bytes} bytes with a fault: {type(error).__name__} {error}; "
            f"download or write it again"
        ) from error
    file = GgufFile(path, metadata, tensors)
    _check(file)
    return file


def _header_reader(path: FilePath) -> Any:
    """Return the package's reader for a file, without the elements of arrays as long as a vocabulary.

    The package creates several objects per element: seconds, and a gigabyte, for a common vocabulary.
    """
    from gguf import GGUFReader, GGUFValueType  # noqa: PLC0415 - optional, and needed only for such files

    class HeaderReader(GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            """Return values at a byte offset; ValueError if they exceed the file."""
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"{count} values at byte {offset} are not in the file")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            """Return a metadata value as the base class does, but only the size of a long array."""
            if raw_type == GGUFValueType.ARRAY:
                item_type, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
                if item_type == GGUFValueType.ARRAY:
                    raise ValueError("it has an array of arrays")
                start = orig_offs + 12
                item = self.gguf_scalar_to_np.get(item_type)
                if count > _MAX_ELEMENTS and (item is not None or item_type == GGUFValueType.STRING):
                    size = _strings_size(self.data, start, count) if item is None else count * np.dtype(item).itemsize
                    if start + size > len(self.data):
                        raise ValueError(f"an array of {count} elements is longer than the file")
                    return 12 + size, [], [], [GGUFValueType.ARRAY]
            return super()._get_field_parts(orig_offs, raw_type)

    reader = HeaderReader(path)
    if reader.byte_order != "I":
        raise ValueError("its byte order is that of other machines")
    return reader


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the gguf package's tensor; ValueError if it is empty or contradicts its bytes."""
    from gguf import GGML_QUANT_SIZES  # noqa: PLC0415 - optional, and needed only for such files

    shape = tuple(map(int, reversed(tensor.shape)))
    num_columns, num_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    if not shape or 0 in shape or prod(shape) * num_bytes != tensor.data.nbytes * num_columns:
        raise ValueError(f"{tensor.name} of shape {list(shape)} has {tensor.data.nbytes} bytes")
    return shape


def _strings_size(data: Bytes, start: int, count: int) -> int:
    """Return the bytes of `count` length-prefixed strings from byte `start` on; ValueError if they exceed the file."""
    view, offset = data.data, start
    for _ in range(count):
        if offset + 8 > len(view):
            raise ValueError(f"an array of {count} strings is longer than the file")
        offset += 8 + int.from_bytes(view[offset : offset + 8], "little")
    return offset - start


def _check(file: GgufFile) -> None:
    """Raise a CheckpointError if tensors have an unsupported type, or are quantised although they are no matrices."""
    allowed = [*FLOATS, *BLOCK_TYPES]
    if others := [f"{name} of {t.type}" for name, t in file.tensors.items() if t.type not in allowed]:
        raise file.fault(
            f"have tensors of the types {', '.join(allowed)}", listed(others), "quantise the model to one of these"
        )
    if vectors := [f"{name} {t.type} {list(t.shape)}" for name, t in file.tensors.items() if _is_wrong(name, t)]:
        raise file.fault("have quantised types only for matrices", listed(vectors), "quantise the model again")


def _is_wrong(name: str, tensor: GgufTensor) -> bool:
    """Return whether a tensor is quantised but neither a matrix nor a stack of experts' matrices."""
    num_dims = 3 if name.endswith("_exps.weight") else 2
    return tensor.type not in FLOATS and (len(tensor.shape) != num_dims or not name.endswith(".weight"))
