"""The second kernel, which merges the splits if several workers share a work item. See the package.

Each thread merges eight rows of one head at a time; groups without a live token are not read. A thread block has
several warpgroups for them, and the loads for several splits are in flight simultaneously.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import MIN_TILE_TOKENS, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import (
    EIGHTS,
    MASKED,
    Softmax,
    SplitBuffers,
    WorkItem,
    cast,
    copy_tokens,
    i32,
    load,
    read_work_item,
    spread,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import (
    END_ITEM,
    FIRST_ITEM,
    FIRST_UNIT,
    NUM_BLOCKS,
    SPAN_END,
    SPAN_START,
)

WARPGROUPS = 4  # warpgroups per thread block
IN_FLIGHT = 4  # splits that are loaded before the first one is merged

_ROWS = EIGHTS.reduce(1)


def scratch(config: KernelConfig) -> list[Any]:
    """Return the buffer for outgoing rows, larger than the rows so that they can be shifted."""
    return [plgpu.SMEM((WARPGROUPS, 2 * MIN_TILE_TOKENS, config.warpgroup_columns), config.dtype)]


def kernel(config: KernelConfig, tiling: Tiling, clears_padding: bool, *refs: Any) -> None:
    """Run one thread block per worker: merge the splits if the worker began a work item that others completed."""
    num_live_ref, tile_ref, worker_ref, *unmerged, out_ref, shared_out = refs
    index, thread = lax.axis_index("block"), lax.axis_index("thread")
    out, span = shared_out.at[thread], worker_ref[0, SPAN_END]  # the first span is the longest
    last = worker_ref[index, END_ITEM] - 1
    tile, head = lax.div(last, i32(config.num_kv_heads)), lax.rem(last, i32(config.num_kv_heads))

    @pl.when(last >= worker_ref[index, FIRST_ITEM])
    def merge() -> None:
        item = read_work_item(tile_ref, tile, head, worker_ref[index, SPAN_START], worker_ref[index, SPAN_END])

        @pl.when(item.is_first & ~item.is_last)
        def merge_splits() -> None:
            item_end = tile_ref[tile, FIRST_UNIT] + (head + 1) * tile_ref[tile, NUM_BLOCKS]
            num_splits = lax.div(item_end + span - 1, span) - index
            splits = functools.partial(_load_split, SplitBuffers(*unmerged), index)

            @pl.loop(thread, tiling.column_warpgroups * tiling.rows // MIN_TILE_TOKENS, step=WARPGROUPS)
            def merge_rows(group: Any) -> None:
                _merge_rows(config, tiling, item, splits, num_splits, group, out, out_ref)

    if clears_padding:

        @pl.when(thread == 0)
        def clear() -> None:
            _clear_padding(num_live_ref[0] + index, tiling, out, out_ref)


def _merge_rows(
    config: KernelConfig,
    tiling: Tiling,
    item: WorkItem,
    splits: Any,
    num_splits: Any,
    group: Any,
    out: Any,
    out_ref: Any,
) -> None:
    """Merge the splits of eight query rows in one column group, and write the live rows to the output.

    Args:
        config: kernel configuration.
        tiling: tile sizes.
        item: work item whose splits are merged.
        splits: function that loads a split's partial softmax, given its column group, first row and index.
        num_splits: number of splits.
        group: index of the eight rows, times the number of column groups, plus the column group.
        out: shared memory for outgoing rows.
        out_ref: the output.
    """
    column, row = (
        lax.rem(group, i32(tiling.column_warpgroups)),
        lax.div(group, i32(tiling.column_warpgroups)) * MIN_TILE_TOKENS,
    )
    g, first = lax.div(row, i32(tiling.tokens)), lax.rem(row, i32(tiling.tokens))
    begin = jnp.clip(item.lead - first, 0, MIN_TILE_TOKENS)  # index among the eight
    end = jnp.clip(item.lead + item.num_tokens - first, begin, MIN_TILE_TOKENS)
    num_tokens = jnp.where(g < config.group, end - begin, 0)

    @pl.when(num_tokens > 0)
    def merge() -> None:
        state = _merge_all(functools.partial(splits, column, row), num_splits, out.shape[1])
        # The first stored token must be at a multiple of eight.
        out[pl.ds(MIN_TILE_TOKENS - begin, MIN_TILE_TOKENS)] = state.result(EIGHTS, config.dtype)
        plgpu.commit_smem()
        token, head = item.base_token + first + begin, item.head * config.group + g
        copy_tokens(out, i32(MIN_TILE_TOKENS), out_ref, token, head, column, num_tokens, MIN_TILE_TOKENS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load_split(unmerged: SplitBuffers, index: Any, column: Any, row: Any, number: Any) -> Softmax:
    """Load eight rows from split `number`; split 0 is from worker `index`, which began the item."""
    split = index + number, jnp.where(number == 0, 1, 0), column, pl.ds(row, MIN_TILE_TOKENS)
    values, max_score, denominator = (ref.at[split] for ref in unmerged)
    return Softmax(load(values, EIGHTS), load(max_score, _ROWS), load(denominator, _ROWS))


def _merge_all(split: Any, num_splits: Any, num_columns: int) -> Softmax:
    """Return the softmax over the keys in all splits."""

    def merge_some(batch: Any, state: Softmax) -> Softmax:
        numbers = [batch * IN_FLIGHT + i for i in range(IN_FLIGHT)]
        loaded = [split(jnp.minimum(number, num_splits - 1)) for number in numbers]
        for number, new in zip(numbers, loaded, strict=True):
            state = _merge(state, _if(number < num_splits, new))
        return state

    zeros = cast(jnp.zeros((MIN_TILE_TOKENS, num_columns), jnp.float32), EIGHTS)
    no_keys = cast(jnp.full((MIN_TILE_TOKENS,), MASKED, jnp.float32), _ROWS)
    empty = Softmax(zeros, no_keys, cast(jnp.zeros((MIN_TILE_TOKENS,), jnp.float32), _ROWS))
    return lax.fori_loop(0, lax.div(num_splits + (IN_FLIGHT - 1), i32(IN_FLIGHT)), merge_some, empty)


def _if(condition: Any, x: Softmax) -> Softmax:
    """Return the state if the condition holds, else the state before any key."""
    max_score = jnp.where(condition, x.max_score, jnp.full_like(x.max_score, MASKED))
    denominator = jnp.where(condition, x.denominator, jnp.zeros_like(x.denominator))
    return Softmax(jnp.where(condition, x.values, jnp.zeros_like(x.values)), max_score, denominator)


def _merge(a: Softmax, b: Softmax) -> Softmax:
    """Return the softmax over the keys in both states."""
    max_score = jnp.maximum(a.max_score, b.max_score)
    scale_a, scale_b = jnp.exp2(a.max_score - max_score), jnp.exp2(b.max_score - max_score)
    shape = a.values.shape
    values = a.values * spread(scale_a, shape, EIGHTS) + b.values * spread(scale_b, shape, EIGHTS)
    return Softmax(values, max_score, a.denominator * scale_a + b.denominator * scale_b)


def _clear_padding(first_token: Any, tiling: Tiling, zeros: Any, out_ref: Any) -> None:
    """Write zeros to every `num_workers`-th padding token from the worker's first one on."""
    num_tokens, num_heads, _ = out_ref.shape

    @pl.when(first_token < num_tokens)
    def clear() -> None:
        zeros[pl.ds(0, MIN_TILE_TOKENS)] = cast(jnp.zeros((MIN_TILE_TOKENS, zeros.shape[1]), zeros.dtype), EIGHTS)
        plgpu.commit_smem()

        @pl.loop(first_token, num_tokens, step=tiling.num_workers)
        def clear_token(token: Any) -> None:
            @pl.loop(0, num_heads * tiling.column_warpgroups)
            def clear_head(index: Any) -> None:
                head, part = (
                    lax.div(index, i32(tiling.column_warpgroups)),
                    lax.rem(index, i32(tiling.column_warpgroups)),
                )
                copy_tokens(zeros, i32(0), out_ref, token, head, part, i32(1), 1)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
