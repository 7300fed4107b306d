"""The kernel that attends, and the launch of it and of the one that merges. See the package."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.interface import RaggedRows
from pallas_kernels.ragged_paged_attention.mosaic_gpu import merge
from pallas_kernels.ragged_paged_attention.mosaic_gpu.items import (
    MASKED,
    Item,
    Softmax,
    Unmerged,
    cast,
    copy_tokens,
    i32,
    load,
    read_item,
    spread,
)
from pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BASE_TOKEN,
    BLOCK_KV,
    END_ITEM,
    FIRST_ITEM,
    MIN_TILE_TOKENS,
    SCALES,
    SPAN_END,
    SPAN_START,
    WARPGROUP_ROWS,
    Call,
    Plan,
    Tiles,
)
from pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of

LOG2E = math.log2(math.e)
# Of a thread that loads and of one that computes, by the number of warpgroups; of two each has enough. A block of
# threads starts with as many as divide evenly, in eights, and waits forever for more.
REGISTERS = {3: (72, 216), 4: (64, 192)}

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def attend(
    call: Call,
    plans: Sequence[tuple[Tiles, Plan]],
    q: Float[Array, "padded Q H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
    sinks: Float[Array, "Q"] | None,
    tree_mask: Int32[Array, "T words"] | None,
) -> Float[Array, "padded Q H"]:
    """The output of all tiles of all plans, and zeros for padding tokens; of queries padded to eight tokens."""
    out_ref = jax.empty_ref(jax.ShapeDtypeStruct(q.shape, q.dtype))
    # Apart: where the layer is a constant, neither takes a program of its own in each layer.
    layer = jnp.asarray(layer, jnp.int32)[None]
    num_live_tokens = rows.cu_q_lens[rows.num_rows][None]
    for number, (tiles, plan) in enumerate(plans):
        shape = (tiles.num_workers, 2, tiles.column_parts, tiles.rows)
        shapes = ((*shape, call.head_dim // tiles.column_parts), shape, shape)
        unmerged = Unmerged(*(jax.empty_ref(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes))
        _launch(
            call,
            functools.partial(_attend_kernel, call, tiles),
            "ragged_paged_attention",
            num_blocks=tiles.num_cores,
            num_threads=tiles.workers * (tiles.warpgroups + 1),
            scratch=_shared(call, tiles),
        )(
            layer,
            *plan,
            rows.page_table,
            _sink_rows(call, tiles, sinks),
            _tree_rows(tiles, plan, tree_mask),
            q,
            values_of(kv_pages),
            kv_pages.scales if isinstance(kv_pages, QuantizedPages) else jnp.zeros((1, 1, 1, SCALES), jnp.float32),
            out_ref,
            *unmerged,
        )
        _launch(
            call,
            functools.partial(merge.kernel, call, tiles, number == 0),
            "merge_attention_parts",
            num_blocks=tiles.num_workers,
            num_threads=merge.WARPGROUPS,
            scratch=merge.scratch(call, tiles),
        )(num_live_tokens, *plan, *unmerged, out_ref)
    return jax.freeze(out_ref)


def _launch(
    call: Call, body: Callable[..., None], name: str, *, num_blocks: int, num_threads: int, scratch: Any
) -> Callable[..., None]:
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=num_threads, thread_name="thread")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    interpret = {} if call.interpret is None else {"interpret": call.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="thread")

    return pl.kernel(kernel, out_type=(), mesh=mesh, compiler_params=params, name=name, **interpret)


class _Part(NamedTuple):
    """What one warpgroup computes of a tile."""

    index: Any
    row: Any  # the first of its 64 rows
    column: Any  # which part of the values' columns

    @property
    def rows(self) -> Any:
        return pl.ds(self.row, WARPGROUP_ROWS)


def _part(tiles: Tiles, index: Any) -> _Part:
    columns = i32(tiles.column_parts)
    return _Part(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))


class _Shared(NamedTuple):
    """Shared memory and barriers of a block of threads; a worker has its own part of each."""

    q: Any  # [workers, rows, H]
    k: Any  # [workers * stages, BLOCK_KV, H]
    v: Any  # [workers * stages, column_parts, BLOCK_KV, H / column_parts]
    scales: Any  # [workers * stages, BLOCK_KV, SCALES], those of the head's keys and values, and of its neighbours'
    wide_k: Any  # [workers, BLOCK_KV, H], a block of keys multiplied with their scales
    wide_v: Any
    out: Any  # [workers * warpgroups, 8 + 64, H / column_parts]
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    meeting: Any
    p: Any  # weights of the values; in the interpreter alone, which lacks wgmma from registers


def _shared(call: Call, tiles: Tiles) -> _Shared:
    workers, stages, H = tiles.workers, tiles.workers * tiles.stages, call.head_dim
    pages, columns = max(1, BLOCK_KV // call.page_size), H // tiles.column_parts
    warpgroups = workers * tiles.warpgroups

    def matrix(*shape: int) -> Any:
        return plgpu.SMEM(shape, call.dtype, transforms=_layout(call, call.swizzle))

    def ring(*shape: int) -> Any:
        swizzle = call.tile_columns * call.kv_dtype.itemsize
        return plgpu.SMEM((stages, *shape), call.kv_dtype, transforms=_layout(call, swizzle))

    def barriers(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    unused = plgpu.SMEM((8,), jnp.int32)
    wide = matrix(workers, BLOCK_KV, H) if call.is_quantized else unused
    return _Shared(
        q=matrix(workers, tiles.rows, H),
        k=ring(BLOCK_KV, H),
        v=ring(tiles.column_parts, BLOCK_KV, columns),
        scales=plgpu.SMEM((stages, BLOCK_KV, SCALES), jnp.float32) if call.is_quantized else unused,
        wide_k=wide,
        wide_v=wide,
        out=_out_type(call, tiles, warpgroups),
        q_ready=barriers(call.group, workers),
        q_free=barriers(tiles.warpgroups, workers),
        k_ready=barriers(pages, stages),
        k_free=barriers(tiles.warpgroups, stages),
        v_ready=barriers(pages * (tiles.column_parts + call.is_quantized), stages),
        v_free=barriers(tiles.warpgroups, stages),
        meeting=barriers(tiles.warpgroups, workers),
        p=unused if call.interpret is None else matrix(warpgroups, WARPGROUP_ROWS, BLOCK_KV),
    )


def _out_type(call: Call, tiles: Tiles, warpgroups: int) -> Any:
    """Where output waits to be stored; with room to shift a tile's rows."""
    shape = (warpgroups, MIN_TILE_TOKENS + WARPGROUP_ROWS, call.head_dim // tiles.column_parts)
    return plgpu.SMEM(shape, call.dtype)


def _layout(call: Call, swizzle: int) -> tuple[Any, Any]:
    """Of matrices in shared memory that wgmma reads, or that become such."""
    return plgpu.TilingTransform((8, call.tile_columns)), plgpu.SwizzleTransform(swizzle)


def _sink_rows(call: Call, tiles: Tiles, sinks: Float[Array, "Q"] | None) -> Float[Array, "K rows"]:
    """The sink of every row of a tile, in base 2; zeros where there are none."""
    if sinks is None:
        return jnp.zeros((call.num_kv_heads, tiles.rows), jnp.float32)
    heads = sinks.astype(jnp.float32).reshape(call.num_kv_heads, call.group, 1) * LOG2E
    by_token = jnp.broadcast_to(heads, (*heads.shape[:2], tiles.tokens)).reshape(call.num_kv_heads, -1)
    return jnp.pad(by_token, ((0, 0), (0, tiles.rows - by_token.shape[1])))


def _tree_rows(tiles: Tiles, plan: Plan, tree_mask: Int32[Array, "T words"] | None) -> Int32[Array, "tiles words rows"]:
    """The words of every row of every tile."""
    if tree_mask is None:
        return jnp.zeros((1, 1, 1), jnp.int32)
    token = jnp.arange(tiles.rows, dtype=jnp.int32) % tiles.tokens
    words = tree_mask.at[plan.tiles[:, BASE_TOKEN, None] + token[None]].get(mode="clip")  # [tiles, rows, words]
    return words.swapaxes(1, 2)


def _attend_kernel(call: Call, tiles: Tiles, *refs: Any) -> None:
    """One block of threads: in each worker, a warpgroup that loads and those that compute."""
    inputs, shared = _Inputs(*refs[: len(_Inputs._fields)]), _Shared(*refs[len(_Inputs._fields) :])
    thread = lax.axis_index("thread")
    num_compute = tiles.workers * tiles.warpgroups
    registers = REGISTERS.get(num_compute + tiles.workers)

    def worker(lane: Any) -> _Worker:
        return _Worker(call, tiles, inputs, shared, lane, lane * tiles.num_cores + lax.axis_index("block"))

    @pl.when(thread >= num_compute)
    def feed() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="decrease")
        worker(thread - num_compute).load()

    @pl.when(thread < num_compute)
    def compute() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="increase")
        warpgroups = i32(tiles.warpgroups)
        worker(lax.div(thread, warpgroups)).compute(_part(tiles, lax.rem(thread, warpgroups)))


