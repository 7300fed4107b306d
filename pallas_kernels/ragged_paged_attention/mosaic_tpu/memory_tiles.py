"""The columns for one KV head in a page, and the memory tiles that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind, Latents
from jaxserve.pallas_kernels.tpu import LANES, round_up

SUBLANES = 8  # 32-bit rows per memory tile
ALIGNED_TOKENS = 16  # alignment for query tiles: rows per memory tile with 16-bit elements
SCALE_TOKENS = 32  # tokens per scale tile: rows per memory tile with 8-bit elements
SCALE_HEADS = LANES // SCALE_TOKENS  # vectors whose scales are adjacent in a row of a scale tile
COPY_BYTES = 128 * 2**10  # 64 ns at 2 TB/s: time to issue a copy; assumed, not measured
SEPARATE_HEAD_DIM = 512  # minimum head dim for which keys and values have separate matrices
COPY_TOKENS = 128  # maximum default page size


@dataclass(frozen=True)
class HeadColumns:
    """Columns for one KV head's key and value in a page's matrices, and the columns that matmuls read.

    Matmuls read columns in multiples of LANES. So queries may be padded with zeros, by which value columns are
    multiplied, and weighted sums may contain key columns, which are dropped.

    Attributes:
        key_dim: size of a key, which begins at column 0.
        value_dim: size of a value.
        first_value: first value column: 0 if the key begins with the value.
        stored: stored columns, in all the head's matrices together.
        num_matrices: matrices per KV head: two if keys and values are separate.
    """

    key_dim: int
    value_dim: int
    first_value: int
    stored: int
    num_matrices: int = 1

    @property
    def matrix_columns(self) -> int:
        """Number of columns per matrix."""
        return self.stored // self.num_matrices

    @property
    def keys(self) -> int:
        """Number of leading columns that are multiplied with queries."""
        return min(round_up(self.key_dim, LANES), self.stored)

    @property
    def values(self) -> tuple[int, int]:
        """First and end column whose weighted sums are computed: the value, aligned to LANES."""
        end = self.first_value + self.value_dim
        return self.first_value // LANES * LANES, min(round_up(end, LANES), self.stored)

    @property
    def sums(self) -> int:
        """Number of columns in a weighted sum."""
        first, end = self.values
        return end - first

    @property
    def results(self) -> slice:
        """Slice that selects the value's columns in a weighted sum."""
        first = self.first_value - self.values[0]
        return slice(first, first + self.value_dim)

    @property
    def num_vectors(self) -> int:
        """Number of vectors that have a scale: key and value, or one latent."""
        return 2 if self.first_value else 1


def columns_for(kind: KVKind) -> HeadColumns:
    """Return the columns for a KV head's key and value, or for a latent, in a page."""
    return latent_columns(kind.key_dim, kind.rank) if isinstance(kind, Latents) else pair_columns(kind.head_dim)


def pair_columns(head_dim: int) -> HeadColumns:
    """Return the columns for a KV head's key followed by its value, each with `head_dim` elements.

    Wide heads have them in separate matrices, so that pages for head dims 512 and 256 have the same number of columns.
    """
    is_apart = head_dim >= SEPARATE_HEAD_DIM and head_dim % LANES == 0
    return HeadColumns(head_dim, head_dim, head_dim, 2 * head_dim, 2 if is_apart else 1)


def latent_columns(width: int, rank: int) -> HeadColumns:
    """Return the columns for a latent with `width` elements, padded to memory tiles; the first `rank` are the value."""
    return HeadColumns(width, rank, 0, round_up(width, LANES))


def token_bytes(num_kv_heads: int, stored: int, kv_dtype: jnp.dtype) -> int:
    """Return the HBM bytes per token in a layer's pages, with `stored` columns per KV head, padded to memory tiles."""
    return num_kv_heads * round_up(stored, LANES) * kv_dtype.itemsize


def slab_tokens(kv_dtype: jnp.dtype) -> int:
    """Return how many tokens a slab has, which are written together: the rows in a memory tile."""
    return SUBLANES * 4 // kv_dtype.itemsize


def scale_rows(num_vectors: int) -> int:
    """Return how many rows with 128 scales each hold the scales for 32 tokens, `num_vectors` per token.

    It is padded to sizes that a copy can address: each 32-bit word in a memory tile has 16-bit elements from two rows.
    """
    rows = max(2, -(-num_vectors // SCALE_HEADS))
    return 1 << (rows - 1).bit_length() if rows < SUBLANES else round_up(rows, SUBLANES)


def power_of_two(x: int) -> int:
    """Round x down to a power of two, at least 1."""
    return 1 << int(math.log2(max(x, 1)))
