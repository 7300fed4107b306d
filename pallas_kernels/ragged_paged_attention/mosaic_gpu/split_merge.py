"""The second kernel, which merges the splits if several workers share a work item. See the package.

Each thread merges eight rows of one head at a time; groups without a live token are not read. A thread block has
several warpgroups for them, and the loads for several splits are in flight simultaneously.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import outputs, work_plan
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import MIN_TILE_TOKENS, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import (
    EIGHTS,
    MASKED,
    Softmax,
    WorkItem,
    read_work_item,
)
from jaxserve.pallas_kernels.warpgroups import i32, load, spread, store

WARPGROUPS = 4  # warpgroups per thread block
IN_FLIGHT = 4  # splits that are loaded before the first one is merged

_ROWS = EIGHTS.reduce(1)


def scratch(config: KernelConfig) -> list[Any]:
    """Return the shared memory to allocate per thread block: outputs of eight rows, and the shift, per warpgroup."""
    return [plgpu.SMEM((WARPGROUPS, 2 * MIN_TILE_TOKENS, config.warpgroup_columns), config.dtype)]


def kernel(config: KernelConfig, tiling: Tiling, clears_padding: bool, *refs: Ref) -> None:
    """Run one warpgroup of the thread block for one worker: merge the splits of the work item that the worker began and
    others completed, if there is one, and write the outputs.

    Args:
        config: static parameters.
        tiling: tile sizes.
        clears_padding: True to write zeros to the outputs for padding tokens.
        *refs: number of live tokens `[1]`, `WorkPlan.tiles`, `WorkPlan.workers`, the splits (see `Softmax`) and the
            output in global memory; then shared memory as in `scratch`.
    """
    num_live_ref, tile_ref, worker_ref, *splits, out_ref, shared_out = refs
    index, thread = lax.axis_index("block"), lax.axis_index("thread")
    out, span = shared_out.at[thread], worker_ref[0, work_plan.SPAN_END]  # the first span is the longest
    last = worker_ref[index, work_plan.END_ITEM] - 1
    tile, head = lax.div(last, i32(config.num_kv_heads)), lax.rem(last, i32(config.num_kv_heads))

    @pl.when(last >= worker_ref[index, work_plan.FIRST_ITEM])
    def merge() -> None:
        span_start, span_end = worker_ref[index, work_plan.SPAN_START], worker_ref[index, work_plan.SPAN_END]
        item = read_work_item(tile_ref, tile, head, span_start, span_end)

        @pl.when(item.is_first & ~item.is_last)
        def merge_splits() -> None:
            item_end = tile_ref[tile, work_plan.FIRST_UNIT] + (head + 1) * tile_ref[tile, work_plan.NUM_BLOCKS]
            num_splits = lax.div(item_end + span - 1, span) - index
            load_split = functools.partial(_load_split, Softmax(*splits), index)

            @pl.loop(thread, tiling.column_warpgroups * tiling.rows // MIN_TILE_TOKENS, step=WARPGROUPS)
            def merge_rows(group: Scalar) -> None:
                _merge_rows(config, tiling, item, load_split, num_splits, group, out, out_ref)

    if clears_padding:

        @pl.when(thread == 0)
        def clear() -> None:
            _clear_padding(config, num_live_ref[0] + index, tiling, out, out_ref)


def _merge_rows(
    config: KernelConfig,
    tiling: Tiling,
    item: WorkItem,
    load_split: Callable[[Scalar, Scalar, Scalar], Softmax],
    num_splits: Scalar,
    group: Scalar,
    out: Ref,
    out_ref: Ref,
) -> None:
    """Merge the splits of eight query rows in one column group, and write the live rows to the output.

    Args:
        config: static parameters.
        tiling: tile sizes.
        item: work item whose splits are merged.
        load_split: function that loads a split's softmax state, given its column group, first row and index.
        num_splits: number of splits.
        group: index of the eight rows, times the number of column groups, plus the column group.
        out: shared memory for outgoing rows, `[16, columns]`.
        out_ref: the output in global memory, `[tokens, heads, value_dim]`.
    """
    column = lax.rem(group, i32(tiling.column_warpgroups))
    row = lax.div(group, i32(tiling.column_warpgroups)) * MIN_TILE_TOKENS
    g, first = lax.div(row, i32(tiling.tokens)), lax.rem(row, i32(tiling.tokens))
    begin = jnp.clip(item.lead - first, 0, MIN_TILE_TOKENS)  # index among the eight
    end = jnp.clip(item.lead + item.num_tokens - first, begin, MIN_TILE_TOKENS)
    num_tokens = jnp.where(g < config.group, end - begin, 0)

    @pl.when(num_tokens > 0)
    def merge() -> None:
        state = _merge_all(functools.partial(load_split, column, row), num_splits, out.shape[1])
        # The first stored token must be at a multiple of eight.
        store(out.at[pl.ds(MIN_TILE_TOKENS - begin, MIN_TILE_TOKENS)], state.result(EIGHTS, config.dtype))
        outputs.commit(config)
        token, head = item.base_token + first + begin, item.head * config.group + g
        outputs.copy_tokens(
            config, out, i32(MIN_TILE_TOKENS), out_ref, token, head, column, num_tokens, MIN_TILE_TOKENS
        )
        outputs.wait(config)


def _load_split(splits: Softmax, index: Scalar, column: Scalar, row: Scalar, number: Scalar) -> Softmax:
    """Load eight rows of a split's softmax state to registers.

    Args:
        splits: all workers' splits in global memory.
        index: worker that began the work item and has its split 0.
        column: column group index.
        row: first of the eight tile rows.
        number: split index; worker `index + number` has it.
    """
    split = index + number, jnp.where(number == 0, 1, 0), column, pl.ds(row, MIN_TILE_TOKENS)
    values, max_score, denominator = (ref.at[split] for ref in splits)
    return Softmax(load(values, EIGHTS), load(max_score, _ROWS), load(denominator, _ROWS))


def _merge_all(load_split: Callable[[Scalar], Softmax], num_splits: Scalar, num_columns: int) -> Softmax:
    """Load and merge the softmax states of all splits, eight rows and `num_columns` columns.

    Args:
        load_split: function that loads a split, given its index.
        num_splits: number of splits.
        num_columns: value columns.
    """

    def merge_some(batch: Scalar, state: Softmax) -> Softmax:
        numbers = [batch * IN_FLIGHT + i for i in range(IN_FLIGHT)]
        loaded = [load_split(jnp.minimum(number, num_splits - 1)) for number in numbers]
        for number, new in zip(numbers, loaded, strict=True):
            state = _merge(state, _if(number < num_splits, new))
        return state

    zeros = plgpu.layout_cast(jnp.zeros((MIN_TILE_TOKENS, num_columns), jnp.float32), EIGHTS)
    no_keys = plgpu.layout_cast(jnp.full((MIN_TILE_TOKENS,), MASKED, jnp.float32), _ROWS)
    empty = Softmax(zeros, no_keys, plgpu.layout_cast(jnp.zeros((MIN_TILE_TOKENS,), jnp.float32), _ROWS))
    return lax.fori_loop(0, lax.div(num_splits + (IN_FLIGHT - 1), i32(IN_FLIGHT)), merge_some, empty)


def _if(condition: Scalar, x: Softmax) -> Softmax:
    """Return the softmax state `x` if the condition holds, else the state before any key."""
    max_score = jnp.where(condition, x.max_score, jnp.full_like(x.max_score, MASKED))
    denominator = jnp.where(condition, x.denominator, jnp.zeros_like(x.denominator))
    return Softmax(jnp.where(condition, x.values, jnp.zeros_like(x.values)), max_score, denominator)


def _merge(a: Softmax, b: Softmax) -> Softmax:
    """Return the softmax state over the keys of both states `a` and `b`."""
    max_score = jnp.maximum(a.max_score, b.max_score)
    scale_a, scale_b = jnp.exp2(a.max_score - max_score), jnp.exp2(b.max_score - max_score)
    shape = a.values.shape
    values = a.values * spread(scale_a, shape, EIGHTS) + b.values * spread(scale_b, shape, EIGHTS)
    return Softmax(values, max_score, a.denominator * scale_a + b.denominator * scale_b)


def _clear_padding(config: KernelConfig, first_token: Scalar, tiling: Tiling, zeros: Ref, out_ref: Ref) -> None:
    """Write zeros to the outputs of every `num_workers`-th token from a worker's first padding token on.

    Args:
        config: static parameters.
        first_token: the worker's first padding token.
        tiling: tile sizes and number of workers.
        zeros: shared memory, `[16, columns]`.
        out_ref: the output in global memory, `[tokens, heads, value_dim]`.
    """
    num_tokens, num_heads, _ = out_ref.shape

    @pl.when(first_token < num_tokens)
    def clear() -> None:
        no_values = jnp.zeros((MIN_TILE_TOKENS, zeros.shape[1]), zeros.dtype)
        store(zeros.at[pl.ds(0, MIN_TILE_TOKENS)], plgpu.layout_cast(no_values, EIGHTS))
        outputs.commit(config)

        @pl.loop(first_token, num_tokens, step=tiling.num_workers)
        def clear_token(token: Scalar) -> None:
            @pl.loop(0, num_heads * tiling.column_warpgroups)
            def clear_head(index: Scalar) -> None:
                head = lax.div(index, i32(tiling.column_warpgroups))
                part = lax.rem(index, i32(tiling.column_warpgroups))
                outputs.copy_tokens(config, zeros, i32(0), out_ref, token, head, part, i32(1), 1)

        outputs.wait(config)
