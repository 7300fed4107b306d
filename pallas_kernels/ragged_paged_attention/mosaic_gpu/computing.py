"""The warpgroups of a worker that compute: products, masks and the softmax. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_gpu.items import (
    LOG2E,
    MASKED,
    Item,
    Softmax,
    cast,
    copy_tokens,
    i32,
    load,
    spread,
)
from pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, first_scale
from pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import BLOCK_KV, MIN_TILE_TOKENS, WARPGROUP_ROWS, Call, Tiles
from pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Part, Warpgroup, part_of

_ROWS = plgpu.Layout.WGMMA.reduce(1)


class ComputingWarpgroup(Warpgroup):
    """Attends with some rows of each tile, and some columns of the values."""

    def __init__(self, call: Call, tiles: Tiles, inputs: Inputs, shared: Shared, thread: Any) -> None:
        warpgroups = i32(tiles.warpgroups)
        super().__init__(call, tiles, inputs, shared, lax.div(thread, warpgroups))
        self.part = part_of(tiles, lax.rem(thread, warpgroups))

    def run(self) -> None:
        """Attends with its part of each tile."""
        part = self.part

        def compute_item(index: Any, block_count: Any) -> Any:
            item = self._item(index)
            plgpu.barrier_wait(self.shared.q_ready.at[self.lane])
            state = self._attend_item(item, part, block_count)
            plgpu.barrier_arrive(self.shared.q_free.at[self.lane])

            @pl.when(item.is_first & item.is_last)
            def finish() -> None:
                out = self.shared.out.at[self.lane * self.tiles.warpgroups + part.index]
                _store(self.call, self.tiles, item, part, state, out, self.inputs.out)

            @pl.when(~(item.is_first & item.is_last))
            def leave_to_merge() -> None:
                place = self.index, jnp.where(item.is_first, 1, 0), part.column, part.rows
                self.inputs.values[place] = state.values
                self.inputs.max_score[place] = state.max_score
                self.inputs.denominator[place] = state.denominator

            return block_count + item.end - item.begin

        lax.fori_loop(*self.items, compute_item, i32(0))

    def _attend_item(self, item: Item, part: Part, block_count: Any) -> Softmax:
        """The softmax over the blocks of one item; masks only where it must."""
        call = self.call
        state = self._start(item, part)
        # Blocks that all tokens of the tile see from end to end.
        num_seen = item.past_len if call.tree_words else item.position + 1
        full_end = jnp.clip(lax.div(num_seen, i32(BLOCK_KV)), item.begin, item.end)
        full_begin = item.begin
        if call.window is not None:
            last = item.position + item.num_tokens - 1
            first_full = lax.div(jnp.maximum(last - call.window + 1, 0) + (BLOCK_KV - 1), i32(BLOCK_KV))
            full_begin = jnp.clip(first_full, item.begin, full_end)

        def absorb(block: Any, state: Softmax, masked: bool) -> Softmax:
            slot = self._slot(block_count + block - item.begin)
            return self._absorb_block(item, part, block, slot, state, masked)

        if call.window is not None:
            state = lax.fori_loop(item.begin, full_begin, functools.partial(absorb, masked=True), state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(absorb, masked=False), state)
        return lax.fori_loop(full_end, item.end, functools.partial(absorb, masked=True), state)

    def _start(self, item: Item, part: Part) -> Softmax:
        """The softmax before any key: empty, or holding the sinks of the rows where the item begins."""
        max_score = cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), _ROWS)
        denominator = cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _ROWS)
        if self.call.has_sinks:
            sinks = load(self.inputs.sink_rows.at[item.head, part.rows], _ROWS)
            max_score = jnp.where(item.is_first, sinks, max_score)
            denominator = jnp.where(item.is_first, jnp.full_like(denominator, 1), denominator)
        shape = (WARPGROUP_ROWS, self.call.head_dim // self.tiles.column_parts)
        values = cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return Softmax(values, max_score, denominator)

    def _absorb_block(self, item: Item, part: Part, block: Any, slot: Any, state: Softmax, masked: bool) -> Softmax:
        """The softmax after one more block of keys."""
        shared = self.shared
        k = self._take_keys(item, part, block, slot, masked)
        scores = _scores(shared.q.at[self.lane, part.rows], k)
        self._give_back(shared.k_free.at[slot])
        scores = self._scale_and_mask(scores, item, part, block, masked)
        max_score = jnp.maximum(state.max_score, scores.max(axis=1))
        rescale = jnp.exp2(state.max_score - max_score)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(max_score, scores.shape, [0]))
        denominator = state.denominator * rescale + weights.sum(axis=1)
        weights = weights.astype(self.call.dtype)
        v = self._take_values(part, slot, masked)
        values = state.values * lax.broadcast_in_dim(rescale, state.values.shape, [0])
        values = self._add_values(values, weights, part, v)
        self._give_back(shared.v_free.at[slot])
        return Softmax(values, max_score, denominator)

    def _take_keys(self, item: Item, part: Part, block: Any, slot: Any, masked: bool) -> Any:
        """Keys as they are multiplied; with values too done what must be, before anything else is in registers."""
        shared = self.shared
        if self.call.is_quantized:
            self._widen_block(item, part, block, slot, masked)
            return shared.wide_k.at[self.lane]
        if masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
            self._clear_tail(item, part, block, shared.v.at[slot, part.column])
        plgpu.barrier_wait(shared.k_ready.at[slot])
        return shared.k.at[slot]

    def _take_values(self, part: Part, slot: Any, masked: bool) -> Any:
        """The columns of values of this part, as they are multiplied."""
        shared = self.shared
        if self.call.is_quantized:
            assert self.tiles.column_parts == 1, "see supports"
            return shared.wide_v.at[self.lane]
        if not masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
        return shared.v.at[slot, part.column]

    def _give_back(self, free: Any) -> None:
        """Lets a part of the ring be loaded anew; what was widened has been given back before."""
        if not self.call.is_quantized:
            plgpu.barrier_arrive(free)

    def _widen_block(self, item: Item, part: Part, block: Any, slot: Any, masked: bool) -> None:
        """Multiplies keys and values with their scales, on their way from the ring to where wgmma reads them."""
        shared, column = self.shared, 2 * item.head - first_scale(item.head)
        k_scales, v_scales = (shared.scales.at[slot, :, column + i] for i in range(2))
        self._meet()  # the others may still read the last block
        plgpu.barrier_wait(shared.k_ready.at[slot])
        plgpu.barrier_wait(shared.v_ready.at[slot])
        self._widen(shared.k.at[slot], k_scales, shared.wide_k.at[self.lane], part, first=0)
        end = self._end_in(item, block) if masked else None
        self._widen(shared.v.at[slot, part.column], v_scales, shared.wide_v.at[self.lane], part, first=1, end=end)
        plgpu.commit_smem()  # so that both what was written and what was read lie behind
        plgpu.barrier_arrive(shared.k_free.at[slot])
        plgpu.barrier_arrive(shared.v_free.at[slot])
        self._meet()

    def _widen(self, narrow: Any, scales: Any, wide: Any, part: Part, first: int, end: Any | None = None) -> None:
        """Numbers times scales, from the ring to `wide`; zeros from row `end` on.

        The warpgroups of a tile do some columns each, the first ones that of number `first`.
        """
        layout, width = plgpu.Layout.WGMMA_UPCAST_2X, self.call.tile_columns

        def multiply(columns: Any) -> None:
            numbers = load(narrow.at[:, columns], layout)
            if jnp.issubdtype(numbers.dtype, jnp.integer):
                numbers = numbers.astype(jnp.bfloat16)  # which is exact, and for which there is a quick way
            factors = spread(load(scales, layout.reduce(1)), numbers.shape, layout)
            numbers = numbers.astype(jnp.float32) * factors
            if end is not None:
                row = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=layout)
                numbers = jnp.where(row < end, numbers, jnp.zeros_like(numbers))
            wide[:, columns] = numbers.astype(self.call.dtype)

        for chunk in range(wide.shape[1] // width):
            is_own = part.index == (chunk + first) % self.tiles.warpgroups
            pl.when(is_own)(functools.partial(multiply, pl.ds(chunk * width, width)))

    def _meet(self) -> None:
        """The warpgroups of a tile wait for each other, if there are several."""
        if self.tiles.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.meeting.at[self.lane])
            plgpu.barrier_wait(self.shared.meeting.at[self.lane])

    def _end_in(self, item: Item, block: Any) -> Any:
        """The end of the item's sequence, counted from the block's first token."""
        return item.position + item.num_tokens - block * BLOCK_KV

    def _scale_and_mask(self, scores: Any, item: Item, part: Part, block: Any, masked: bool) -> Any:
        """Scores in base 2, soft-capped; those that a query does not see are MASKED."""
        scale, soft_cap, window = self.call.scale, self.call.soft_cap, self.call.window
        if soft_cap is None:
            scores *= scale * LOG2E
        else:
            # tanh by its definition: the approximate instruction has 11 bits.
            growth = jnp.exp2(scores * (2 * LOG2E * scale / soft_cap))
            scores = (soft_cap * LOG2E) * (1 - 2 / (growth + 1))
        if not masked:
            return scores
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + block * BLOCK_KV
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=_ROWS) + part.row
        query = lax.broadcast_in_dim(item.position - item.lead + (row & (self.tiles.tokens - 1)), scores.shape, [0])
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        if self.call.tree_words:
            visible &= self._in_tree(key - item.past_len, item, part)
        return jnp.where(visible, scores, MASKED)

    def _in_tree(self, new_id: Any, item: Item, part: Part) -> Any:
        """Which keys each query sees; `new_id` counts from the row's first new token, past ones are negative."""
        num_words = self.call.tree_words
        visible = (new_id < 0) | (new_id >= 32 * num_words)
        for i in range(num_words):
            word = load(self.inputs.tree_rows.at[item.tile, i, part.rows], _ROWS)
            bit = lax.shift_right_logical(lax.broadcast_in_dim(word, new_id.shape, [0]), new_id & 31) & 1
            visible |= (new_id >= 32 * i) & (new_id < 32 * (i + 1)) & (bit == 1)
        return visible

    def _clear_tail(self, item: Item, part: Part, block: Any, v: Any) -> None:
        """Zeros in place of values past the last token: a stale NaN would pass through a weight of zero."""
        end = self._end_in(item, block)
        width = self.call.tile_columns  # at a time, for want of registers

        @pl.when(end < BLOCK_KV)
        def clear() -> None:
            @pl.when(part.row == 0)
            def write() -> None:
                row = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KV, width), 0, layout=plgpu.Layout.WGMMA)
                for start in range(0, v.shape[1], width):
                    chunk = v.at[:, pl.ds(start, width)]
                    values = cast(chunk[...], plgpu.Layout.WGMMA)
                    chunk[...] = jnp.where(row < end, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            if self.tiles.row_parts > 1:  # those who share the values wait for the one who clears
                self._meet()

    def _add_values(self, values: Any, weights: Any, part: Part, v: Any) -> Any:
        """`values + weights @ v`."""
        if self.call.interpret is None:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(values))
        p = self.shared.p.at[self.lane * self.tiles.warpgroups + part.index]
        p[...] = weights
        plgpu.commit_smem()

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, p, v)
            return acc[...]

        return values + pl.run_scoped(multiply, plgpu.ACC(values.shape, jnp.float32))


