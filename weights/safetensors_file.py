"""The safetensors format (https://github.com/huggingface/safetensors#format): a JSON header, then raw tensors.

This module parses it itself: a memory map lets each device take its own slices, in any dtype and without torch, and the
safetensors package cannot read bfloat16 into numpy.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path as FilePath
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.mapped_array import map_bytes

_HEADER_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000  # limit set by the format
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def map_file(file: FilePath) -> dict[str, NDArray[Any]]:
    """Return a file's tensors as views of its memory map: nothing is read before it is copied.

    Raises:
        CheckpointError: the file is damaged or has an unknown dtype.
    """
    try:
        data = map_bytes(file)
        body_start = 8 + _header_len(data)
        header = json.loads(data[8:body_start].tobytes(), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        return {name: _view(data[body_start:], **entry) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{file} must be a complete safetensors file, got {file.stat().st_size} bytes with a fault: {error}; "
            f"download or write it again"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; ValueError if they repeat a name, which the format forbids."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"it names {[name for name, count in names.items() if count > 1][:8]} more than once")
    return found


def _header_len(data: NDArray[np.uint8]) -> int:
    """Return the header's length in bytes, given the file's bytes; ValueError if it is too large."""
    header_len = int(data[:8].view("<u8")[0])
    max_len = min(data.size - 8, _MAX_HEADER_BYTES)
    if header_len > max_len:
        raise ValueError(f"its header can have at most {max_len} bytes and claims {header_len}")
    return header_len


def _view(body: NDArray[np.uint8], *, dtype: str, shape: list[int], data_offsets: list[int]) -> NDArray[Any]:
    """Return a view of one tensor's bytes, given its header entry; ValueError if the entry is wrong."""
    begin, end = data_offsets
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
    if not 0 <= begin <= end <= body.size:
        raise ValueError(f"bytes {begin} to {end} of a tensor are not among the {body.size} that follow the header")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} is negative")
    return body[begin:end].view(DTYPES[dtype]).reshape(shape)


def write_file(
    file: FilePath, tensors: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], NDArray[Any]]
) -> None:
    """Write the tensors that `read(name)` returns, one at a time, and sync them to disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + num_bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            out.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())


def num_bytes(tensor: jax.ShapeDtypeStruct) -> int:
    """Return the size of a tensor with this shape and dtype."""
    return prod(tensor.shape) * tensor.dtype.itemsize
