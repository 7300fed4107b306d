"""Digest of a checkpoint's content: the same for any number of files and of devices that read them."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath

import numpy as np

from jaxserve.weights.stored_tensor import Part
from jaxserve.weights.stores import find_store

_NUM_READERS = 8
_SLAB_BYTES = 16_000_000  # read at a time by a thread
_DIGEST_BYTES = 32


def content_digest(path: str | os.PathLike[str]) -> bytes:
    """Return 32 bytes that identify all tensors of a checkpoint by name, dtype, shape and elements.

    Args:
        path: see `load`.

    Raises:
        CheckpointError: files are absent or damaged.
    """
    tensors = find_store(FilePath(path)).open_tensors(FilePath(path))
    names, whole = sorted(tensors), hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        digests = readers.map(_tensor_digest, (tensors[name] for name in names))
        for name, digest in zip(names, digests, strict=True):
            whole.update(repr((name, str(tensors[name].dtype), tensors[name].shape)).encode() + digest)
    return whole.digest()


def _tensor_digest(tensor: Part) -> bytes:
    """Return the digest of a tensor's elements."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    num_rows = len(tensor) if tensor.shape else 1
    slab_rows = max(num_rows * _SLAB_BYTES // max(tensor.nbytes, 1), 1)
    for start in range(0, num_rows, slab_rows):
        slab = tensor[start : start + slab_rows] if tensor.shape else tensor
        digest.update(np.ascontiguousarray(np.asarray(slab)).reshape(-1).view(np.uint8).data)
    return digest.digest()


def file_stamps(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, inode, size and modification time of each file in a checkpoint: others if a file was replaced."""
    files = [FilePath(path)] if FilePath(path).is_file() else sorted(FilePath(path).rglob("*"))
    states = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states)
