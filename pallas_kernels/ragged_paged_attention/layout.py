"""Memory layouts of the page pool, and their conversion to the canonical one.

The canonical layout is `[L, N, P, 2K, H]`, head h's key at 2h and value at 2h + 1, or `[L, N, P, W]` for latents. The
scales for an int8 or fp8 pool are a second array without the last axis. In an int4 pool, H is the number of bytes per
vector (`int4.stored_bytes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of

SMALL_PAGE_TOKENS = 16  # leaves little of a row's last page empty


class PoolDims(NamedTuple):
    """Sizes of a pool that do not depend on the vectors that it stores."""

    num_layers: int
    num_pages: int
    """Number of pages per layer."""
    page_size: int
    """Tokens per page."""


@dataclass(frozen=True)
class Layout(ABC):
    """Shape of a pool's arrays: the axis order for layers, pages, tokens, heads and elements, which a backend chooses.

    Attributes:
        token_shape: stored shape of a token's vectors, `(2K, H)`, or `(W,)` for latents.
        token_axis: values axis that counts the tokens in a page.
    """

    token_shape: tuple[int, ...]
    token_axis: ClassVar[int]

    def default_page_size(self, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens."""
        return SMALL_PAGE_TOKENS

    @abstractmethod
    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the pool values' shape for these sizes."""

    @abstractmethod
    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return a quantised pool's scales' shape for these sizes, if the backend supports such pools."""

    @abstractmethod
    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Convert a pool in this layout, or a few pages `[L, N, ...]`, to the canonical layout."""

    @abstractmethod
    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Convert a pool in the canonical layout, or a few pages `[L, N, ...]`, to this layout."""

    def latents_at(
        self, kv_pages: Pages, layer: int | Int32[Array, ""], page: Int32[Array, "*N"], offset: Int32[Array, "*N"]
    ) -> Pages:
        """Return single tokens' latents in canonical form, `[*N, W]`, given their pages and indices in these."""
        found: Pages = jax.tree.map(lambda x: x.at[layer, page, offset].get(mode="clip"), kv_pages)
        return found

    @classmethod
    def pool_dims(cls, shape: tuple[int, ...]) -> PoolDims:
        """Return a pool's sizes, given the shape of its values in this layout.

        Raises:
          ValueError: the number of axes fits no pool.
        """
        if len(shape) not in (4, 5):
            raise ValueError(f"the pool must have 4 or 5 axes, got shape {shape}; make it with new_pages")
        return PoolDims(shape[0], shape[1], shape[cls.token_axis])


@dataclass(frozen=True)
class TokenMajor(Layout):
    """The canonical layout `[L, N, P, 2K, H]`, except that scales may have padding.

    Attributes:
        scale_multiple: number that divides the padded scales per token.
    """

    token_axis = 2
    scale_multiple: ClassVar[int] = 1

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the pool values' shape, `(L, N, P, 2K, H)` or `(L, N, P, W)`."""
        return (*dims, *self.token_shape)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the scales' shape, `(L, N, P, padded 2K)`, or `(L, N, P)` for latents."""
        return (*dims, *(size + -size % self.scale_multiple for size in self.token_shape[:-1]))

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool with its scales, if it has any, without padding."""
        if not isinstance(kv_pages, QuantizedPages) or len(self.token_shape) == 1:
            return kv_pages
        return kv_pages._replace(scales=kv_pages.scales[..., : self.token_shape[0]])

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Convert a canonical pool, or single tokens `[T, 2K, H]`, to this layout, which only pads the scales."""
        if not isinstance(kv_pages, QuantizedPages) or len(self.token_shape) == 1:
            return kv_pages
        scales = kv_pages.scales
        padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % self.scale_multiple)]
        return kv_pages._replace(scales=jnp.pad(scales, padding))


@dataclass(frozen=True)
class HeadMajor(Layout):
    """Layout `[L, N, 2K, P, H]` with scales `[L, N, 2K, P]`: a gathered page is one matrix per head."""

    token_axis = -2

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the pool values' shape, `(L, N, 2K, P, H)` or `(L, N, P, W)`."""
        return (*self.scale_shape(dims), self.token_shape[-1])

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the scales' shape, `(L, N, 2K, P)`, or `(L, N, P)` for latents."""
        return (dims.num_layers, dims.num_pages, *self.token_shape[:-1], dims.page_size)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Swap the axes for heads and tokens; latents stay unchanged."""
        is_latent = len(self.token_shape) == 1
        return kv_pages if is_latent else jax.tree.map(lambda x: jnp.swapaxes(x, 2, 3), kv_pages)

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Swap the axes for tokens and heads; latents stay unchanged."""
        return HeadMajor.to_canonical(self, kv_pages)


@dataclass(frozen=True)
class TransposedKeys(HeadMajor):
    """Head-major layout in which each head's keys in a page are `[H, P]`: one vector instruction scores many tokens.

    The array's shape stays `[L, N, 2K, P, H]`; only the element order inside a page's keys differs.
    """

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Transpose each page's keys from `[H, P]` to `[P, H]`, and swap the axes for heads and tokens."""
        *_, P, H = values_of(kv_pages).shape
        return super().to_canonical(self._transposed(kv_pages, (H, P)))

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Swap the axes for tokens and heads, and transpose each page's keys from `[P, H]` to `[H, P]`."""
        P, H = values_of(kv_pages).shape[2], self.token_shape[-1]
        return self._transposed(super().from_canonical(kv_pages), (P, H))

    def _transposed(self, kv_pages: Pages, key_page: tuple[int, int]) -> Pages:
        """Transpose each page's and head's keys in a head-major pool, from the shape `key_page`; latents stay."""
        if len(self.token_shape) == 1:
            return kv_pages
        values = values_of(kv_pages)
        L, N, KV, P, H = values.shape
        keys = jnp.swapaxes(values[:, :, 0::2].reshape(L, N, KV // 2, *key_page), 3, 4).reshape(L, N, KV // 2, P, H)
        values = jnp.stack([keys, values[:, :, 1::2]], axis=3).reshape(L, N, KV, P, H)
        return kv_pages._replace(values=values) if isinstance(kv_pages, QuantizedPages) else values
