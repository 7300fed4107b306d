"""Arrays in a memory-mapped file, whose pages are dropped once they are read."""

import mmap
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FAULT_BYTES = max(mmap.PAGESIZE, 2 << 20)  # Linux may map a whole aligned huge page when one byte is touched


class MappedArray(np.ndarray):
    """View of a memory-mapped file; its slices are MappedArrays too, its copies plain arrays."""

    def release(self) -> None:
        """Drop the pages that were read through this view: until then they count as the process's memory.

        Neighbouring bytes in the same pages are dropped too; other threads that read them fault them in again.
        """
        whole: Any = self
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        # Windows has no madvise.
        if self.size and isinstance(file_map := whole.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            file_start, file_end = np.lib.array_utils.byte_bounds(whole)
            begin, end = np.lib.array_utils.byte_bounds(self)
            begin = max(file_start, begin - begin % _FAULT_BYTES)
            end = min(file_end, end + -end % _FAULT_BYTES)
            file_map.madvise(mmap.MADV_DONTNEED, begin - file_start, end - begin)


def map_bytes(file: FilePath) -> MappedArray:
    """Map a file into memory as uint8; its bytes are read from disk on first access, see `read`."""
    return np.memmap(file, np.uint8, mode="r").view(MappedArray)


def read(part: Any) -> NDArray[Any]:
    """Return a copy of an array or part of a checkpoint; mapped pages are dropped afterwards."""
    copy = np.array(part)
    if isinstance(part, MappedArray):
        part.release()
    return copy
