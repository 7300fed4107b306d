"""Lists of a step's slabs, decode slots and tiles, which the device computes from the row lengths."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import ALIGNED_TOKENS
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tiles import ceil_div, cut_into_tiles, range_index
from jaxserve.pallas_kernels.ragged_paged_attention.tree import tree_starts

# Columns of the tables in `WorkPlan`.
PAGE, OFFSET, FIRST_TOKEN, BEGIN, END, NUM_WRITE_COLUMNS = range(6)
ROW, KV_LEN, FIRST_BLOCK, NUM_DECODE_COLUMNS = range(4)
TILE_ROW, BASE_TOKEN, LEAD, NUM_TOKENS, POSITION, TILE_FIRST_BLOCK, NUM_BLOCKS, TREE_START, NUM_TILE_COLUMNS = range(9)


class WorkPlan(NamedTuple):
    """Lists with a step's work for the kernel. Tables are flat: all columns for the first entry, then the second."""

    counts: Int32[Array, "lists"]
    """Number of slabs to write, then of work items: for decode slots, short tiles and tall tiles."""
    writes: Int32[Array, "slab_columns"]
    """Slabs to write, with columns PAGE ... END: the slab's rows BEGIN to END are new, and its first row would hold the
    step's token FIRST_TOKEN.
    """
    decode_slots: Int32[Array, "decode_columns"]
    """Decode rows, with columns ROW ... FIRST_BLOCK, most key blocks first; KV_LEN is zero for unused slots."""
    groups: Int32[Array, "groups"]
    """Key blocks for each decode slot group, whose slots are processed together: as many as its longest row has."""
    tiles: tuple[Int32[Array, "tile_columns"], ...]
    """Short tiles and tall tiles, with columns TILE_ROW ... TREE_START. A tile begins at the step's token BASE_TOKEN:
    LEAD tokens from other rows come before its own NUM_TOKENS. Its own first token is at POSITION in the sequence. The
    draft tree's first node is at TREE_START.
    """
    slot_of_token: Int32[Array, "T"]
    """Decode slot per decode token; -1 for other tokens."""
    token_of_slot: Int32[Array, "decode_slots"]
    """Token per decode slot; T for unused slots."""


def make_plan(config: KernelConfig, blocks: BlockSizes, rows: RaggedRows) -> WorkPlan:
    """List a step's work: slabs to write, decode slots for rows with one new token, and query tiles for longer rows."""
    T, q_lens = config.num_tokens, rows.live_q_lens()
    writes, num_writes = _plan_writes(config, rows, q_lens)
    is_decode = q_lens > 0 if config.options.last_only else q_lens == 1
    decode_slots, groups, token_of_slot = _plan_decode_slots(config, blocks, rows, is_decode)
    decode_slot = jnp.arange(token_of_slot.shape[0], dtype=jnp.int32)
    counts, tiles = [num_writes, jnp.sum(groups)], []
    if T > 1:
        for tokens, chosen in zip(
            blocks.tile_tokens, _tile_rows(blocks, rows, jnp.where(is_decode, 0, q_lens)), strict=True
        ):
            table, num_work_items = _plan_tiles(config, blocks, tokens, rows, jnp.where(chosen, q_lens, 0))
            tiles.append(table)
            counts.append(num_work_items)
    return WorkPlan(
        counts=jnp.stack(counts).astype(jnp.int32),
        writes=writes,
        decode_slots=decode_slots,
        groups=groups,
        tiles=tuple(tiles),
        slot_of_token=jnp.full((T,), -1, jnp.int32).at[token_of_slot].set(decode_slot, mode="drop"),
        token_of_slot=token_of_slot,
    )


