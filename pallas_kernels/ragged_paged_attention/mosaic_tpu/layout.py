"""Layout of the pool in memory. See the package."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.layout import PoolDims, check_pool_shape
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import (
    LANES,
    SCALE_HEADS,
    SCALE_TOKENS,
    default_page_size,
    pair_columns,
    scale_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of
from jaxtyping import Array, BFloat16


@dataclass(frozen=True)
class HeadPairs:
    """Layout `[L, N, K, P, 2H]`: a head's keys and values side by side.

    Heads of 512 have their keys and values in matrices of their own, `[L, N, 2K, P, H]`, as `pair_columns` says: such a
    pool is that of twice as many heads of 256.
    """

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Return the tokens of a page of the size that suits copies."""
        return default_page_size(num_kv_heads, 2 * head_dim, kv_dtype)

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, K, P, 2H]`, or `[L, N, 2K, P, H]` for heads of 512."""
        columns = pair_columns(dims.head_dim)
        units = dims.num_kv_heads * columns.units
        return (dims.num_layers, dims.num_pages, units, dims.page_size, columns.unit_columns)

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of one memory tile for each slab of a page, so that it is written with the slab.

        A row of the tile holds 32 tokens of each of four vectors: those of the first heads come in the first row.
        """
        return (*dims[:2], dims.page_size // SCALE_TOKENS, scale_rows(2 * dims.num_kv_heads), LANES)

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`; heads of 512 are told as twice as many of 256."""
        check_pool_shape(shape, "[L, N, K, P, 2H]", even_axis=4)
        num_layers, num_pages, num_kv_heads, page_size, columns = shape
        return PoolDims(num_layers, num_pages, page_size, num_kv_heads, columns // 2)

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as `[L, N, P, 2K, H]`, its scales as `[L, N, P, 2K]`; heads of 512 as two of 256."""
        values = values_of(kv_pages)
        L, N, K, P, columns = values.shape
        heads = values.reshape(L, N, K, P, 2, columns // 2).transpose(0, 1, 3, 2, 4, 5)  # [L, N, P, K, 2, H]
        heads = heads.reshape(L, N, P, 2 * K, columns // 2)
        if not isinstance(kv_pages, QuantizedPages):
            return heads
        return QuantizedPages(heads, scales_of(kv_pages.scales)[..., : 2 * K])

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""
        values = values_of(kv_pages)
        L, N, P, num_heads, H = values.shape
        *_, units, _, columns = self.kv_shape(PoolDims(L, N, P, num_heads // 2, H))
        values = values.reshape(L, N, P, units, columns).swapaxes(2, 3)
        if not isinstance(kv_pages, QuantizedPages):
            return values
        return QuantizedPages(values, scale_tiles(kv_pages.scales.reshape(L, N, -1, SCALE_TOKENS, num_heads)))


def scales_of(tiles: BFloat16[Array, "L N slabs rows 128"]) -> BFloat16[Array, "L N P vectors"]:
    """Return the scales of the tokens of pages, with those of padding behind the others."""
    L, N, num_slabs, *_ = tiles.shape
    by_vector = tiles.reshape(L, N, num_slabs, -1, SCALE_HEADS, SCALE_TOKENS).transpose(0, 1, 2, 5, 4, 3)
    return by_vector.reshape(L, N, num_slabs * SCALE_TOKENS, -1)


def scale_tiles(scales: BFloat16[Array, "*slabs 32 vectors"]) -> BFloat16[Array, "*slabs rows 128"]:
    """Return scales of slabs in the layout of the pool."""
    slabs, num_vectors = scales.shape[:-2], scales.shape[-1]
    rows = scale_rows(num_vectors)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, SCALE_HEADS * rows - num_vectors)]
    tiles = jnp.pad(scales, padding).reshape(*slabs, SCALE_TOKENS, SCALE_HEADS, rows)
    return tiles.swapaxes(-1, -3).reshape(*slabs, rows, LANES)
