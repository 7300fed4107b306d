"""The kernel's operands, the references to them, and the conversion of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped

from jaxserve.pallas_kernels.kernel_values import Ref
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import PAGE_IDS, BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import scales_to_tiles
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import (
    ALIGNED_TOKENS,
    SCALE_TOKENS,
    SUBLANES,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import LOG2E
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import FIRST_TOKEN, NUM_WRITE_COLUMNS, WorkPlan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, quantize, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes
from jaxserve.pallas_kernels.tpu import LANES


class Operands(NamedTuple):
    """Arrays that the kernel reads in addition to its plan; as references in the kernel, they are in HBM, sinks not."""

    page_ids: Int32[Array, "chunks 1 128"]
    """Page table, cut into chunks that can be fetched."""
    new: Float32[Array, "matrices padded columns"]
    """New keys and values per token, in the columns of a page; `slab` padding tokens come first, more padding last."""
    decode_queries: Float32[Array, "decode_slots K padded_group keys"]
    """Queries of the decode slots' tokens."""
    tile_queries: Shaped[Array, "Q padded keys"]
    """Queries of all tokens, padded at the end so that every tile lies inside."""
    decode_sinks: Float32[Array, "rows 128"]
    """Sink logits for all query heads in a decode slot, in base 2."""
    tile_sinks: Float32[Array, "Q"]
    """Sink logits, in base 2."""
    nodes: Int32[Array, "padded columns"]
    """`visible_nodes` per token."""
    kv_pages: Shaped[Array, "L N matrices P columns"]
    """The pool."""
    new_scales: BFloat16[Array, "slabs rows 128"] | None = None
    """Scales for the tokens in each written slab, in the pool's layout; None without scales."""
    scales: BFloat16[Array, "L N slabs rows 128"] | None = None
    """The pool's scales."""


class Refs(NamedTuple):
    """The kernel's references: lists of `WorkPlan` in SMEM, operands, and results in HBM."""

    layer: Ref
    counts: Ref
    writes: Ref
    decode_slots: Ref
    groups: Ref
    tiles: tuple[Any, ...]
    inputs: Operands
    kv_pages: Ref  # the updated pool
    scales: Ref  # None for pools without scales
    decode_out: Ref
    tile_out: Ref


def make_operands(
    config: KernelConfig, blocks: BlockSizes, plan: WorkPlan, inputs: AttentionInputs, kv_pages: Pages
) -> Operands:
    """Convert a step's arrays to the kernel's operands: pad, transpose and quantise them.

    Args:
        config: static parameters.
        blocks: block sizes.
        plan: the step's work lists.
        inputs: queries, keys and values after RoPE, and the rows.
        kv_pages: the pool.
    """
    q, sinks = inputs.q, inputs.sinks
    vectors = (inputs.k,) if inputs.v is None else (inputs.k, inputs.v)
    new_scales = None
    if isinstance(kv_pages, QuantizedPages):
        vectors, scales = zip(*(quantize(x, config.kv_dtype) for x in vectors), strict=True)
        new_scales = _new_scales(config, plan, scales)
    return Operands(
        page_ids=_page_ids(config, inputs.rows),
        new=_new(config, vectors),
        decode_queries=_decode_queries(config, plan, q),
        tile_queries=_tile_queries(config, blocks, q),
        decode_sinks=_decode_sinks(config, sinks),
        tile_sinks=jnp.zeros((q.shape[1],), jnp.float32) if sinks is None else sinks.astype(jnp.float32) * LOG2E,
        nodes=_nodes(config, blocks, inputs.tree_mask, inputs.rows),
        kv_pages=values_of(kv_pages),
        new_scales=new_scales,
        scales=kv_pages.scales if isinstance(kv_pages, QuantizedPages) else None,
    )


def token_outputs(
    config: KernelConfig,
    plan: WorkPlan,
    rows: RaggedRows,
    decode_out: Float32[Array, "decode_slots K padded_group sums"],
    tile_out: Shaped[Array, "Q padded sums"],
) -> Float32[Array, "T Q value"]:
    """Collect each token's output from the kernel's results; return zeros for padding tokens.

    Args:
        config: static parameters.
        plan: the step's work lists, which assign tokens to decode slots.
        rows: the step's rows.
        decode_out: outputs by decode slot.
        tile_out: outputs by query head and token, for tokens in tiles.
    """
    results = config.columns.results
    decode_outputs = decode_out[:, :, : config.group, results].reshape(
        -1, config.num_query_heads, config.columns.value_dim
    )
    decode_outputs = decode_outputs.at[plan.slot_of_token].get(mode="clip")
    if config.num_tokens == 1:
        tile_outputs = jnp.zeros_like(decode_outputs)
    else:
        tile_outputs = tile_out[:, : config.num_tokens, results].swapaxes(0, 1).astype(jnp.float32)
    is_live = jnp.arange(config.num_tokens, dtype=jnp.int32) < rows.cu_q_lens[rows.num_rows]
    has_slot = (plan.slot_of_token >= 0)[:, None, None]
    return jnp.where(has_slot, decode_outputs, jnp.where(is_live[:, None, None], tile_outputs, 0))


