"""Columns of a token in the pool, and the memory tiles that they are in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind, Latents

LANES = 128  # elements in a row of a memory tile
SUBLANES = 8  # 32-bit rows of a memory tile
ALIGNED_TOKENS = 16  # alignment of a tile of queries: the rows of a memory tile of 16-bit elements
SCALE_TOKENS = 32  # tokens in a tile of scales: those of a slab of 8-bit elements
SCALE_HEADS = LANES // SCALE_TOKENS  # heads whose keys or values have their scales side by side in a row of such a tile
COPY_BYTES = 128 * 2**10  # 64 ns at 2 TB/s, the assumed, unmeasured cost of issuing a copy
APART_HEAD_DIM = 512  # least size of heads whose keys and values are matrices of their own
COPY_TOKENS = 128  # upper bound of the default page size


@dataclass(frozen=True)
class Columns:
    """Columns of what the pool stores of a token and a KV head, and those that the products take of them.

    A product takes columns from a multiple of LANES to another. Hence queries may have zeros where they are multiplied
    with columns of values, and some columns of a sum weighted over values may be those of keys, which are dropped.

    Attributes:
        key_dim: elements of a key, which begins at column 0.
        value_dim: elements of a value.
        first_value: column at which a value begins: 0 if it is the beginning of the key.
        stored: columns of the pool.
        units: matrices of a page that have these columns, as many each; keys and values are apart if there are two.
    """

    key_dim: int
    value_dim: int
    first_value: int
    stored: int
    units: int = 1

    @property
    def unit_columns(self) -> int:
        """Columns of one of these matrices."""
        return self.stored // self.units

    @property
    def keys(self) -> int:
        """Leading columns that are multiplied with queries."""
        return min(round_up(self.key_dim, LANES), self.stored)

    @property
    def values(self) -> tuple[int, int]:
        """Bounds of the columns of which weighted sums are computed."""
        end = self.first_value + self.value_dim
        return self.first_value // LANES * LANES, min(round_up(end, LANES), self.stored)

    @property
    def sums(self) -> int:
        """Columns of a weighted sum."""
        first, end = self.values
        return end - first

    @property
    def results(self) -> slice:
        """Columns of a weighted sum that are the value's."""
        first = self.first_value - self.values[0]
        return slice(first, first + self.value_dim)

    @property
    def num_vectors(self) -> int:
        """Number of vectors with a scale of their own: key and value, or one that is both."""
        return 2 if self.first_value else 1


def columns_for(kind: KVKind) -> Columns:
    """Return the columns that are stored for a KV head, or for a latent."""
    return latent_columns(kind.key_dim, kind.rank) if isinstance(kind, Latents) else pair_columns(kind.head_dim)


def pair_columns(head_dim: int) -> Columns:
    """Return the columns of a key followed by its value.

    Wide heads have them in separate matrices, so that pages of heads of 512 and of 256 have the same number of columns.
    """
    is_apart = head_dim >= APART_HEAD_DIM and head_dim % LANES == 0
    return Columns(head_dim, head_dim, head_dim, 2 * head_dim, 2 if is_apart else 1)


def latent_columns(width: int, rank: int) -> Columns:
    """Return the columns of a latent of `width` elements, whose first `rank` are its value, padded to memory tiles."""
    return Columns(width, rank, 0, round_up(width, LANES))


def token_bytes(num_kv_heads: int, stored: int, kv_dtype: jnp.dtype) -> int:
    """Return the bytes of a token in memory, with so many stored columns for each KV head."""
    return num_kv_heads * round_up(stored, LANES) * kv_dtype.itemsize


def slab_tokens(kv_dtype: jnp.dtype) -> int:
    """Return the tokens of a page that are written together: the rows of a memory tile."""
    return SUBLANES * 4 // kv_dtype.itemsize


def default_page_size(num_kv_heads: int, stored: int, kv_dtype: jnp.dtype) -> int:
    """Return the tokens of a page of the size that suits copies, but at most `COPY_TOKENS`."""
    tokens = power_of_two(COPY_BYTES // token_bytes(num_kv_heads, stored, kv_dtype))
    return max(ALIGNED_TOKENS, slab_tokens(kv_dtype), min(tokens, COPY_TOKENS))


def scale_rows(num_vectors: int) -> int:
    """Return the rows of a tile of scales: enough for the vectors of all heads, in whole memory tiles.

    Two rows of 16-bit elements share the words of a memory tile.
    """
    rows = max(2, -(-num_vectors // SCALE_HEADS))
    return 1 << (rows - 1).bit_length() if rows < SUBLANES else round_up(rows, SUBLANES)


def power_of_two(x: int) -> int:
    """Return the largest power of two up to x."""
    return 1 << int(math.log2(max(x, 1)))


def round_up(x: int, multiple: int) -> int:
    """Return the least multiple that is not below x."""
    return x + -x % multiple
