"""The kernels' static parameters, and the tile sizes that fit registers and shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE

BLOCK_KV = 64  # maximum tokens per key block
MAX_STAGES = 4
MAX_WARPGROUP_COLUMNS = 128  # value columns that fit into a warpgroup's registers with all else
WIDE_WARPGROUP_COLUMNS = 256  # maximum value columns per warpgroup, if all else is kept small
WIDE_OUT_COLUMNS = 32  # output columns per copy in that case
MIN_TILE_TOKENS = 8  # shared memory is filled eight tokens at a time
SCALES = 8  # adjacent scales per copy: 16 bytes, the TMA minimum
MIN_TALL_TOKENS = 512  # smaller steps launch only the kernel with short tiles


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and resources for one launch of the attention kernel.

    Attributes:
        tokens: query tokens per tile, a power of two; tokens times query heads per KV head fill the tile's rows.
        row_warpgroups: warpgroups that divide a tile's rows, 64 rows each.
        column_warpgroups: warpgroups that divide the value and output columns; two if one has too few registers.
        workers: workers per thread block, each with its own warpgroups, shared memory and span.
        num_cores: number of thread blocks, one per multiprocessor.
        stages: number of key blocks, with their values, in each worker's shared-memory ring.
    """

    tokens: int
    row_warpgroups: int
    column_warpgroups: int
    workers: int
    num_cores: int
    stages: int

    @property
    def rows(self) -> int:
        """Number of matrix rows per tile, one per token and query head."""
        return self.row_warpgroups * WARPGROUP_ROWS

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups that compute one tile."""
        return self.row_warpgroups * self.column_warpgroups

    @property
    def num_workers(self) -> int:
        """Number of workers in all thread blocks."""
        return self.workers * self.num_cores


@dataclass(frozen=True)
class KernelConfig:
    """Static parameters for the attention kernel and the merging kernel in one step."""

    num_tokens: int
    """Number of tokens in the step, times `token_heads`."""
    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    key_dim: int
    value_dim: int
    page_size: int
    dtype: jnp.dtype
    """Dtype of matmul operands."""
    kv_dtype: jnp.dtype
    """Dtype of the pool: `dtype`, or a quantised one."""
    options: AttentionOptions
    has_sinks: bool
    has_tree: bool
    num_cores: int
    interpret: Any
    """Parameters of the interpreter; None to run on a GPU."""
    values_in_keys: bool = False
    """True for latents: a key begins with its value, and the pool has one vector for both."""
    token_heads: int = 1
    """Number of query heads that the kernels process as consecutive tokens: a multiple of eight for latents, else one.
    """

    @property
    def is_quantized(self) -> bool:
        """True if the pool is quantised: keys and values must be multiplied by scales before matmuls."""
        return self.kv_dtype != self.dtype

    @property
    def swizzle(self) -> int:
        """Bytes per line of shared memory (TMA's swizzle), 128 or 64; lines divide keys, values and key blocks."""
        is_multiple = all(size % 64 == 0 for size in (self.key_dim, self.warpgroup_columns, self.block_kv))
        return 128 if is_multiple else 64

    @property
    def tile_columns(self) -> int:
        """Number of 16-bit elements per line of shared memory."""
        return self.swizzle // 2

    @property
    def is_wide(self) -> bool:
        """True if values are so wide that a tile's weighted sums fill most registers and shared memory."""
        return self.value_dim > 2 * MAX_WARPGROUP_COLUMNS

    @property
    def column_warpgroups(self) -> int:
        """Number of warpgroups whose registers together hold the value columns."""
        return -(-self.value_dim // (WIDE_WARPGROUP_COLUMNS if self.is_wide else MAX_WARPGROUP_COLUMNS))

    @property
    def warpgroup_columns(self) -> int:
        """Number of value columns per warpgroup."""
        return self.value_dim // self.column_warpgroups

    @property
    def out_columns(self) -> int:
        """Number of output columns that a warpgroup copies together from shared to global memory."""
        return WIDE_OUT_COLUMNS if self.is_wide else self.warpgroup_columns

    @property
    def out_shift(self) -> int:
        """Rows by which outputs may be shifted in their shared-memory buffer: 8, or 0 if query heads are tokens.

        A tile's own tokens may begin anywhere among eight tokens, but copies must begin at a multiple of eight.
        """
        return MIN_TILE_TOKENS if self.token_heads == 1 else 0

    @property
    def padded_tokens(self) -> int:
        """Tokens in the arrays for queries and outputs, a multiple of eight."""
        return self.num_tokens + -self.num_tokens % MIN_TILE_TOKENS

    @property
    def stores_rows(self) -> bool:
        """True if outputs are written row by row, False if by TMA."""
        return False

    @property
    def vectors_per_head(self) -> int:
        """Number of vectors in the pool per token and KV head."""
        return 1 if self.values_in_keys else 2

    @property
    def block_kv(self) -> int:
        """Tokens per key block: BLOCK_KV, or half as many for some wide heads.

        Blocks are halved if two larger ones do not fit into shared memory, or if tree masks need the registers.
        """
        fits = self._q_and_out_bytes(1) + 2 * self._block_bytes(BLOCK_KV) <= SHARED_BYTES and not self.has_tree
        return BLOCK_KV if fits or not self.is_wide else BLOCK_KV // 2

    def tilings(self) -> list[Tiling]:
        """Return the tile sizes of each launch: short tiles, and in steps with many tokens also tall tiles."""
        short, tall = self._short_tiling(), self._tiling(row_warpgroups=2, workers=1)
        only_short = self.num_tokens < MIN_TALL_TOKENS or self.column_warpgroups > 1
        return [short] if only_short or tall.tokens == short.tokens else [short, tall]

    def _short_tiling(self) -> Tiling:
        """Return the tile sizes for rows with few tokens.

        A thread block has two workers if each needs only one computing warpgroup.
        """
        row_warpgroups = 1 if self.group * MIN_TILE_TOKENS <= WARPGROUP_ROWS else 2
        return self._tiling(row_warpgroups, workers=2 if row_warpgroups == self.column_warpgroups == 1 else 1)

    def _tiling(self, row_warpgroups: int, workers: int) -> Tiling:
        """Return the tile sizes for tiles with `64 * row_warpgroups` rows, with as many ring stages as fit.

        Args:
            row_warpgroups: number of computing warpgroups that divide a tile's rows.
            workers: number of workers per thread block.
        """
        rows = row_warpgroups * WARPGROUP_ROWS
        q_and_out_bytes, block_bytes = self._q_and_out_bytes(row_warpgroups), self._block_bytes(self.block_kv)
        fixed_bytes, stage_bytes = q_and_out_bytes, block_bytes
        if self.is_quantized:  # one block of scaled keys and values is stored in addition to the ring
            scale_bytes = self.block_kv * SCALES * SCALE_DTYPE.itemsize
            fixed_bytes, stage_bytes = q_and_out_bytes + block_bytes, block_bytes // 2 + scale_bytes
        stages = (SHARED_BYTES // workers - fixed_bytes) // stage_bytes
        # Copies to the output begin at shared addresses that are multiples of 128: unless each output row does, one
        # warpgroup's rows must contain all tokens for a head.
        max_tokens = rows if 2 * self.value_dim % 128 == 0 else WARPGROUP_ROWS
        return Tiling(
            tokens=min(1 << int(math.log2(rows // self.group)), max_tokens),
            row_warpgroups=row_warpgroups,
            column_warpgroups=self.column_warpgroups,
            workers=workers,
            num_cores=self.num_cores,
            stages=min(stages, MAX_STAGES),
        )

    def _q_and_out_bytes(self, row_warpgroups: int) -> int:
        """Return the shared-memory bytes of a worker's queries and outgoing outputs."""
        out_rows = row_warpgroups * self.column_warpgroups * (WARPGROUP_ROWS + self.out_shift)
        return 2 * (row_warpgroups * WARPGROUP_ROWS * self.key_dim + out_rows * self.out_columns)

    def _block_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a block's keys and values, `num_tokens` tokens, in the 16-bit matmul dtype."""
        return 2 * num_tokens * (self.key_dim + (0 if self.values_in_keys else self.value_dim))
