"""PageBytes: pages as bytes that depend neither on the attention backend nor on the number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

Leaf = jax.Array | NDArray[np.generic]
Page = Sequence[Leaf]  # contents of a page in the canonical layout, by leaf of the pool


class PageBytes:
    """Conversion between pages and bytes.

    Args:
        leaves: shapes and dtypes of a page's parts in host memory.
        num_heads: KV heads.
        num_copies: devices that hold the same KV head; their parts of a page are adjacent, and the bytes have one.

    Attributes:
        host_size: bytes per page in host memory, where each device copies undivided parts.
        size: bytes per page after conversion.
    """

    def __init__(self, leaves: Sequence[jax.ShapeDtypeStruct], num_heads: int = 1, num_copies: int = 1) -> None:
        self._leaves, self._num_heads, self._num_copies = leaves, num_heads, num_copies
        self.host_size = sum(map(_host_bytes, leaves))
        self.size = sum(_num_bytes(leaf.shape, leaf.dtype) for leaf in leaves) // num_copies

    def pack(self, page: Page) -> bytes:
        """Return a page's bytes."""
        return b"".join(self.parts(page))

    def parts(self, page: Page) -> list[memoryview]:
        """Return a page's bytes in parts, not copied if the page's arrays are readable where they are."""
        arrays = [self._without_copies(np.asarray(leaf)) for leaf in page]
        return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]

    def unpack(self, content: bytes) -> list[NDArray[np.generic]]:
        """Return the page with these bytes."""
        return list(self._split(content))

    def _without_copies(self, part: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return a page's part with each head once."""
        if self._num_copies == 1:
            return part
        return part.reshape(*part.shape[:2], self._num_heads, self._num_copies, -1)[:, :, :, 0]

    def _split(self, content: bytes) -> Iterator[NDArray[np.generic]]:
        """Yield a page's parts."""
        offset = 0
        for leaf in self._leaves:
            dtype, num_elements = np.dtype(leaf.dtype), int(np.prod(leaf.shape)) // self._num_copies
            part = np.frombuffer(content, dtype, num_elements, offset)
            offset += part.nbytes
            if self._num_copies > 1:
                heads = part.reshape(*leaf.shape[:2], self._num_heads, 1, -1)
                part = np.repeat(heads, self._num_copies, axis=3)
            yield part.reshape(leaf.shape)


def _host_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return a page part's bytes in host memory, over all devices."""
    if leaf.sharding is None:
        return _num_bytes(leaf.shape, leaf.dtype)
    return leaf.sharding.num_devices * _num_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Return an array's bytes."""
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