def _scores(q: Any, k: Any) -> Any:
    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, k.shape[0]), jnp.float32))


def _store(call: Call, tiles: Tiles, item: Item, part: Part, state: Softmax, out: Any, out_ref: Any) -> None:
    """Writes one part to the output, by way of `out` in shared memory; live tokens only."""
    shift = MIN_TILE_TOKENS - item.lead  # so that the first token stored is at a multiple of eight
    out[pl.ds(shift, WARPGROUP_ROWS)] = state.result(plgpu.Layout.WGMMA, call.dtype)
    plgpu.commit_smem()
    tokens = min(tiles.tokens, WARPGROUP_ROWS)  # of one head in one part

    @pl.loop(0, WARPGROUP_ROWS // tokens)
    def store_head(segment: Any) -> None:
        row = part.row + segment * tokens
        g, first = lax.div(row, i32(tiles.tokens)), lax.rem(row, i32(tiles.tokens))
        begin = jnp.maximum(item.lead - first, 0)  # among this head's tokens in this part
        end = jnp.clip(item.lead + item.num_tokens - first, begin, tokens)
        num_tokens = jnp.where(g < call.group, end - begin, 0)
        token, head = item.base_token + first + begin, item.head * call.group + g
        copy_tokens(out, shift + segment * tokens + begin, out_ref, token, head, part.column, num_tokens, tokens)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
