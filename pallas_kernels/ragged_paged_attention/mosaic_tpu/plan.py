"""Division of a step's work: block sizes that fit the chip's memory; lists of writes, decode slots and tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import (
    ALIGNED_TOKENS,
    LANES,
    SCALE_HEADS,
    SUBLANES,
    Columns,
    power_of_two,
    round_up,
    scale_rows,
    slab_tokens,
    token_bytes,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, has_scales
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tree import tree_starts
from jaxtyping import Array, Int32

PAGE_IDS = 128  # page ids fetched at once, the least possible
MAX_PAGE_TOKENS = 256
MAX_PAGE_BYTES = 3 * 2**20  # work items of one page must fit into the least memory of a supported chip
FETCH_S = 2.6e-6  # transfer time of a work item, assumed, unmeasured, to hide the cost of issuing the next copies
WORK_ITEM_DOTS = 32  # products per work item of decode slots: more take long to compile

# Columns of the plan.
PAGE, OFFSET, FIRST_TOKEN, BEGIN, END, NUM_WRITE_COLUMNS = range(6)
ROW, KV_LEN, FIRST_BLOCK, NUM_DECODE_COLUMNS = range(4)
TILE_ROW, BASE_TOKEN, LEAD, NUM_TOKENS, POSITION, TILE_FIRST_BLOCK, NUM_BLOCKS, TREE_START, NUM_TILE_COLUMNS = range(9)


@dataclass(frozen=True)
class Sizes:
    """Sizes that blocks should have if they fit the memory.

    The defaults hold without a measurement, except `unit_bytes`, which follow from the chip (`unit_bytes_for`).
    `choose_blocks` makes smaller blocks if these do not fit.

    Attributes:
        unit_bytes: bytes of keys and values in a work item.
        lane_keys: upper bound of the keys per decode slot in a work item.
        tile_keys: upper bound of the keys per tile in a work item.
        tile_rows: upper bound of the rows of a matrix of queries.
        slots: work items in memory: one in use, the others in flight.
    """

    unit_bytes: int = 4 * 2**20
    lane_keys: int = 1024
    tile_keys: int = 512
    tile_rows: int = 512
    slots: int = 3

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not isinstance(value, int) or value < 2}
        if wrong:
            raise ValueError(f"sizes of blocks must be integers of at least 2, got {wrong}")


def unit_bytes_for(bytes_per_s: int, vmem_bytes: int) -> int:
    """Return what main memory moves in FETCH_S, but at most a quarter of the memory that the kernel may use."""
    return min(power_of_two(int(FETCH_S * bytes_per_s)), power_of_two(vmem_bytes // 4))


@dataclass(frozen=True)
class Call:
    """Static facts of one call."""

    num_tokens: int
    num_rows: int
    num_kv_heads: int
    group: int
    columns: Columns
    page_size: int
    table_width: int
    kv_dtype: jnp.dtype
    """Dtype of the pool."""
    options: AttentionOptions
    has_sinks: bool
    has_tree: bool
    vmem_bytes: int
    """Vector memory of the chip that the kernel may use."""
    sizes: Sizes
    interpret: Any
    """Parameters of the interpreter; None to run on a TPU."""
    num_parts: int = 1
    """Pages of these heads in a page of a pool that was made for larger ones: the page table has their numbers."""

    @property
    def has_scales(self) -> bool:
        """Return whether the pool has scales."""
        return has_scales(self.kv_dtype)

    @property
    def product_dtype(self) -> jnp.dtype:
        """Dtype of the products: quantised keys and values are converted to it, and scales multiply the results."""
        return jnp.dtype(jnp.bfloat16) if self.has_scales else self.kv_dtype

    @property
    def num_units(self) -> int:
        """Matrices of a page."""
        return self.num_kv_heads * self.columns.units

    @property
    def num_query_heads(self) -> int:
        """Query heads of all KV heads."""
        return self.num_kv_heads * self.group

    @property
    def padded_group(self) -> int:
        """Query heads of a KV head, padded to whole rows of memory tiles."""
        return round_up(self.group, SUBLANES)

    @property
    def slab(self) -> int:
        """Tokens of a page that are written together."""
        return slab_tokens(self.kv_dtype)

    @property
    def num_vectors(self) -> int:
        """Vectors of a token with a scale of their own."""
        return self.num_kv_heads * self.columns.num_vectors

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, as stored in memory."""
        return token_bytes(self.num_kv_heads, self.columns.stored, self.kv_dtype)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a slab."""
        return scale_rows(self.num_vectors) * LANES * SCALE_DTYPE.itemsize if self.has_scales else 0


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        decode_slots: decode slots that are processed side by side.
        decode_pages: pages per decode slot in a work item.
        tile_tokens: queries per tile, for each kind of tiles; tiles of short rows come first.
        tile_pages: pages per tile in a work item.
        slots: work items in memory: one in use, the others in flight.
        writes: slabs in flight in either direction.
    """

    decode_slots: int
    decode_pages: int
    tile_tokens: tuple[int, ...]
    tile_pages: int
    slots: int
    writes: int


