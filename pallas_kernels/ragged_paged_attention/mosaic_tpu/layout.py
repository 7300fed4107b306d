"""The pool's memory layout. See the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout, PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import (
    ALIGNED_TOKENS,
    COPY_BYTES,
    COPY_TOKENS,
    SCALE_HEADS,
    SCALE_TOKENS,
    pair_columns,
    power_of_two,
    scale_rows,
    slab_tokens,
    token_bytes,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of
from jaxserve.pallas_kernels.tpu import LANES, round_up


@dataclass(frozen=True)
class PageMatrices(Layout):
    """TPU pool layout `[L, N, M, P, C]`: a page has M matrices, with a row for each of its P tokens.

    A matrix has one head's key and value in each row, `[L, N, K, P, 2H]`; with a head dim of 512 they are in two
    matrices, `[L, N, 2K, P, H]` (`pair_columns`). Latents have one matrix with padded columns, `[L, N, 1, P, C]`.
    """

    token_axis = 3

    @property
    def is_latent(self) -> bool:
        """True if a token has one vector, a latent, instead of keys and values."""
        return len(self.token_shape) == 1

    @property
    def num_matrices(self) -> int:
        """Number of matrices per page."""
        if self.is_latent:
            return 1
        num_vectors, head_dim = self.token_shape
        return num_vectors // 2 * pair_columns(head_dim).num_matrices

    @property
    def used_columns(self) -> int:
        """Number of columns per matrix, without padding."""
        return math.prod(self.token_shape) // self.num_matrices

    @property
    def num_vectors(self) -> int:
        """Number of vectors per token, each with a scale in a quantised pool."""
        return math.prod(self.token_shape[:-1])

    def default_page_size(self, kv_dtype: jnp.dtype) -> int:
        """Return the default page size: about `COPY_BYTES` for a layer's page, but at most `COPY_TOKENS` tokens."""
        tokens = power_of_two(COPY_BYTES // token_bytes(self.num_matrices, self.used_columns, kv_dtype))
        return max(ALIGNED_TOKENS, slab_tokens(kv_dtype), min(tokens, COPY_TOKENS))

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the pool values' shape, `(L, N, M, P, C)`."""
        columns = round_up(self.used_columns, LANES) if self.is_latent else self.used_columns
        return (dims.num_layers, dims.num_pages, self.num_matrices, dims.page_size, columns)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return a quantised pool's scales' shape, `(L, N, slabs, rows, 128)`.

        A slab has 32 tokens; its scales are written with it. A row holds four vectors' scales per token.
        """
        return (*dims[:2], dims.page_size // SCALE_TOKENS, scale_rows(self.num_vectors), LANES)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Convert a pool from this layout to the canonical `[L, N, P, 2K, H]`, or `[L, N, P, W]` for latents."""
        values = values_of(kv_pages)
        L, N, _, P, _ = values.shape
        vectors = values[..., : self.used_columns].swapaxes(2, 3).reshape(L, N, P, *self.token_shape)
        if not isinstance(kv_pages, QuantizedPages):
            return vectors
        scales = scales_from_tiles(kv_pages.scales)[..., : self.num_vectors]
        return QuantizedPages(vectors, scales.reshape(vectors.shape[:-1]))

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Convert a pool from the canonical layout to this one."""
        values = values_of(kv_pages)
        L, N, P = values.shape[:3]
        *_, columns = self.kv_shape(PoolDims(L, N, P))
        values = values.reshape(L, N, P, self.num_matrices, self.used_columns).swapaxes(2, 3)
        values = jnp.pad(values, [(0, 0)] * 4 + [(0, columns - self.used_columns)])
        if not isinstance(kv_pages, QuantizedPages):
            return values
        return QuantizedPages(
            values, scales_to_tiles(kv_pages.scales.reshape(L, N, -1, SCALE_TOKENS, self.num_vectors))
        )

    def latents_at(
        self, kv_pages: Pages, layer: int | Int32[Array, ""], page: Int32[Array, "*N"], offset: Int32[Array, "*N"]
    ) -> Pages:
        """Return single tokens' latents in canonical form; their scales are in the first row of a slab."""
        values = values_of(kv_pages).at[layer, page, 0, offset].get(mode="clip")[..., : self.used_columns]
        if not isinstance(kv_pages, QuantizedPages):
            return values
        slab, index = offset // SCALE_TOKENS, offset % SCALE_TOKENS
        return QuantizedPages(values, kv_pages.scales.at[layer, page, slab, 0, index].get(mode="clip"))


def scales_from_tiles(tiles: BFloat16[Array, "L N slabs rows 128"]) -> BFloat16[Array, "L N P vectors"]:
    """Convert a pool's scales from tiles with 32 tokens to one axis for tokens and one for vectors.

    Padding vectors come last.
    """
    L, N, num_slabs, *_ = tiles.shape
    by_vector = tiles.reshape(L, N, num_slabs, -1, SCALE_HEADS, SCALE_TOKENS).transpose(0, 1, 2, 5, 4, 3)
    return by_vector.reshape(L, N, num_slabs * SCALE_TOKENS, -1)


def scales_to_tiles(scales: BFloat16[Array, "*slabs 32 vectors"]) -> BFloat16[Array, "*slabs rows 128"]:
    """Convert scales, with axes for slabs, the 32 tokens in a slab, and vectors, to the pool's layout.

    Element 32 i + t in row r is the scale for token t's vector `i * rows + r`.
    """
    slabs, num_vectors = scales.shape[:-2], scales.shape[-1]
    rows = scale_rows(num_vectors)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, SCALE_HEADS * rows - num_vectors)]
    tiles = jnp.pad(scales, padding).reshape(*slabs, SCALE_TOKENS, SCALE_HEADS, rows)
    return tiles.swapaxes(-1, -3).reshape(*slabs, rows, LANES)
