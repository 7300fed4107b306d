"""Division of a step's work: its queries cut into tiles, and the blocks of keys that they see cut into spans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tree import tree_starts
from jaxtyping import Array, Float, Int32

BLOCK_KV = 64  # upper bound of the tokens per block of keys
MAX_STAGES = 4
MAX_PART_COLUMNS = 128  # columns of values that the registers of a warpgroup hold beside all else
WIDE_PART_COLUMNS = 256  # upper bound of these columns: all else is kept small
WIDE_OUT_COLUMNS = 32  # columns of such a part that are stored at once
MIN_TILE_TOKENS = 8  # shared memory is filled eight tokens at a time
SCALES = 8  # scales of neighbouring heads: 16 bytes, the least that TMA fetches
MIN_SPAN = 4  # blocks of keys per worker at least: fewer are not worth the merge
MIN_TALL_TOKENS = 512  # steps of fewer tokens have only the kernel of short tiles

# Columns of the plan.
TABLE_ROW, BASE_TOKEN, LEAD, NUM_TOKENS, POSITION, KEY_END, FIRST_HEAD = range(7)
FIRST_BLOCK, NUM_BLOCKS, FIRST_UNIT, TREE_START = range(7, 11)
FIRST_ITEM, END_ITEM, SPAN_START, SPAN_END = range(4)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and resources of one kernel.

    Attributes:
        tokens: tokens per tile, a power of two; with all query heads of one KV head they fill its rows.
        row_parts: parts of 64 rows of a tile's matrix, one per warpgroup.
        column_parts: parts of the columns of values and output: two if a head needs the registers of two warpgroups.
        workers: workers per thread block, each with its own warpgroups, shared memory and span.
        num_cores: number of thread blocks, one for each multiprocessor.
        stages: blocks of keys and values in flight.
    """

    tokens: int
    row_parts: int
    column_parts: int
    workers: int
    num_cores: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a tile's matrix."""
        return self.row_parts * WARPGROUP_ROWS

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups that compute one tile."""
        return self.row_parts * self.column_parts

    @property
    def num_workers(self) -> int:
        """Number of workers in all thread blocks."""
        return self.workers * self.num_cores


@dataclass(frozen=True)
class Call:
    """Static facts of one call."""

    num_tokens: int
    """Queries of a KV head and a query head of its group: tokens of the step times `token_heads`."""
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    page_size: int
    dtype: jnp.dtype
    """Dtype of the products."""
    kv_dtype: jnp.dtype
    """Dtype of the pool: `dtype`, or a quantised one."""
    options: AttentionOptions
    has_sinks: bool
    has_tree: bool
    num_cores: int
    interpret: Any
    """Parameters of the interpreter; None to run on a GPU."""
    values_in_keys: bool = False
    """True if a value is the beginning of its key, so that the pool has one vector of both."""
    token_heads: int = 1
    """Query heads of a token that are tokens of their own here, one after the other: a multiple of eight, or one."""

    @property
    def is_quantized(self) -> bool:
        """Return whether keys and values have scales, with which they are multiplied before the products."""
        return self.kv_dtype != self.dtype

    @property
    def swizzle(self) -> int:
        """Bytes of a line of shared memory: a power of two that divides a key, a part of a value, and a block."""
        is_multiple = all(size % 64 == 0 for size in (self.key_dim, self.part_columns, self.block_kv))
        return 128 if is_multiple else 64

    @property
    def tile_columns(self) -> int:
        """Elements in a line of shared memory."""
        return self.swizzle // 2

    @property
    def is_wide(self) -> bool:
        """Return whether registers and shared memory hold little beside a tile's sums of values."""
        return self.value_dim > 2 * MAX_PART_COLUMNS

    @property
    def column_parts(self) -> int:
        """Parts of the columns of values: one for each warpgroup whose registers hold them."""
        return -(-self.value_dim // (WIDE_PART_COLUMNS if self.is_wide else MAX_PART_COLUMNS))

    @property
    def part_columns(self) -> int:
        """Columns of such a part."""
        return self.value_dim // self.column_parts

    @property
    def out_columns(self) -> int:
        """Columns of a part that are stored at once."""
        return WIDE_OUT_COLUMNS if self.is_wide else self.part_columns

    @property
    def out_shift(self) -> int:
        """Rows by which a tile's output is shifted in its buffer at most: a tile may begin among eight tokens."""
        return MIN_TILE_TOKENS if self.token_heads == 1 else 0

    @property
    def vectors_per_head(self) -> int:
        """Vectors that the pool has of a token and a KV head."""
        return 1 if self.values_in_keys else 2

    @property
    def block_kv(self) -> int:
        """Tokens per block of keys: BLOCK_KV, or half as many.

        Wide heads have the latter where shared memory has no room for two blocks of the former, or the masks of trees
        would take registers that scores of so many keys need.
        """
        fits = self._q_and_out_bytes(1) + 2 * self._block_bytes(BLOCK_KV) <= SHARED_BYTES and not self.has_tree
        return BLOCK_KV if fits or not self.is_wide else BLOCK_KV // 2

    def kinds(self) -> list[Tiles]:
        """Return the tiles for rows of few tokens and, in steps of many tokens, those for the other rows."""
        short, tall = self._short_tiles(), self._tiles(row_parts=2, workers=1)
        only_short = self.num_tokens < MIN_TALL_TOKENS or self.column_parts > 1
        return [short] if only_short or tall.tokens == short.tokens else [short, tall]

    def _short_tiles(self) -> Tiles:
        """Return tiles as low as the group allows, with two workers per thread block if their memory fits."""
        row_parts = 1 if self.group * MIN_TILE_TOKENS <= WARPGROUP_ROWS else 2
        return self._tiles(row_parts, workers=2 if row_parts == self.column_parts == 1 else 1)

    def _tiles(self, row_parts: int, workers: int) -> Tiles:
        rows = row_parts * WARPGROUP_ROWS
        q_and_out_bytes, block_bytes = self._q_and_out_bytes(row_parts), self._block_bytes(self.block_kv)
        fixed_bytes, stage_bytes = q_and_out_bytes, block_bytes
        if self.is_quantized:  # one block, multiplied with its scales, is stored beside the ring
            scale_bytes = self.block_kv * SCALES * SCALE_DTYPE.itemsize
            fixed_bytes, stage_bytes = q_and_out_bytes + block_bytes, block_bytes // 2 + scale_bytes
        stages = (SHARED_BYTES // workers - fixed_bytes) // stage_bytes
        # Stores to the output begin at shared addresses that are multiples of 128: unless each row of the output begins
        # at one, a head's tokens must begin in the part that stores them.
        most_tokens = rows if 2 * self.value_dim % 128 == 0 else WARPGROUP_ROWS
        return Tiles(
            tokens=min(1 << int(math.log2(rows // self.group)), most_tokens),
            row_parts=row_parts,
            column_parts=self.column_parts,
            workers=workers,
            num_cores=self.num_cores,
            stages=min(stages, MAX_STAGES),
        )

    def _q_and_out_bytes(self, row_parts: int) -> int:
        out_rows = row_parts * self.column_parts * (WARPGROUP_ROWS + self.out_shift)
        return 2 * (row_parts * WARPGROUP_ROWS * self.key_dim + out_rows * self.out_columns)

    def _block_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values in the dtype of the products."""
        return 2 * num_tokens * (self.key_dim + (0 if self.values_in_keys else self.value_dim))


class Queries(NamedTuple):
    """Queries of a step, rotated, and their rows."""

    q: Float[Array, "padded Q key"]
    """Queries of all tokens, padded to eight; those of heads that are tokens of their own follow each other."""
    rows: RaggedRows
    sinks: Float[Array, "Q"] | None = None
    tree_mask: Int32[Array, "T"] | None = None


class WorkPlan(NamedTuple):
    """Work of one kernel."""

    tiles: Int32[Array, "tiles 11"]
    """Columns TABLE_ROW ... TREE_START: where the pages of each tile's row are, its place, the blocks of keys that it
    sees, and the position of the first node of its row's tree.

    A tile begins at BASE_TOKEN of the step, a multiple of eight because shared memory is filled in eights: LEAD tokens
    of other rows come before its own NUM_TOKENS, the first of which is at POSITION of its sequence. It sees the keys
    before KEY_END. Where heads are tokens of their own, the first is head FIRST_HEAD of its token.
    """
    workers: Int32[Array, "workers 4"]
    """Columns FIRST_ITEM ... SPAN_END: work items and span of each worker."""


def plan(call: Call, tiles: Tiles, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> WorkPlan:
    """Cut `q_lens` tokens of each row into tiles, and the blocks of keys of all work items into equally long spans.

    A work item is a tile with one of its KV heads; it has a unit for every block of keys. The line of units has those
    of a tile for its first KV head, then for its second, and so on. A worker's span may begin and end inside a work
    item.
    """
    R, n, block_kv = q_lens.shape[0], call.token_heads, call.block_kv
    past_lens, starts, q_lens = rows.kv_lens - q_lens, rows.cu_q_lens[:-1] * n, q_lens * n
    num_tiles = min(call.num_tokens, call.num_tokens // tiles.tokens + 2 * R)
    leads = starts % MIN_TILE_TOKENS
    row_tiles = jnp.where(q_lens > 0, _ceil_div(leads + q_lens, tiles.tokens), 0)
    tile_ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(_count_up_to(tile_ends, tile), R - 1)
    start = (tile - (tile_ends - row_tiles)[row]) * tiles.tokens - leads[row]  # index among the row's tokens
    lead = jnp.maximum(-start, 0)
    num_tokens = jnp.where(tile < tile_ends[-1], jnp.minimum(q_lens[row] - start, tiles.tokens) - lead, 0)
    past_len, first = past_lens[row], start + lead
    position, key_end = past_len + first // n, past_len + (first + num_tokens - 1) // n + 1
    tree_start = tree_starts(rows)[row] if call.has_tree else past_len
    first_block = jnp.zeros_like(tile)
    if call.options.window is not None:
        shallowest = jnp.minimum(position, tree_start) if call.has_tree else position
        first_block = jnp.maximum(shallowest - call.options.window + 1, 0) // block_kv
    num_blocks = jnp.where(num_tokens > 0, _ceil_div(key_end, block_kv) - first_block, 0)
    ends = jnp.cumsum(num_blocks * call.num_kv_heads, dtype=jnp.int32)
    first_unit = ends - num_blocks * call.num_kv_heads
    tokens = (rows.table_rows(row), starts[row] + start, lead, num_tokens, position, key_end, first % n)
    columns = (*tokens, first_block, num_blocks, first_unit, tree_start)

    def item_of(unit: Int32[Array, "workers"]) -> Int32[Array, "workers"]:
        tile = jnp.minimum(_count_up_to(ends, unit), num_tiles - 1)
        return tile * call.num_kv_heads + (unit - first_unit[tile]) // jnp.maximum(num_blocks[tile], 1)

    span = jnp.maximum(_ceil_div(ends[-1], tiles.num_workers), MIN_SPAN)
    start = jnp.minimum(jnp.arange(tiles.num_workers, dtype=jnp.int32) * span, ends[-1])
    end = jnp.minimum(start + span, ends[-1])
    first_item = item_of(start)
    end_item = jnp.where(end > start, item_of(end - 1) + 1, first_item)
    return WorkPlan(jnp.stack(columns, axis=1), jnp.stack([first_item, end_item, start, end], axis=1))


def _ceil_div(x: Int32[Array, "*n"], divisor: int) -> Int32[Array, "*n"]:
    return (x + (divisor - 1)) // divisor


def _count_up_to(ends: Int32[Array, "n"], x: Int32[Array, "m"]) -> Int32[Array, "m"]:
    """Return how many of the ascending `ends` are at most x."""
    return jnp.sum(ends[None, :] <= x[:, None], axis=1, dtype=jnp.int32)