def _tile_rows(blocks: BlockSizes, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> list[Array]:
    """Choose the tile size for each row with several new tokens: short if they fit into one short tile, else tall.

    Args:
        blocks: block sizes, with one or two tile sizes.
        rows: the step's rows.
        q_lens: new tokens per row.

    Returns:
        Row mask, `[R]`, for each tile size.
    """
    several = q_lens > 1
    if len(blocks.tile_tokens) == 1:
        return [several]
    fits = rows.cu_q_lens[:-1] % ALIGNED_TOKENS + q_lens <= blocks.tile_tokens[0]
    return [several & fits, several & ~fits]


def _plan_writes(config: KernelConfig, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> tuple[Int32[Array, "n"], Array]:
    """List the slabs of KV pages to which a step writes, given each row's number of new tokens.

    A slab is the smallest part of a page that can be written, `config.slab` tokens.

    Returns:
        `WorkPlan.writes`, and the number of slabs.
    """
    T, R, slab = config.num_tokens, config.num_rows, config.slab
    past_lens = rows.kv_lens - q_lens
    first_slab = past_lens // slab
    num_slabs = jnp.where(q_lens > 0, ceil_div(rows.kv_lens, slab) - first_slab, 0)
    ends = jnp.cumsum(num_slabs, dtype=jnp.int32)
    index = jnp.arange(min(T, T // slab + 2 * R), dtype=jnp.int32)
    row = jnp.minimum(range_index(ends, index), R - 1)
    position = (first_slab[row] + index - (ends - num_slabs)[row]) * slab
    page = rows.page_table.at[row, position // config.page_size].get(mode="clip")
    first_token = rows.cu_q_lens[row] + position - past_lens[row]
    begin = jnp.maximum(rows.cu_q_lens[row] - first_token, 0)
    end = jnp.minimum(rows.cu_q_lens[row + 1] - first_token, slab)
    columns = (page, position % config.page_size, first_token, begin, end)
    return jnp.stack(columns, axis=1).reshape(-1), ends[-1]


def _plan_decode_slots(
    config: KernelConfig, blocks: BlockSizes, rows: RaggedRows, is_decode: Array
) -> tuple[Int32[Array, "n"], Int32[Array, "groups"], Int32[Array, "decode_slots"]]:
    """Assign the rows with one new token to decode slots, and divide these into groups.

    Args:
        config: static parameters.
        blocks: block sizes.
        rows: the step's rows.
        is_decode: mask for the rows with one new token, `[R]`.

    Returns:
        `WorkPlan.decode_slots`, `WorkPlan.groups` and `WorkPlan.token_of_slot`.
    """
    block_tokens = blocks.decode_pages * config.page_size
    first_block = jnp.zeros_like(rows.kv_lens)
    if config.options.window is not None:
        first_block = jnp.maximum(rows.kv_lens - config.options.window, 0) // block_tokens
    num_blocks = jnp.where(is_decode, ceil_div(rows.kv_lens, block_tokens) - first_block, 0)
    row = jnp.argsort(num_blocks, descending=True).astype(jnp.int32)
    row = jnp.pad(row, (0, -config.num_rows % blocks.decode_slots))  # padding has no blocks
    is_own = (jnp.arange(row.shape[0]) < config.num_rows) & is_decode[row]
    columns = (row, jnp.where(is_own, rows.kv_lens[row], 0), first_block[row])
    groups = jnp.where(is_own, num_blocks[row], 0)[:: blocks.decode_slots]
    return (
        jnp.stack(columns, axis=1).reshape(-1),
        groups,
        jnp.where(is_own, rows.cu_q_lens[row + 1] - 1, config.num_tokens),
    )


def _plan_tiles(
    config: KernelConfig, blocks: BlockSizes, tile_tokens: int, rows: RaggedRows, q_lens: Int32[Array, "R"]
) -> tuple[Int32[Array, "n"], Array]:
    """Cut the new tokens of some rows into query tiles of one size, and list the tiles.

    Args:
        config: static parameters.
        blocks: block sizes.
        tile_tokens: tokens per tile.
        rows: the step's rows.
        q_lens: new tokens per row; zero for rows that have tiles of the other size, or decode slots.

    Returns:
        An element of `WorkPlan.tiles`, and the number of work items. A work item is a tile with one key block that its
        tokens see.
    """
    T, block_tokens = config.num_tokens, blocks.tile_pages * config.page_size
    row, start, lead, num_tokens = cut_into_tiles(
        rows.cu_q_lens[:-1],
        q_lens,
        tile_tokens=tile_tokens,
        alignment=ALIGNED_TOKENS,
        num_tiles=min(T, T // tile_tokens + 2 * config.num_rows),
    )
    past_len = (rows.kv_lens - q_lens)[row]
    position = past_len + start + lead
    tree_start = tree_starts(rows)[row] if config.has_tree else past_len
    first_block = jnp.zeros_like(num_tokens)
    if config.options.window is not None:
        first = jnp.minimum(position, tree_start) if config.has_tree else position
        first_block = jnp.maximum(first - config.options.window + 1, 0) // block_tokens
    num_blocks = jnp.where(num_tokens > 0, ceil_div(position + num_tokens, block_tokens) - first_block, 0)
    columns = (row, rows.cu_q_lens[row] + start, lead, num_tokens, position, first_block, num_blocks, tree_start)
    return jnp.stack(columns, axis=1).reshape(-1), jnp.sum(num_blocks)
