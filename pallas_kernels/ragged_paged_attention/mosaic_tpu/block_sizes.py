"""The kernel's static parameters, and block sizes that fit the vector memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import (
    ALIGNED_TOKENS,
    SCALE_HEADS,
    SUBLANES,
    HeadColumns,
    power_of_two,
    scale_rows,
    slab_tokens,
    token_bytes,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, has_scales
from jaxserve.pallas_kernels.tpu import LANES, round_up

PAGE_IDS = 128  # page ids per copy, the minimum
MAX_PAGE_TOKENS = 256
MAX_PAGE_BYTES = 3 * 2**20  # so that work items with one page fit into every supported chip
FETCH_S = 2.6e-6  # transfer time per work item that hides the issue of the next copies; assumed, not measured
WORK_ITEM_DOTS = 32  # matmuls per work item with decode slots: more take long to compile


@dataclass(frozen=True)
class BlockSizeLimits:
    """Block size limits for the TPU attention kernel; tuned or requested values replace the defaults.

    `choose_block_sizes` makes smaller blocks if VMEM requires it. The default of `work_item_bytes` depends on the chip
    (`default_work_item_bytes`).

    Attributes:
        work_item_bytes: maximum bytes of the keys and values in a work item.
        decode_keys: maximum keys per decode slot in a work item.
        tile_keys: maximum keys per tile in a work item.
        tile_rows: maximum rows in a query matrix.
        slots: work items whose pages are in VMEM: one in use, the others being copied.
    """

    work_item_bytes: int = 4 * 2**20
    decode_keys: int = 1024
    tile_keys: int = 512
    tile_rows: int = 512
    slots: int = 3

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not isinstance(value, int) or value < 2}
        if wrong:
            raise ValueError(f"block sizes must be integers of at least 2, got {wrong}")


def default_work_item_bytes(bytes_per_s: int, vmem_bytes: int) -> int:
    """Return the default bytes of keys and values per work item for a chip, rounded down to a power of two.

    HBM transfers them in `FETCH_S` seconds; they take at most a quarter of the VMEM.

    Args:
        bytes_per_s: HBM bandwidth of the chip.
        vmem_bytes: VMEM bytes that the kernel may use.
    """
    return min(power_of_two(int(FETCH_S * bytes_per_s)), power_of_two(vmem_bytes // 4))


@dataclass(frozen=True)
class KernelConfig:
    """Static parameters of the TPU attention kernel in one step."""

    num_tokens: int
    num_rows: int
    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    columns: HeadColumns
    page_size: int
    table_width: int
    kv_dtype: jnp.dtype
    """Dtype of the pool."""
    options: AttentionOptions
    has_sinks: bool
    has_tree: bool
    vmem_bytes: int
    """Bytes of vector memory (VMEM) that the kernel may use."""
    sizes: BlockSizeLimits
    interpret: Any
    """Parameters of the interpreter; None to run on a TPU."""
    num_parts: int = 1
    """Number of smaller pages per page, for a pool that was made for larger heads; page ids count the smaller pages."""

    @property
    def has_scales(self) -> bool:
        """True if the pool is quantised, with one scale per vector."""
        return has_scales(self.kv_dtype)

    @property
    def matmul_dtype(self) -> jnp.dtype:
        """Dtype of matmul operands: quantised elements are converted to it, and scales are applied to the results."""
        return jnp.dtype(jnp.bfloat16) if self.has_scales else self.kv_dtype

    @property
    def num_matrices(self) -> int:
        """Number of matrices per page."""
        return self.num_kv_heads * self.columns.num_matrices

    @property
    def num_query_heads(self) -> int:
        """Number of query heads, Q."""
        return self.num_kv_heads * self.group

    @property
    def padded_group(self) -> int:
        """Number of query heads per KV head, padded to whole memory tiles."""
        return round_up(self.group, SUBLANES)

    @property
    def slab(self) -> int:
        """Number of tokens per slab, the smallest part of a page that can be written: the rows in a memory tile."""
        return slab_tokens(self.kv_dtype)

    @property
    def num_vectors(self) -> int:
        """Number of vectors per token, each with a scale in a quantised pool."""
        return self.num_kv_heads * self.columns.num_vectors

    @property
    def token_bytes(self) -> int:
        """Number of bytes per token in one layer of the pool, without scales."""
        return token_bytes(self.num_kv_heads, self.columns.stored, self.kv_dtype)

    @property
    def scale_bytes(self) -> int:
        """Number of bytes for the scales of one slab; 0 without scales."""
        return scale_rows(self.num_vectors) * LANES * SCALE_DTYPE.itemsize if self.has_scales else 0


@dataclass(frozen=True)
class BlockSizes:
    """Block sizes of the TPU attention kernel that fit VMEM.

    Attributes:
        decode_slots: decode rows in a work item, which are processed together.
        decode_pages: pages per decode row in a work item: one key block.
        tile_tokens: query tokens per tile, for short tiles, and in large steps also for tall tiles.
        tile_pages: pages in a work item with a tile: one key block.
        slots: work items whose pages are in VMEM: one in use, the others being copied.
        writes: slabs being copied to VMEM, and equally many back to HBM.
    """

    decode_slots: int
    decode_pages: int
    tile_tokens: tuple[int, ...]
    tile_pages: int
    slots: int
    writes: int


def choose_block_sizes(config: KernelConfig) -> BlockSizes:
    """Return the largest block sizes within `config.sizes` that fit VMEM; small constant ones in the interpreter.

    Raises:
      ValueError: even the smallest blocks do not fit.
    """
    if config.interpret is not None:  # small, so that even short rows have several blocks
        kinds = (ALIGNED_TOKENS, 2 * ALIGNED_TOKENS) if config.num_tokens > 2 * ALIGNED_TOKENS else (ALIGNED_TOKENS,)
        return BlockSizes(
            2, max(1, 32 // config.page_size), kinds, max(1, 64 // config.page_size), config.sizes.slots, 2
        )
    for divisor in (1, 2, 4, 8, 16, 32):
        blocks = _blocks(config, divisor)
        if max(count(config, blocks) for count in (_decode_bytes, _tile_bytes, _write_bytes)) <= config.vmem_bytes:
            return blocks
    raise ValueError(
        f"{config.num_kv_heads} kv heads of {config.columns.key_dim} with {config.group} query heads each do not fit "
        f"the {config.vmem_bytes} bytes of vector memory; split the model over more chips"
    )


def _blocks(config: KernelConfig, divisor: int) -> BlockSizes:
    """Return the block sizes for limits that are divided by `divisor`, without regard to VMEM."""
    sizes = config.sizes
    work_item_tokens = max(1, sizes.work_item_bytes // divisor // config.token_bytes)
    max_decode_slots = work_item_tokens // max(LANES, config.page_size)
    decode_slots = max(1, min(SUBLANES, WORK_ITEM_DOTS // config.num_kv_heads, config.num_rows, max_decode_slots))
    decode_tokens = power_of_two(min(sizes.decode_keys, work_item_tokens // decode_slots))
    tile_tokens = power_of_two(min(sizes.tile_keys // divisor, work_item_tokens))
    tall = max(ALIGNED_TOKENS, min(LANES, power_of_two(sizes.tile_rows // min(config.group, 4))) // divisor)
    short_only = config.num_tokens <= 2 * ALIGNED_TOKENS or tall == ALIGNED_TOKENS
    return BlockSizes(
        decode_slots=decode_slots,
        decode_pages=max(1, min(decode_tokens // config.page_size, PAGE_IDS)),
        tile_tokens=(ALIGNED_TOKENS,) if short_only else (ALIGNED_TOKENS, tall),
        tile_pages=max(1, min(tile_tokens // config.page_size, PAGE_IDS)),
        slots=sizes.slots,
        writes=max(2, 8 // divisor),
    )


def _decode_bytes(config: KernelConfig, blocks: BlockSizes) -> int:
    """Return the VMEM bytes that the kernel uses while it attends with decode rows."""
    heads = blocks.decode_slots * config.num_kv_heads * config.padded_group
    work_item_bytes = blocks.decode_slots * blocks.decode_pages * _page_bytes(config)
    scores_bytes = 3 * heads * blocks.decode_pages * config.page_size * 4
    converted_bytes = _dequantised_bytes(config, config.num_kv_heads, blocks.decode_slots, blocks.decode_pages)
    queries_bytes = blocks.slots * heads * round_up(config.columns.keys, LANES) * 4
    outputs_bytes = 3 * heads * round_up(config.columns.sums, LANES) * 4
    return blocks.slots * work_item_bytes + queries_bytes + outputs_bytes + scores_bytes + converted_bytes


def _tile_bytes(config: KernelConfig, blocks: BlockSizes) -> int:
    """Return the VMEM bytes that the kernel uses while it attends with query tiles."""
    tokens = max(blocks.tile_tokens)
    queries = config.num_query_heads * tokens
    slot_bytes = queries * round_up(config.columns.keys, LANES) * config.matmul_dtype.itemsize
    outputs_bytes = 2 * queries * round_up(config.columns.sums, LANES) * config.matmul_dtype.itemsize
    state_bytes = queries * (round_up(config.columns.sums, LANES) + 2 * LANES) * 4
    scores_bytes = 4 * heads_per_matmul(config, tokens) * tokens * blocks.tile_pages * config.page_size * 4
    work_item_bytes = blocks.tile_pages * _page_bytes(config)
    converted_bytes = _dequantised_bytes(config, 1, 1, blocks.tile_pages)
    return blocks.slots * (work_item_bytes + slot_bytes) + outputs_bytes + state_bytes + scores_bytes + converted_bytes


def _dequantised_bytes(config: KernelConfig, num_kv_heads: int, sequences: int, pages: int) -> int:
    """Return the VMEM bytes of dequantised keys and values, and of scales in float32; 0 for float pools.

    Args:
        config: static parameters.
        num_kv_heads: number of KV heads that are dequantised simultaneously.
        sequences: number of sequences per work item.
        pages: pages per sequence in a work item.
    """
    if not config.has_scales:
        return 0
    tokens = pages * config.page_size
    elements = num_kv_heads * tokens * round_up(config.columns.stored, LANES)
    scales = sequences * SCALE_HEADS * scale_rows(config.num_vectors) * round_up(tokens, LANES)
    return elements * config.matmul_dtype.itemsize + scales * 4


def _write_bytes(config: KernelConfig, blocks: BlockSizes) -> int:
    """Return the VMEM bytes that the kernel uses while it writes new keys and values to their pages."""
    new_bytes = config.num_kv_heads * (config.slab + SUBLANES) * round_up(config.columns.stored, LANES) * 4
    return 2 * blocks.writes * (new_bytes + config.slab * config.token_bytes + 2 * config.scale_bytes)


def _page_bytes(config: KernelConfig) -> int:
    """Return the bytes of one layer's page, including scales."""
    slabs = -(-config.page_size // config.slab)
    return slabs * (config.slab * config.token_bytes + config.scale_bytes)


def heads_per_matmul(config: KernelConfig, tile_tokens: int) -> int:
    """Return how many query heads' tiles, with `tile_tokens` rows each, are multiplied by the keys in one matmul.

    It divides `config.group`, so that these heads have the same KV head.
    """
    limit = max(1, config.sizes.tile_rows // tile_tokens)
    return max(n for n in range(1, min(config.group, limit) + 1) if config.group % n == 0)