def _page_ids(config: KernelConfig, rows: RaggedRows) -> Int32[Array, "chunks 1 128"]:
    """Return the page table in chunks of 128 page ids, as many as one copy fetches; each row starts a new chunk."""
    table = jnp.pad(rows.page_table, ((0, 0), (0, -config.table_width % PAGE_IDS)))
    return table.reshape(-1, 1, PAGE_IDS)


def _new(config: KernelConfig, vectors: Sequence[Shaped[Array, "T K _"]]) -> Float32[Array, "matrices padded columns"]:
    """Return `Operands.new` for new keys and values, or latents (`vectors`).

    It is float32, since the kernel cannot shift single rows with narrower dtypes in VMEM.
    """
    new = jnp.concatenate([x.astype(jnp.float32) for x in vectors], axis=-1)  # [T, K, columns]
    new = new.reshape(config.num_tokens, config.num_matrices, -1).swapaxes(0, 1)
    padding = -config.num_tokens % SUBLANES + config.slab + SUBLANES
    return jnp.pad(new, ((0, 0), (config.slab, padding), (0, config.columns.matrix_columns - new.shape[-1])))


def _new_scales(
    config: KernelConfig, plan: WorkPlan, vector_scales: Sequence[BFloat16[Array, "T K"]]
) -> BFloat16[Array, "slabs rows 128"]:
    """Arrange new scales by written slab, in the pool's layout: an array for keys, one for values, or for latents."""
    scales = jnp.stack(vector_scales, axis=-1).reshape(config.num_tokens, config.num_vectors)
    first_token = plan.writes.reshape(-1, NUM_WRITE_COLUMNS)[:, FIRST_TOKEN]
    token = first_token[:, None] + jnp.arange(SCALE_TOKENS, dtype=jnp.int32)[None, :]
    return scales_to_tiles(scales.at[token].get(mode="clip"))


def _decode_queries(
    config: KernelConfig, plan: WorkPlan, q: Float[Array, "T Q key"]
) -> Float32[Array, "decode_slots K padded_group keys"]:
    """Gather the decode slots' queries from all tokens' queries `q`, padded to whole memory tiles."""
    queries = q.at[plan.token_of_slot].get(mode="clip").astype(jnp.float32)
    queries = queries.reshape(-1, config.num_kv_heads, config.group, config.columns.key_dim)
    columns = config.columns.keys - config.columns.key_dim
    return jnp.pad(queries, ((0, 0), (0, 0), (0, config.padded_group - config.group), (0, columns)))


def _padded_tokens(config: KernelConfig, blocks: BlockSizes) -> int:
    """Return how many padding tokens to append to all tokens, so that every query tile lies inside the array."""
    return -config.num_tokens % ALIGNED_TOKENS + max(blocks.tile_tokens)


def _tile_queries(
    config: KernelConfig, blocks: BlockSizes, q: Float[Array, "T Q key"]
) -> Shaped[Array, "Q padded keys"]:
    """Return `Operands.tile_queries` for all tokens' queries `q`, in the matmul dtype."""
    queries = q.astype(config.matmul_dtype).swapaxes(0, 1)  # [Q, T, key]
    columns = config.columns.keys - config.columns.key_dim
    return jnp.pad(queries, ((0, 0), (0, _padded_tokens(config, blocks)), (0, columns)))


def _decode_sinks(config: KernelConfig, sinks: Float[Array, "Q"] | None) -> Float32[Array, "rows 128"]:
    """Return `Operands.decode_sinks` for one logit per query head: repeated in 128 columns, zeros without sinks."""
    if sinks is None:
        return jnp.zeros((config.num_kv_heads * config.padded_group, LANES), jnp.float32)
    heads = (sinks.astype(jnp.float32) * LOG2E).reshape(config.num_kv_heads, config.group)
    rows = jnp.pad(heads, ((0, 0), (0, config.padded_group - config.group))).reshape(-1, 1)
    return jnp.broadcast_to(rows, (rows.shape[0], LANES))


def _nodes(
    config: KernelConfig, blocks: BlockSizes, tree_mask: Int32[Array, "T"] | None, rows: RaggedRows
) -> Int32[Array, "padded columns"]:
    """Return `visible_nodes` for all tokens and padding, or a placeholder without draft trees."""
    if tree_mask is None:
        return jnp.zeros((SUBLANES, 1), jnp.int32)
    return jnp.pad(visible_nodes(tree_mask, rows, config.options.window), ((0, _padded_tokens(config, blocks)), (0, 0)))