def choose_blocks(call: Call) -> Blocks:
    """Return the largest useful blocks that fit.

    Raises:
      ValueError: not even the smallest blocks fit.
    """
    if call.interpret is not None:  # small, so that even short rows have several blocks
        kinds = (ALIGNED_TOKENS, 2 * ALIGNED_TOKENS) if call.num_tokens > 2 * ALIGNED_TOKENS else (ALIGNED_TOKENS,)
        return Blocks(2, max(1, 32 // call.page_size), kinds, max(1, 64 // call.page_size), call.sizes.slots, 2)
    for divisor in (1, 2, 4, 8, 16, 32):
        blocks = _blocks(call, divisor)
        if max(_decode_bytes(call, blocks), _tile_bytes(call, blocks), _write_bytes(call, blocks)) <= call.vmem_bytes:
            return blocks
    raise ValueError(
        f"{call.num_kv_heads} kv heads of {call.columns.key_dim} with {call.group} query heads each do not fit the "
        f"{call.vmem_bytes} bytes of vector memory; split the model over more chips"
    )


def _blocks(call: Call, divisor: int) -> Blocks:
    sizes = call.sizes
    work_item_tokens = max(1, sizes.unit_bytes // divisor // call.token_bytes)
    max_decode_slots = work_item_tokens // max(LANES, call.page_size)
    decode_slots = max(1, min(SUBLANES, WORK_ITEM_DOTS // call.num_kv_heads, call.num_rows, max_decode_slots))
    decode_tokens = power_of_two(min(sizes.lane_keys, work_item_tokens // decode_slots))
    tile_tokens = power_of_two(min(sizes.tile_keys // divisor, work_item_tokens))
    tall = max(ALIGNED_TOKENS, min(LANES, power_of_two(sizes.tile_rows // min(call.group, 4))) // divisor)
    short_only = call.num_tokens <= 2 * ALIGNED_TOKENS or tall == ALIGNED_TOKENS
    return Blocks(
        decode_slots=decode_slots,
        decode_pages=max(1, min(decode_tokens // call.page_size, PAGE_IDS)),
        tile_tokens=(ALIGNED_TOKENS,) if short_only else (ALIGNED_TOKENS, tall),
        tile_pages=max(1, min(tile_tokens // call.page_size, PAGE_IDS)),
        slots=sizes.slots,
        writes=max(2, 8 // divisor),
    )


def _decode_bytes(call: Call, blocks: Blocks) -> int:
    heads = blocks.decode_slots * call.num_kv_heads * call.padded_group
    unit_bytes = blocks.decode_slots * blocks.decode_pages * _page_bytes(call)
    scores_bytes = 3 * heads * blocks.decode_pages * call.page_size * 4
    converted_bytes = _converted_bytes(call, call.num_kv_heads, blocks.decode_slots, blocks.decode_pages)
    queries_bytes = blocks.slots * heads * round_up(call.columns.keys, LANES) * 4
    outputs_bytes = 3 * heads * round_up(call.columns.sums, LANES) * 4
    return blocks.slots * unit_bytes + queries_bytes + outputs_bytes + scores_bytes + converted_bytes


def _tile_bytes(call: Call, blocks: Blocks) -> int:
    tokens = max(blocks.tile_tokens)
    queries = call.num_query_heads * tokens
    slot_bytes = queries * round_up(call.columns.keys, LANES) * call.product_dtype.itemsize
    outputs_bytes = 2 * queries * round_up(call.columns.sums, LANES) * call.product_dtype.itemsize
    state_bytes = queries * (round_up(call.columns.sums, LANES) + 2 * LANES) * 4
    scores_bytes = 4 * heads_together(call, tokens) * tokens * blocks.tile_pages * call.page_size * 4
    unit_bytes = blocks.tile_pages * _page_bytes(call)
    converted_bytes = _converted_bytes(call, 1, 1, blocks.tile_pages)
    return blocks.slots * (unit_bytes + slot_bytes) + outputs_bytes + state_bytes + scores_bytes + converted_bytes


def _converted_bytes(call: Call, num_kv_heads: int, sequences: int, pages: int) -> int:
    """Return the bytes of some heads' converted keys and values of a sequence and of all sequences' scales by token."""
    if not call.has_scales:
        return 0
    tokens = pages * call.page_size
    elements = num_kv_heads * tokens * round_up(call.columns.stored, LANES)
    scales = sequences * SCALE_HEADS * scale_rows(call.num_vectors) * round_up(tokens, LANES)
    return elements * call.product_dtype.itemsize + scales * 4


def _write_bytes(call: Call, blocks: Blocks) -> int:
    new_bytes = call.num_kv_heads * (call.slab + SUBLANES) * round_up(call.columns.stored, LANES) * 4
    return 2 * blocks.writes * (new_bytes + call.slab * call.token_bytes + 2 * call.scale_bytes)


def _page_bytes(call: Call) -> int:
    slabs = -(-call.page_size // call.slab)
    return slabs * (call.slab * call.token_bytes + call.scale_bytes)


def heads_together(call: Call, tile_tokens: int) -> int:
    """Return the query heads of one KV head whose queries form one matrix: a divisor of the group."""
    most = max(1, call.sizes.tile_rows // tile_tokens)
    return max(n for n in range(1, min(call.group, most) + 1) if call.group % n == 0)


class WorkPlan(NamedTuple):
    """Work of a step. All tables are flat, one entry's columns after the other's."""

    counts: Int32[Array, "n"]
    """Number of slabs to write, of work items of all groups of decode slots, and of work items of all tiles by kind."""
    writes: Int32[Array, "slab_columns"]
    """Columns PAGE ... END of slabs of pages: token FIRST_TOKEN of the step belongs in the slab's first row; the rows
    from BEGIN to END are new."""
    decode_slots: Int32[Array, "decode_columns"]
    """Columns ROW ... FIRST_BLOCK of rows with one token, most blocks first; KV_LEN is zero for unused slots."""
    groups: Int32[Array, "groups"]
    """Blocks of the longest decode slot of each group."""
    tiles: tuple[Int32[Array, "tile_columns"], ...]
    """Columns TILE_ROW ... TREE_START, for each kind. A tile begins at BASE_TOKEN of the step: LEAD tokens of other
    rows come before its own NUM_TOKENS, the first of which is at POSITION of its sequence; the nodes of its row's tree
    begin at TREE_START."""
    slot_of_token: Int32[Array, "T"]
    """Decode slot of each token that is the only one of its row; -1 for other tokens."""
    token_of_slot: Int32[Array, "decode_slots"]
    """Token of each decode slot; T for unused slots."""


def make_plan(call: Call, blocks: Blocks, rows: RaggedRows) -> WorkPlan:
    """Return the plan of a step."""
    T, q_lens = call.num_tokens, rows.live_q_lens()
    writes, num_writes = _plan_writes(call, rows, q_lens)
    is_decode = q_lens == 1
    decode_slots, groups, token_of_slot = _plan_decode_slots(call, blocks, rows, is_decode)
    decode_slot = jnp.arange(token_of_slot.shape[0], dtype=jnp.int32)
    counts, tiles = [num_writes, jnp.sum(groups)], []
    if T > 1:
        for tokens, chosen in zip(blocks.tile_tokens, _kinds(blocks, rows, q_lens), strict=True):
            table, num_work_items = _plan_tiles(call, blocks, tokens, rows, jnp.where(chosen, q_lens, 0))
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


def _kinds(blocks: Blocks, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> list[Array]:
    """Return masks of the rows of several tokens for each kind of tiles: low tiles take the rows that fit one."""
    several = q_lens > 1
    if len(blocks.tile_tokens) == 1:
        return [several]
    fits = rows.cu_q_lens[:-1] % ALIGNED_TOKENS + q_lens <= blocks.tile_tokens[0]
    return [several & fits, several & ~fits]


def _plan_writes(call: Call, rows: RaggedRows, q_lens: Int32[Array, "R"]) -> tuple[Int32[Array, "n"], Array]:
    T, R, slab = call.num_tokens, call.num_rows, call.slab
    past_lens = rows.kv_lens - q_lens
    first_slab = past_lens // slab
    num_slabs = jnp.where(q_lens > 0, _ceil_div(rows.kv_lens, slab) - first_slab, 0)
    ends = jnp.cumsum(num_slabs, dtype=jnp.int32)
    index = jnp.arange(min(T, T // slab + 2 * R), dtype=jnp.int32)
    row = jnp.minimum(_count_up_to(ends, index), R - 1)
    position = (first_slab[row] + index - (ends - num_slabs)[row]) * slab
    page = rows.page_table.at[row, position // call.page_size].get(mode="clip")
    first_token = rows.cu_q_lens[row] + position - past_lens[row]
    begin = jnp.maximum(rows.cu_q_lens[row] - first_token, 0)
    end = jnp.minimum(rows.cu_q_lens[row + 1] - first_token, slab)
    columns = (page, position % call.page_size, first_token, begin, end)
    return jnp.stack(columns, axis=1).reshape(-1), ends[-1]


def _plan_decode_slots(
    call: Call, blocks: Blocks, rows: RaggedRows, is_decode: Array
) -> tuple[Int32[Array, "n"], Int32[Array, "groups"], Int32[Array, "decode_slots"]]:
    block_tokens = blocks.decode_pages * call.page_size
    first_block = jnp.zeros_like(rows.kv_lens)
    if call.options.window is not None:
        first_block = jnp.maximum(rows.kv_lens - call.options.window, 0) // block_tokens
    num_blocks = jnp.where(is_decode, _ceil_div(rows.kv_lens, block_tokens) - first_block, 0)
    row = jnp.argsort(num_blocks, descending=True).astype(jnp.int32)
    row = jnp.pad(row, (0, -call.num_rows % blocks.decode_slots))  # padding has no blocks
    is_own = (jnp.arange(row.shape[0]) < call.num_rows) & is_decode[row]
    columns = (row, jnp.where(is_own, rows.kv_lens[row], 0), first_block[row])
    groups = jnp.where(is_own, num_blocks[row], 0)[:: blocks.decode_slots]
    return jnp.stack(columns, axis=1).reshape(-1), groups, jnp.where(is_own, rows.cu_q_lens[row], call.num_tokens)


def _plan_tiles(
    call: Call, blocks: Blocks, tile_tokens: int, rows: RaggedRows, q_lens: Int32[Array, "R"]
) -> tuple[Int32[Array, "n"], Array]:
    T, R = call.num_tokens, call.num_rows
    block_tokens = blocks.tile_pages * call.page_size
    leads = rows.cu_q_lens[:-1] % ALIGNED_TOKENS
    row_tiles = jnp.where(q_lens > 0, _ceil_div(leads + q_lens, tile_tokens), 0)
    tile_ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tile = jnp.arange(min(T, T // tile_tokens + 2 * R), dtype=jnp.int32)
    row = jnp.minimum(_count_up_to(tile_ends, tile), R - 1)
    start = (tile - (tile_ends - row_tiles)[row]) * tile_tokens - leads[row]  # index among the row's tokens
    lead = jnp.maximum(-start, 0)
    num_tokens = jnp.where(tile < tile_ends[-1], jnp.minimum(q_lens[row] - start, tile_tokens) - lead, 0)
    past_len = (rows.kv_lens - q_lens)[row]
    position = past_len + start + lead
    tree_start = tree_starts(rows)[row] if call.has_tree else past_len
    first_block = jnp.zeros_like(tile)
    if call.options.window is not None:
        first = jnp.minimum(position, tree_start) if call.has_tree else position
        first_block = jnp.maximum(first - call.options.window + 1, 0) // block_tokens
    num_blocks = jnp.where(num_tokens > 0, _ceil_div(position + num_tokens, block_tokens) - first_block, 0)
    columns = (row, rows.cu_q_lens[row] + start, lead, num_tokens, position, first_block, num_blocks, tree_start)
    return jnp.stack(columns, axis=1).reshape(-1), jnp.sum(num_blocks)


def _ceil_div(x: Int32[Array, "*n"], divisor: int) -> Int32[Array, "*n"]:
    return (x + (divisor - 1)) // divisor


def _count_up_to(ends: Int32[Array, "n"], x: Int32[Array, "m"]) -> Int32[Array, "m"]:
    """Return how many of the ascending `ends` are at most x."""
    return jnp.sum(ends[None, :] <= x[:, None], axis=1, dtype=jnp.int32)