class _Inputs(NamedTuple):
    """What the kernel gets in global memory."""

    layer: Any  # [1]
    tiles: Any
    workers: Any
    page_table: Any
    sink_rows: Any
    tree_rows: Any
    q: Any
    kv_pages: Any
    scales: Any  # of their numbers, if they have any
    out: Any
    values: Any
    max_score: Any
    denominator: Any


class _Worker:
    """A span of units and the warpgroups that work on it."""

    def __init__(self, call: Call, tiles: Tiles, inputs: _Inputs, shared: _Shared, lane: Any, index: Any) -> None:
        self.call, self.tiles, self.inputs, self.shared = call, tiles, inputs, shared
        self.lane, self.index = lane, index
        self.items = (inputs.workers[index, FIRST_ITEM], inputs.workers[index, END_ITEM])
        self.span_start, self.span_end = inputs.workers[index, SPAN_START], inputs.workers[index, SPAN_END]

    def item(self, index: Any) -> Item:
        tile = lax.div(index, i32(self.call.num_kv_heads))
        head = lax.rem(index, i32(self.call.num_kv_heads))
        return read_item(self.inputs.tiles, tile, head, self.span_start, self.span_end)

    def slot(self, block_count: Any) -> Any:
        """The part of the ring that the worker's next block is in."""
        return self.lane * self.tiles.stages + lax.rem(block_count, i32(self.tiles.stages))

    def load(self) -> None:
        """Fills the ring, one block of keys and values after the other."""
        shared, stages = self.shared, self.tiles.stages

        def load_item(index: Any, block_count: Any) -> Any:
            item = self.item(index)

            @pl.when(index > self.items[0])
            def wait_for_q() -> None:
                plgpu.barrier_wait(shared.q_free.at[self.lane])

            self.load_queries(item)

            def load_block(block: Any, block_count: Any) -> Any:
                slot = self.slot(block_count)
                page_ids = self.page_ids(item, block)

                @pl.when(block_count >= stages)
                def wait_for_keys() -> None:
                    plgpu.barrier_wait(shared.k_free.at[slot])

                self.load_pages(page_ids, block, 2 * item.head, 0, shared.k.at[slot], shared.k_ready.at[slot])

                @pl.when(block_count >= stages)
                def wait_for_values() -> None:
                    plgpu.barrier_wait(shared.v_free.at[slot])

                for part in range(self.tiles.column_parts):
                    self.load_pages(
                        page_ids, block, 2 * item.head + 1, part, shared.v.at[slot, part], shared.v_ready.at[slot]
                    )
                if self.call.is_quantized:
                    self.load_scales(page_ids, block, item, shared.scales.at[slot], shared.v_ready.at[slot])
                return block_count + 1

            return lax.fori_loop(item.begin, item.end, load_block, block_count)

        block_count = lax.fori_loop(*self.items, load_item, i32(0))

        # What is still in flight is seen to its end.
        @pl.when(self.items[1] > self.items[0])
        def drain_q() -> None:
            plgpu.barrier_wait(shared.q_free.at[self.lane])

        @pl.loop(jnp.maximum(block_count - stages, 0), block_count)
        def drain(count: Any) -> None:
            plgpu.barrier_wait(shared.k_free.at[self.slot(count)])
            plgpu.barrier_wait(shared.v_free.at[self.slot(count)])

    def load_queries(self, item: Item) -> None:
        """A tile's queries, head after head: row `g * tokens + t` is token t of query head g."""
        tokens = self.tiles.tokens

        @pl.loop(0, self.call.group)
        def load_head(g: Any) -> None:
            plgpu.copy_gmem_to_smem(
                self.inputs.q.at[pl.ds(item.base_token, tokens), item.head * self.call.group + g],
                self.shared.q.at[self.lane, pl.ds(g * tokens, tokens)],
                self.shared.q_ready.at[self.lane],
            )

    def page_ids(self, item: Item, block: Any) -> list[Any]:
        """The pages of one block; of a page past the end, which the table may not have, the first one again."""
        size = self.call.page_size
        if size > BLOCK_KV:
            return [self.inputs.page_table[item.row, lax.div(block, i32(size // BLOCK_KV))]]
        num_pages = lax.div(item.position + item.num_tokens + (size - 1), i32(size))
        first = block * (BLOCK_KV // size)
        columns = [jnp.where(first + i < num_pages, first + i, first) for i in range(BLOCK_KV // size)]
        return [self.inputs.page_table[item.row, column] for column in columns]

    def load_pages(self, page_ids: list[Any], block: Any, head: Any, part: int, buffer: Any, ready: Any) -> None:
        """As many columns of a head's block as the buffer has, from the part-th on."""
        pages, columns = self.inputs.kv_pages.at[self.inputs.layer[0]], pl.ds(part * buffer.shape[1], buffer.shape[1])
        self.copy_block(
            page_ids, block, lambda page_id, tokens: pages.at[page_id, tokens, head, columns], buffer, ready
        )

    def load_scales(self, page_ids: list[Any], block: Any, item: Item, buffer: Any, ready: Any) -> None:
        """Those of a head's keys and values, with its neighbours'."""
        scales, heads = self.inputs.scales.at[self.inputs.layer[0]], pl.ds(_first_scale(item.head), SCALES)
        self.copy_block(page_ids, block, lambda page_id, tokens: scales.at[page_id, tokens, heads], buffer, ready)

    def copy_block(
        self, page_ids: list[Any], block: Any, source: Callable[[Any, Any], Any], buffer: Any, ready: Any
    ) -> None:
        """What `source(page, tokens)` refers to, for all tokens of a block."""
        size = self.call.page_size
        if size > BLOCK_KV:
            offset = lax.rem(block, i32(size // BLOCK_KV)) * BLOCK_KV
            plgpu.copy_gmem_to_smem(source(page_ids[0], pl.ds(offset, BLOCK_KV)), buffer, ready)
            return
        for i, page_id in enumerate(page_ids):
            plgpu.copy_gmem_to_smem(source(page_id, slice(None)), buffer.at[pl.ds(i * size, size)], ready)

    def compute(self, part: _Part) -> None:
        """Attends with one part of each tile."""

        def compute_item(index: Any, block_count: Any) -> Any:
            item = self.item(index)
            plgpu.barrier_wait(self.shared.q_ready.at[self.lane])
            state = self.attend_item(item, part, block_count)
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

    def attend_item(self, item: Item, part: _Part, block_count: Any) -> Softmax:
        """The softmax over the blocks of one item; masks only where it must."""
        call = self.call
        state = self.start(item, part)
        # Blocks that all tokens of the tile see from end to end.
        num_seen = item.past_len if call.tree_words else item.position + 1
        full_end = jnp.clip(lax.div(num_seen, i32(BLOCK_KV)), item.begin, item.end)
        full_begin = item.begin
        if call.window is not None:
            last = item.position + item.num_tokens - 1
            first_full = lax.div(jnp.maximum(last - call.window + 1, 0) + (BLOCK_KV - 1), i32(BLOCK_KV))
            full_begin = jnp.clip(first_full, item.begin, full_end)

        def absorb(block: Any, state: Softmax, masked: bool) -> Softmax:
            slot = self.slot(block_count + block - item.begin)
            return self.absorb_block(item, part, block, slot, state, masked)

        if call.window is not None:
            state = lax.fori_loop(item.begin, full_begin, functools.partial(absorb, masked=True), state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(absorb, masked=False), state)
        return lax.fori_loop(full_end, item.end, functools.partial(absorb, masked=True), state)

    def start(self, item: Item, part: _Part) -> Softmax:
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

    def absorb_block(self, item: Item, part: _Part, block: Any, slot: Any, state: Softmax, masked: bool) -> Softmax:
        """The softmax after one more block of keys."""
        shared = self.shared
        k = self.take_keys(item, part, block, slot, masked)
        scores = _scores(shared.q.at[self.lane, part.rows], k)
        self.give_back(shared.k_free.at[slot])
        scores = self.scale_and_mask(scores, item, part, block, masked)
        max_score = jnp.maximum(state.max_score, scores.max(axis=1))
        rescale = jnp.exp2(state.max_score - max_score)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(max_score, scores.shape, [0]))
        denominator = state.denominator * rescale + weights.sum(axis=1)
        weights = weights.astype(self.call.dtype)
        v = self.take_values(part, slot, masked)
        values = state.values * lax.broadcast_in_dim(rescale, state.values.shape, [0])
        values = self.add_values(values, weights, part, v)
        self.give_back(shared.v_free.at[slot])
        return Softmax(values, max_score, denominator)

    def take_keys(self, item: Item, part: _Part, block: Any, slot: Any, masked: bool) -> Any:
        """Keys as they are multiplied; with values too done what must be, before anything else is in registers."""
        shared = self.shared
        if self.call.is_quantized:
            self.widen_block(item, part, block, slot, masked)
            return shared.wide_k.at[self.lane]
        if masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
            self.clear_tail(item, part, block, shared.v.at[slot, part.column])
        plgpu.barrier_wait(shared.k_ready.at[slot])
        return shared.k.at[slot]

    def take_values(self, part: _Part, slot: Any, masked: bool) -> Any:
        """The columns of values of this part, as they are multiplied."""
        shared = self.shared
        if self.call.is_quantized:
            assert self.tiles.column_parts == 1, "see supports"
            return shared.wide_v.at[self.lane]
        if not masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
        return shared.v.at[slot, part.column]

    def give_back(self, free: Any) -> None:
        """Lets a part of the ring be loaded anew; what was widened has been given back before."""
        if not self.call.is_quantized:
            plgpu.barrier_arrive(free)

    def widen_block(self, item: Item, part: _Part, block: Any, slot: Any, masked: bool) -> None:
        """Multiplies keys and values with their scales, on their way from the ring to where wgmma reads them."""
        shared, column = self.shared, 2 * item.head - _first_scale(item.head)
        k_scales, v_scales = (shared.scales.at[slot, :, column + i] for i in range(2))
        self.meet()  # the others may still read the last block
        plgpu.barrier_wait(shared.k_ready.at[slot])
        plgpu.barrier_wait(shared.v_ready.at[slot])
        self.widen(shared.k.at[slot], k_scales, shared.wide_k.at[self.lane], part, first=0)
        end = self.end_in(item, block) if masked else None
        self.widen(shared.v.at[slot, part.column], v_scales, shared.wide_v.at[self.lane], part, first=1, end=end)
        plgpu.commit_smem()  # so that both what was written and what was read lie behind
        plgpu.barrier_arrive(shared.k_free.at[slot])
        plgpu.barrier_arrive(shared.v_free.at[slot])
        self.meet()

    def widen(self, narrow: Any, scales: Any, wide: Any, part: _Part, first: int, end: Any | None = None) -> None:
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

    def meet(self) -> None:
        """The warpgroups of a tile wait for each other, if there are several."""
        if self.tiles.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.meeting.at[self.lane])
            plgpu.barrier_wait(self.shared.meeting.at[self.lane])

    def end_in(self, item: Item, block: Any) -> Any:
        """The end of the item's sequence, counted from the block's first token."""
        return item.position + item.num_tokens - block * BLOCK_KV

    def scale_and_mask(self, scores: Any, item: Item, part: _Part, block: Any, masked: bool) -> Any:
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
            visible &= self.in_tree(key - item.past_len, item, part)
        return jnp.where(visible, scores, MASKED)

    def in_tree(self, new_id: Any, item: Item, part: _Part) -> Any:
        """Which keys each query sees; `new_id` counts from the row's first new token, past ones are negative."""
        num_words = self.call.tree_words
        visible = (new_id < 0) | (new_id >= 32 * num_words)
        for i in range(num_words):
            word = load(self.inputs.tree_rows.at[item.tile, i, part.rows], _ROWS)
            bit = lax.shift_right_logical(lax.broadcast_in_dim(word, new_id.shape, [0]), new_id & 31) & 1
            visible |= (new_id >= 32 * i) & (new_id < 32 * (i + 1)) & (bit == 1)
        return visible

    def clear_tail(self, item: Item, part: _Part, block: Any, v: Any) -> None:
        """Zeros in place of values past the last token: a stale NaN would pass through a weight of zero."""
        end = self.end_in(item, block)
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
                self.meet()

    def add_values(self, values: Any, weights: Any, part: _Part, v: Any) -> Any:
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


def _first_scale(head: Any) -> Any:
    """Of the scales that are fetched with a head's own."""
    return lax.div(2 * head, i32(SCALES)) * SCALES


def _scores(q: Any, k: Any) -> Any:
    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, k.shape[0]), jnp.float32))


def _store(call: Call, tiles: Tiles, item: Item, part: _Part, state: Softmax, out: Any, out_ref: Any) -> None:
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
