"""Layouts of a pool of latents, and their conversion to the canonical one.

The canonical layout is `[L, N, P, W]`. The scales of a quantised pool are an array beside it, canonically `[L, N, P]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.layout import SMALL_PAGE_TOKENS
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages


class PoolDims(NamedTuple):
    """Sizes of a pool of latents, whatever the order of its axes.

    Attributes:
        num_layers: number of layers, L.
        num_pages: number of pages, N.
        page_size: tokens per page, P.
        width: elements of a latent, W; those of a pool that exists include its padding.
    """

    num_layers: int
    num_pages: int
    page_size: int
    width: int


@runtime_checkable
class Layout(Protocol):
    """Order of a pool's elements in memory, which belongs to a backend."""

    def default_page_size(self, width: int, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens."""

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of the pool's values, with padding behind a latent if the layout wants it."""

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of the scales of a quantised pool; called only if the backend supports such a pool."""

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`; raise ValueError for a shape that is not in this layout."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool, or any pages of it `[L, N, ...]`, in the canonical layout; the padding of latents stays."""

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""


@dataclass(frozen=True)
class TokenMajor:
    """The canonical layout: a page is a matrix of its tokens' latents."""

    def default_page_size(self, width: int, kv_dtype: jnp.dtype) -> int:
        """Return a small page size."""
        return SMALL_PAGE_TOKENS

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, P, W]`."""
        return tuple(dims)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, P]`."""
        return tuple(dims[:3])

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`."""
        if len(shape) != 4:
            raise ValueError(
                f"the pool of this backend must be [L, N, P, W], got shape {shape}; make it with new_pages"
            )
        return PoolDims(*shape)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as it is."""
        return kv_pages

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as it is."""
        return kv_pages
