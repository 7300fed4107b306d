"""Layouts of the page pool in memory, and their conversion to the canonical one.

The canonical layout is `[L, N, P, 2K, H]`, keys of head h at 2h and values at 2h + 1. The scales of an int8 or fp8 pool
are an array beside it, canonically `[L, N, P, 2K]`. In an int4 pool, H is the bytes of a vector (`int4.stored_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of

SMALL_PAGE_TOKENS = 16  # leaves little of a row's last page empty


class PoolDims(NamedTuple):
    """Sizes of a page pool, whatever the order of its axes; `head_dim` is the elements stored for a vector."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


@runtime_checkable
class Layout(Protocol):
    """Order of a pool's elements in memory, which belongs to a backend."""

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens."""

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of the pool's values."""

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of the scales of a quantised pool; called only if the backend supports such a pool."""

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`; raise ValueError for a shape that is not in this layout."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool, or any pages of it `[L, N, ...]`, in the canonical layout."""

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""


@dataclass(frozen=True)
class TokenMajor:
    """The canonical layout `[L, N, P, 2K, H]`, with scales `[L, N, P, padded 2K]`.

    Attributes:
        scale_multiple: number of heads to a multiple of which scales are padded.
    """

    scale_multiple: int = 1

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Return a small page size."""
        return SMALL_PAGE_TOKENS

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, P, 2K, H]`."""
        return (*dims[:3], 2 * dims.num_kv_heads, dims.head_dim)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, P, padded 2K]`."""
        return (*dims[:3], 2 * dims.num_kv_heads + -2 * dims.num_kv_heads % self.scale_multiple)

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`."""
        check_pool_shape(shape, "[L, N, P, 2K, H]", even_axis=3)
        num_layers, num_pages, page_size, num_heads, head_dim = shape
        return PoolDims(num_layers, num_pages, page_size, num_heads // 2, head_dim)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as it is, its scales without padding."""
        if not isinstance(kv_pages, QuantizedPages):
            return kv_pages
        return kv_pages._replace(scales=kv_pages.scales[..., : kv_pages.values.shape[3]])

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`; also of single tokens `[T, 2K, H]`."""
        if not isinstance(kv_pages, QuantizedPages):
            return kv_pages
        scales = kv_pages.scales
        padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % self.scale_multiple)]
        return kv_pages._replace(scales=jnp.pad(scales, padding))


@dataclass(frozen=True)
class HeadMajor:
    """Layout `[L, N, 2K, P, H]` with scales `[L, N, 2K, P]`: a gathered page is a matrix per head."""

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Return a small page size."""
        return SMALL_PAGE_TOKENS

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, 2K, P, H]`."""
        return (*self.scale_shape(dims), dims.head_dim)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, 2K, P]`."""
        return (dims.num_layers, dims.num_pages, 2 * dims.num_kv_heads, dims.page_size)

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`."""
        check_pool_shape(shape, "[L, N, 2K, P, H]", even_axis=2)
        num_layers, num_pages, num_heads, page_size, head_dim = shape
        return PoolDims(num_layers, num_pages, page_size, num_heads // 2, head_dim)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as `[L, N, P, 2K, H]`, its scales as `[L, N, P, 2K]`."""
        return jax.tree.map(lambda x: jnp.swapaxes(x, 2, 3), kv_pages)

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""
        return self.to_canonical(kv_pages)


@dataclass(frozen=True)
class TransposedKeys(HeadMajor):
    """Head-major layout, but a page of keys is `[H, P]`: one vector instruction scores many tokens."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as `[L, N, P, 2K, H]`, its scales as `[L, N, P, 2K]`."""
        *_, P, H = values_of(kv_pages).shape
        return super().to_canonical(self._transposed(kv_pages, (H, P)))

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""
        _, _, P, _, H = values_of(kv_pages).shape
        return self._transposed(super().to_canonical(kv_pages), (P, H))

    def _transposed(self, kv_pages: Pages, key_page: tuple[int, int]) -> Pages:
        """Transpose each page of keys of a head-major pool, whose matrix has the shape `key_page`."""
        values = values_of(kv_pages)
        L, N, KV, P, H = values.shape
        keys = jnp.swapaxes(values[:, :, 0::2].reshape(L, N, KV // 2, *key_page), 3, 4).reshape(L, N, KV // 2, P, H)
        values = jnp.stack([keys, values[:, :, 1::2]], axis=3).reshape(L, N, KV, P, H)
        return kv_pages._replace(values=values) if isinstance(kv_pages, QuantizedPages) else values


def check_pool_shape(shape: tuple[int, ...], layout: str, *, even_axis: int) -> None:
    """Check that a pool has five axes, one of them of even size.

    Raises:
      ValueError: it has not.
    """
    if len(shape) != 5 or shape[even_axis] % 2:
        raise ValueError(f"the pool of this backend must be {layout}, got shape {shape}; make it with new_pages")
