"""Work division: new tokens are cut into tiles, and the key blocks that tiles see into spans."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import MIN_TILE_TOKENS, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tiles import ceil_div, cut_into_tiles, range_index
from jaxserve.pallas_kernels.ragged_paged_attention.tree import tree_starts

MIN_SPAN = 4  # minimum number of units per worker: fewer are not worth the merge

# Columns of the tables in `WorkPlan`.
TABLE_ROW, BASE_TOKEN, LEAD, NUM_TOKENS, POSITION, KEY_END, FIRST_HEAD = range(7)
FIRST_BLOCK, NUM_BLOCKS, FIRST_UNIT, TREE_START = range(7, 11)
FIRST_ITEM, END_ITEM, SPAN_START, SPAN_END = range(4)


class WorkPlan(NamedTuple):
    """Work for one launch of the attention kernel: query tiles, and each worker's range of key blocks."""

    tiles: Int32[Array, "tiles 11"]
    """One row per tile, with columns TABLE_ROW ... TREE_START.

    TABLE_ROW is the row in the page table. A tile begins at the step's token BASE_TOKEN, a multiple of eight because
    shared memory is filled eight tokens at a time: LEAD tokens from other rows come before its own NUM_TOKENS. Its own
    first token is at POSITION in the sequence, and its last token sees the keys before KEY_END. If query heads are
    tokens, the first is head FIRST_HEAD. The tile sees NUM_BLOCKS key blocks from FIRST_BLOCK on; their units begin at
    FIRST_UNIT. The draft tree's first node is at TREE_START.
    """
    workers: Int32[Array, "workers 4"]
    """One row per worker: its work items FIRST_ITEM to END_ITEM, and its span with the units SPAN_START to SPAN_END."""


def plan_work(config: KernelConfig, tiling: Tiling, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> WorkPlan:
    """Cut the rows' new tokens into tiles, and the key blocks that these see into equal spans, one per worker.

    A work item is a tile with one KV head. A unit is a work item with one key block. Units are ordered by tile, then KV
    head, then block; a span is a range of units, and may begin and end inside a work item.

    Args:
        config: static parameters.
        tiling: tile sizes and number of workers.
        rows: the step's rows.
        q_lens: new tokens per row, or zero for rows that the other launch handles.
    """
    n, block_kv = config.token_heads, config.block_kv
    past_lens, starts, q_lens = rows.kv_lens - q_lens, rows.cu_q_lens[:-1] * n, q_lens * n
    num_tiles = min(config.num_tokens, config.num_tokens // tiling.tokens + 2 * q_lens.shape[0])
    row, start, lead, num_tokens = cut_into_tiles(
        starts, q_lens, tile_tokens=tiling.tokens, alignment=MIN_TILE_TOKENS, num_tiles=num_tiles
    )
    past_len, first = past_lens[row], start + lead
    position, key_end = past_len + first // n, past_len + (first + num_tokens - 1) // n + 1
    tree_start = tree_starts(rows)[row] if config.has_tree else past_len
    first_block = jnp.zeros_like(num_tokens)
    if config.options.window is not None:
        shallowest = jnp.minimum(position, tree_start) if config.has_tree else position
        first_block = jnp.maximum(shallowest - config.options.window + 1, 0) // block_kv
    num_blocks = jnp.where(num_tokens > 0, ceil_div(key_end, block_kv) - first_block, 0)
    ends = jnp.cumsum(num_blocks * config.num_kv_heads, dtype=jnp.int32)
    first_unit = ends - num_blocks * config.num_kv_heads
    tokens = (rows.table_rows(row), starts[row] + start, lead, num_tokens, position, key_end, first % n)
    columns = (*tokens, first_block, num_blocks, first_unit, tree_start)

    def work_item_at(unit: Int32[Array, "workers"]) -> Int32[Array, "workers"]:
        tile = jnp.minimum(range_index(ends, unit), num_tiles - 1)
        return tile * config.num_kv_heads + (unit - first_unit[tile]) // jnp.maximum(num_blocks[tile], 1)

    span = jnp.maximum(ceil_div(ends[-1], tiling.num_workers), MIN_SPAN)
    start = jnp.minimum(jnp.arange(tiling.num_workers, dtype=jnp.int32) * span, ends[-1])
    end = jnp.minimum(start + span, ends[-1])
    first_item = work_item_at(start)
    end_item = jnp.where(end > start, work_item_at(end - 1) + 1, first_item)
    return WorkPlan(jnp.stack(columns, axis=1), jnp.stack([first_item, end_item, start, end], axis=1))
