"""The kernel: writes a step's keys and values, then attends, lanes first and tiles after them. See the package."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32, Shaped

from pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Operands, Refs
from pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import (
    BASE_TOKEN,
    FIRST_BLOCK,
    KV_LEN,
    LANES,
    LEAD,
    NUM_BLOCKS,
    NUM_LANE_COLUMNS,
    NUM_TILE_COLUMNS,
    NUM_TOKENS,
    PAGE_IDS,
    PAST_LEN,
    POSITION,
    ROW,
    SCALE_HEADS,
    SCALE_TOKENS,
    SUBLANES,
    TILE_FIRST_BLOCK,
    TILE_ROW,
    Blocks,
    Call,
    Plan,
    heads_together,
)
from pallas_kernels.ragged_paged_attention.mosaic_tpu.writes import Writer
from pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite: a query that has seen no key yet must not turn into NaN


def write_and_attend(
    call: Call, blocks: Blocks, layer: Int32[Array, "1"], plan: Plan, operands: Operands
) -> tuple[Pages, Float32[Array, "lanes K filled width"], Shaped[Array, "Q padded width"]]:
    """The updated pool, the outputs of lanes and those of tiles; those of tokens of no tile are uninitialized."""
    scalars = (layer, plan.counts, plan.writes, plan.lanes, plan.groups, *plan.tiles)
    inputs = {name: x for name, x in operands._asdict().items() if x is not None}
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    elsewhere = {"lane_sinks": pltpu.VMEM, "tile_sinks": pltpu.SMEM}
    in_specs = [pl.BlockSpec(memory_space=elsewhere.get(name, pltpu.HBM)) for name in inputs]
    pool = [name for name in ("kv_pages", "scales") if name in inputs]
    results = [inputs[name] for name in (*pool, "lane_queries", "tile_queries")]
    interpret = {} if call.interpret is None else {"interpret": call.interpret}
    *updated, lane_out, tile_out = pl.pallas_call(
        functools.partial(_kernel, call, blocks, len(scalars), tuple(inputs)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(1,), in_specs=in_specs, out_specs=[hbm] * len(results)
        ),
        input_output_aliases={len(scalars) + list(inputs).index(name): i for i, name in enumerate(pool)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=2 * call.vmem_bytes),
        cost_estimate=_cost(call),
        name="ragged_paged_attention",
        **interpret,
    )(*scalars, *inputs.values())
    return QuantizedPages(*updated) if call.has_scales else updated[0], lane_out, tile_out


def _cost(call: Call) -> pl.CostEstimate:
    """That of rows as long as they may be, which is what programs that are compiled ahead are compared by."""
    keys = call.num_rows * call.table_width * call.page_size
    dots = keys * call.num_query_heads * -(-call.num_tokens // call.num_rows)
    activation_bytes = call.num_tokens * 2 * (call.num_query_heads + call.num_kv_heads) * call.head_dim * 4
    return pl.CostEstimate(
        flops=4 * dots * call.head_dim,
        transcendentals=dots,
        bytes_accessed=keys * call.token_bytes + keys // call.slab * call.scale_bytes + activation_bytes,
    )


def _kernel(call: Call, blocks: Blocks, num_scalars: int, names: tuple[str, ...], *refs: Any) -> None:
    layer, counts, writes, lanes, groups, *tiles = refs[:num_scalars]
    inputs = Operands(**dict(zip(names, refs[num_scalars:], strict=False)))
    kv_pages, *scales, lane_out, tile_out = refs[num_scalars + len(names) :]
    results = (kv_pages, scales[0] if scales else None, lane_out, tile_out)
    found = Refs(layer, counts, writes, lanes, groups, tuple(tiles), inputs, *results)
    Writer(call, blocks, found).run()
    _Lanes(call, blocks, found).run()
    for kind in range(len(found.tiles)):
        _Tiles(call, blocks, found, kind).run()


class _Span(NamedTuple):
    """What a unit has of one sequence."""

    row: Any
    first_page: Any  # among those of the row
    num_pages: Any  # zero where the sequence has ended


class _Pages(NamedTuple):
    """Those of units in memory, or of one."""

    values: Any  # [slots, pages, K, P, 2H]
    scales: Any  # f32[slots, pages, slabs, rows, 128]; None for pools without
    scales_by_token: Any  # f32[sequences, keys and values of heads, tokens], of the unit that is worked on

    def at(self, slot: Any) -> _Pages:
        """Those of one unit."""
        scales = None if self.scales is None else self.scales.at[slot]
        return self._replace(values=self.values.at[slot], scales=scales)


class _Block(NamedTuple):
    """A kv head of a sequence's block."""

    keys: Any  # [tokens, width]
    values: Any
    key_scales: Any  # f32[1, tokens]; None for pools without
    value_scales: Any


class _Phase(ABC):
    """A list of entries, each with blocks of keys to go through: one after the other they are the units of the phase.

    While one unit is worked on, the pages of the next ones are on their way, and the page ids of the one after those.
    """

    sequences: int  # of a unit
    pages: int  # of a sequence in a unit

    def __init__(self, call: Call, blocks: Blocks, refs: Refs, num_units: Any) -> None:
        self.call, self.blocks, self.refs, self.num_units = call, blocks, refs, num_units
        self.block_tokens = self.pages * call.page_size
        self.id_chunks = -(-call.table_width // PAGE_IDS)

    @abstractmethod
    def num_blocks(self, entry: Any) -> Any:
        """Of an entry."""

    @abstractmethod
    def spans(self, entry: Any, block: Any) -> list[_Span]:
        """The pages of each sequence in the block-th block of an entry, counted from its first."""

    @abstractmethod
    def query_copies(self, entry: Any, slot: Any, scratch: Any) -> list[Any]:
        """What brings the queries of an entry."""

    @abstractmethod
    def compute(self, entry: Any, block: Any, unit: Any, ring: _Pages, scratch: Any) -> None:
        """Attends to the unit in `ring`."""

    @abstractmethod
    def finish(self, scratch: Any) -> None:
        """After the last unit."""

    @abstractmethod
    def scratch(self) -> Any:
        """What else the phase keeps in memory."""

    def run(self) -> None:
        slots, K = self.blocks.slots, self.call.num_kv_heads
        page = (K, self.call.page_size, 2 * self.call.head_dim)
        ring = _Pages(pltpu.VMEM((slots, self.sequences * self.pages, *page), self.call.kv_dtype), None, None)
        if self.call.has_scales:
            tiles = self.refs.scales.shape[2:]
            by_token = (self.sequences, SCALE_HEADS * tiles[1], -(-self.block_tokens // LANES) * LANES)
            ring = ring._replace(
                scales=pltpu.VMEM((slots, self.sequences * self.pages, *tiles), jnp.float32),
                scales_by_token=pltpu.VMEM(by_token, jnp.float32),
            )
        pl.run_scoped(
            self.go_through,
            ring,
            pltpu.SMEM((2, self.sequences, 1, PAGE_IDS), jnp.int32),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((2,)),
            self.scratch(),
        )

    def go_through(self, ring: _Pages, ids: Any, page_sems: Any, id_sems: Any, scratch: Any) -> None:
        ahead = self.blocks.slots - 1

        def fetch(unit: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
            """Asks for the pages of a unit and the page ids of the next; tells where that is."""
            following = self.after(*at)

            @pl.when(unit + 1 < self.num_units)
            def next_ids() -> None:
                self.start_ids(following, ids, id_sems, lax.rem(unit + 1, 2))

            @pl.when(unit < self.num_units)
            def pages() -> None:
                self.start_pages(at, unit, ring, ids, page_sems, id_sems, scratch)

            return following

        @pl.when(self.num_units > 0)
        def first_ids() -> None:
            self.start_ids((0, 0), ids, id_sems, 0)

        start = (jnp.int32(0), jnp.int32(0))
        fetched = lax.fori_loop(0, ahead, fetch, start)

        def step(unit: Any, at: tuple[tuple[Any, Any], tuple[Any, Any]]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
            here, fetched = at
            fetched = fetch(unit + ahead, fetched)
            slot = lax.rem(unit, self.blocks.slots)
            self.wait_for_pages(here, ring.at(slot), page_sems.at[slot])
            self.compute(*here, unit, ring.at(slot), scratch)
            return self.after(*here), fetched

        lax.fori_loop(0, self.num_units, step, (start, fetched))
        self.finish(scratch)

    def after(self, entry: Any, block: Any) -> tuple[Any, Any]:
        """The entry and block that follow."""
        is_last = block + 1 >= self.num_blocks(entry)
        return jnp.where(is_last, entry + 1, entry), jnp.where(is_last, 0, block + 1)

    def id_copies(self, at: tuple[Any, Any], ids: Any, id_sems: Any, half: Any) -> list[tuple[Any, Any]]:
        copies = []
        for number, span in enumerate(self.spans(*at)):
            chunk = span.row * self.id_chunks + span.first_page // PAGE_IDS
            source = self.refs.inputs.page_ids.at[jnp.where(span.num_pages > 0, chunk, 0)]
            copies.append((span, pltpu.make_async_copy(source, ids.at[half, number], id_sems.at[half])))
        return copies

    def start_ids(self, at: tuple[Any, Any], ids: Any, id_sems: Any, half: Any) -> None:
        for span, copy in self.id_copies(at, ids, id_sems, half):
            pl.when(span.num_pages > 0)(copy.start)

    def start_pages(
        self, at: tuple[Any, Any], unit: Any, ring: _Pages, ids: Any, page_sems: Any, id_sems: Any, scratch: Any
    ) -> None:
        entry, block = at
        half, slot = lax.rem(unit, 2), lax.rem(unit, self.blocks.slots)

        @pl.when(block == 0)
        def queries() -> None:
            for copy in self.query_copies(entry, lax.rem(entry, self.blocks.slots), scratch):
                copy.start()

        for span, copy in self.id_copies(at, ids, id_sems, half):
            pl.when(span.num_pages > 0)(copy.wait)
        for number, span in enumerate(self.spans(*at)):
            first_id = lax.rem(span.first_page, PAGE_IDS)

            @pl.loop(0, span.num_pages)
            def start(page: Any, number: int = number, first_id: Any = first_id) -> None:
                page_id = ids[half, number, 0, first_id + page]
                place = number * self.pages + page
                for copy in self.page_copies(self.refs.layer[0], page_id, ring.at(slot), place, page_sems.at[slot]):
                    copy.start()

    def page_copies(self, layer: Any, page_id: Any, pages: _Pages, place: Any, sem: Any) -> list[Any]:
        copies = [pltpu.make_async_copy(self.refs.kv_pages.at[layer, page_id], pages.values.at[place], sem)]
        if self.call.has_scales:
            copies.append(pltpu.make_async_copy(self.refs.scales.at[layer, page_id], pages.scales.at[place], sem))
        return copies

    def wait_for_pages(self, at: tuple[Any, Any], pages: _Pages, sem: Any) -> None:
        num_pages = sum(span.num_pages for span in self.spans(*at))

        @pl.loop(0, num_pages)
        def wait(page: Any) -> None:
            for copy in self.page_copies(0, 0, pages, 0, sem):
                copy.wait()

    def prepare(self, pages: _Pages, sequence: int, end: Any) -> None:
        """Zeros in place of a sequence's keys and values from token `end` of the block on, if it ends there.

        A stale NaN would pass through a weight of zero; integers are none, but their scales may be.
        """
        if not jnp.issubdtype(self.call.kv_dtype, jnp.integer):
            self.clear_tail(pages.values, sequence, end)
        if self.call.has_scales:
            self.order_scales(pages, sequence, end)

    def clear_tail(self, pages: Any, sequence: int, end: Any) -> None:
        slab = self.call.slab
        slabs_per_page, num_slabs = self.call.page_size // slab, self.block_tokens // slab

        @pl.when((end > 0) & (end < self.block_tokens))
        def clear() -> None:
            @pl.loop(end // slab, num_slabs)
            def clear_slab(index: Any) -> None:
                page, offset = index // slabs_per_page, lax.rem(index, slabs_per_page) * slab
                rows = pl.ds(pl.multiple_of(offset, slab), slab)
                place = pages.at[sequence * self.pages + page, :, rows]
                token = lax.broadcasted_iota(jnp.int32, place.shape, 1) + index * slab
                place[...] = jnp.where(token < end, place[...].astype(jnp.float32), 0).astype(place.dtype)

    def order_scales(self, pages: _Pages, sequence: int, end: Any) -> None:
        """Puts the scales of each head side by side, token after token; zeros from token `end` of the block on.

        Rows of a tile of scales hold several heads for the tokens of a slab, then for several slabs one head.
        """
        num_rows = pages.scales.shape[-2]
        slabs_per_page, num_slabs = self.call.page_size // SCALE_TOKENS, self.block_tokens // SCALE_TOKENS
        together = min(SCALE_HEADS, num_slabs)

        @pl.loop(0, num_slabs // together)
        def order(group: Any) -> None:
            columns = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
            column = lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 1)
            slabs = []
            for number in range(together):
                index = group * together + number
                page = sequence * self.pages + index // slabs_per_page
                slabs.append(pages.scales[page, lax.rem(index, slabs_per_page)])
            for part in range(SCALE_HEADS):
                ordered = jnp.zeros((num_rows, LANES), jnp.float32)
                for number, slab in enumerate(slabs):
                    shift = (number - part) % SCALE_HEADS * SCALE_TOKENS
                    moved = pltpu.roll(slab, shift, 1) if shift else slab
                    ordered = jnp.where(column >= number * SCALE_TOKENS, moved, ordered)
                ordered = jnp.where(column + group * LANES < end, ordered, 0)
                pages.scales_by_token[sequence, part * num_rows : (part + 1) * num_rows, columns] = ordered

    def head_block(self, pages: _Pages, sequence: int, head: Any) -> _Block:
        own = pages.values[sequence * self.pages : (sequence + 1) * self.pages, head]  # [pages, P, 2H]
        kv = own.reshape(self.block_tokens, own.shape[-1]).astype(self.call.product_dtype)
        H = self.call.head_dim
        keys, values = (kv[:, :H], kv[:, H:]) if self.call.width == H else (kv, kv)
        if not self.call.has_scales:
            return _Block(keys, values, None, None)
        tokens = slice(0, self.block_tokens)
        scales = [pages.scales_by_token[sequence, pl.ds(2 * head + part, 1), tokens] for part in range(2)]
        return _Block(keys, values, *scales)

    def dot(self, a: Any, b: Any, contracted: int) -> Any:
        """`a[m, c] . b`, over the given dimension of b, in float32."""
        is_wide = self.call.product_dtype == jnp.float32
        return lax.dot_general(
            a,
            b,
            (((1,), (contracted,)), ((), ())),
            precision=lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    def scores(self, q: Any, block: _Block) -> Any:
        """In base 2, soft-capped."""
        scale, soft_cap = self.call.scale, self.call.soft_cap
        products = self.dot(q, block.keys, 1)
        if block.key_scales is not None:
            products *= block.key_scales
        if soft_cap is None:
            return products * (scale * LOG2E)
        return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)

    def weighted_sum(self, weights: Any, block: _Block) -> Any:
        if block.value_scales is not None:
            weights = weights * block.value_scales
        return self.dot(weights.astype(block.values.dtype), block.values, 0)


class _State(NamedTuple):
    """Of an online softmax; scores in base 2."""

    max_score: Any  # f32[..., 128], the same in all columns
    denominator: Any
    values: Any  # f32[..., width], weighted sum


def _absorb(state: _State, at: Any, scores: Any, visible: Any, add_up: Callable[[Any], Any], is_live: Any) -> None:
    """Takes one more block of keys into the rows `at` of a state.

    Args:
      state: where the softmax stands.
      at: which part of it.
      scores: `[..., keys]`.
      visible: which of them count.
      add_up: the weighted sum of the block's values, of the weights.
      is_live: whether the values of the block are numbers at all.
    """
    before = state.max_score[at][..., :1]
    scores = jnp.where(visible, scores, MASKED)
    after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp2(scores - after), 0)
    rescale = jnp.exp2(before - after)
    total = state.denominator[at][..., :1] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    values = add_up(weights)
    if is_live is not None:
        values = jnp.where(is_live, values, 0)
    columns = state.max_score[at].shape
    state.max_score[at] = jnp.broadcast_to(after, columns)
    state.denominator[at] = jnp.broadcast_to(total, columns)
    state.values[at] = state.values[at] * rescale + values


def _result(state: _State, at: Any) -> Any:
    """The weighted mean of the values; of rows without any weight, zeros."""
    denominator = state.denominator[at][..., :1]
    return state.values[at] / jnp.where(denominator > 0, denominator, 1)


class _LaneScratch(NamedTuple):
    queries: Any  # f32[slots, lanes, K, filled, width]
    out: Any  # f32[2, lanes, K, filled, width]
    state: _State  # [lanes, K * filled, ...]
    query_sems: Any
    out_sems: Any


class _Lanes(_Phase):
    """Rows of one token: an entry is a group of them that go side by side, each through its own pages."""

    def __init__(self, call: Call, blocks: Blocks, refs: Refs) -> None:
        self.sequences, self.pages = blocks.lanes, blocks.lane_pages
        super().__init__(call, blocks, refs, refs.counts[1])
        self.rows = call.num_kv_heads * call.filled_group  # of a lane

    def scratch(self) -> _LaneScratch:
        call, slots, lanes = self.call, self.blocks.slots, self.sequences
        heads = (lanes, call.num_kv_heads, call.filled_group, call.width)
        columns = pltpu.VMEM((lanes, self.rows, LANES), jnp.float32)
        return _LaneScratch(
            queries=pltpu.VMEM((slots, *heads), jnp.float32),
            out=pltpu.VMEM((2, *heads), jnp.float32),
            state=_State(columns, columns, pltpu.VMEM((lanes, self.rows, call.width), jnp.float32)),
            query_sems=pltpu.SemaphoreType.DMA((slots,)),
            out_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def num_blocks(self, entry: Any) -> Any:
        return self.refs.groups[jnp.minimum(entry, self.refs.groups.shape[0] - 1)]

    def column(self, entry: Any, lane: int, column: int) -> Any:
        last = self.refs.lanes.shape[0] // NUM_LANE_COLUMNS - self.sequences
        index = jnp.minimum(entry * self.sequences, last) + lane
        return self.refs.lanes[index * NUM_LANE_COLUMNS + column]

    def first_token(self, entry: Any, lane: int, block: Any) -> Any:
        return (self.column(entry, lane, FIRST_BLOCK) + block) * self.block_tokens

    def spans(self, entry: Any, block: Any) -> list[_Span]:
        spans = []
        for lane in range(self.sequences):
            first_page = (self.column(entry, lane, FIRST_BLOCK) + block) * self.pages
            row_pages = pl.cdiv(self.column(entry, lane, KV_LEN), self.call.page_size)
            num_pages = jnp.clip(row_pages - first_page, 0, self.pages)
            spans.append(_Span(self.column(entry, lane, ROW), first_page, num_pages))
        return spans

    def query_copies(self, entry: Any, slot: Any, scratch: _LaneScratch) -> list[Any]:
        lanes = self.refs.inputs.lane_queries.at[pl.ds(entry * self.sequences, self.sequences)]
        return [pltpu.make_async_copy(lanes, scratch.queries.at[slot], scratch.query_sems.at[slot])]

    def out_copy(self, entry: Any, scratch: _LaneScratch) -> Any:
        half = lax.rem(entry, 2)
        lanes = self.refs.lane_out.at[pl.ds(entry * self.sequences, self.sequences)]
        return pltpu.make_async_copy(scratch.out.at[half], lanes, scratch.out_sems.at[half])

    def compute(self, entry: Any, block: Any, unit: Any, ring: _Pages, scratch: _LaneScratch) -> None:
        slot = lax.rem(entry, self.blocks.slots)

        @pl.when(block == 0)
        def begin() -> None:
            for copy in self.query_copies(entry, slot, scratch):
                copy.wait()
            self.reset(scratch.state)

        for lane in range(self.sequences):
            self.compute_lane(entry, block, lane, ring, scratch.queries.at[slot, lane], scratch.state)

        @pl.when(block + 1 == self.num_blocks(entry))
        def store() -> None:
            @pl.when(entry >= 2)
            def free() -> None:
                self.out_copy(entry - 2, scratch).wait()

            half = lax.rem(entry, 2)
            for lane in range(self.sequences):
                shape = scratch.out.shape[2:]
                scratch.out[half, lane] = _result(scratch.state, lane).reshape(shape)
            self.out_copy(entry, scratch).start()

    def reset(self, state: _State) -> None:
        sinks = self.refs.inputs.lane_sinks
        for lane in range(self.sequences):
            state.max_score[lane] = sinks[...] if self.call.has_sinks else jnp.full(sinks.shape, MASKED, jnp.float32)
            state.denominator[lane] = jnp.full(sinks.shape, 1.0 if self.call.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def compute_lane(self, entry: Any, block: Any, lane: int, ring: _Pages, queries: Any, state: _State) -> None:
        first, kv_len = self.first_token(entry, lane, block), self.column(entry, lane, KV_LEN)
        self.prepare(ring, lane, kv_len - first)
        heads = [self.head_block(ring, lane, head) for head in range(self.call.num_kv_heads)]
        scores = [self.scores(queries[head].astype(own.keys.dtype), own) for head, own in enumerate(heads)]
        key = lax.broadcasted_iota(jnp.int32, (self.rows, self.block_tokens), 1) + first
        visible = key < kv_len
        if self.call.window is not None:
            visible &= key >= kv_len - self.call.window

        def add_up(weights: Any) -> Any:
            size = self.call.filled_group
            own = [weights[head * size : (head + 1) * size] for head in range(len(heads))]
            return jnp.concatenate([self.weighted_sum(p, block) for p, block in zip(own, heads, strict=True)])

        _absorb(state, lane, jnp.concatenate(scores), visible, add_up, first < kv_len)

    def finish(self, scratch: _LaneScratch) -> None:
        num_entries = self.count_entries()

        @pl.loop(jnp.maximum(num_entries - 2, 0), num_entries)
        def drain(entry: Any) -> None:
            self.out_copy(entry, scratch).wait()

    def count_entries(self) -> Any:
        """Groups that have any block: the first ones."""
        groups = self.refs.groups
        return lax.fori_loop(0, groups.shape[0], lambda i, n: n + (groups[i] > 0).astype(jnp.int32), jnp.int32(0))


class _TileScratch(NamedTuple):
    queries: Any  # [slots, Q, tokens, width]
    words: Any  # i32[slots, tokens, words]
    out: Any  # [Q, tokens, width]
    others: Any  # what is there in its place
    state: _State  # [Q, tokens, ...]
    query_sems: Any
    out_sems: Any  # of what leaves, and of what is read


class _Tiles(_Phase):
    """Rows of several tokens: an entry is a tile of queries of one row."""

    def __init__(self, call: Call, blocks: Blocks, refs: Refs, kind: int) -> None:
        self.sequences, self.pages = 1, blocks.tile_pages
        self.tokens, self.table = blocks.tile_tokens[kind], refs.tiles[kind]
        super().__init__(call, blocks, refs, refs.counts[2 + kind])

    def scratch(self) -> _TileScratch:
        call, slots = self.call, self.blocks.slots
        queries, dtype = (call.num_query_heads, self.tokens, call.width), call.product_dtype
        columns = pltpu.VMEM((*queries[:2], LANES), jnp.float32)
        return _TileScratch(
            queries=pltpu.VMEM((slots, *queries), dtype),
            words=pltpu.VMEM((slots, self.tokens, max(1, call.tree_words)), jnp.int32),
            out=pltpu.VMEM(queries, dtype),
            others=pltpu.VMEM(queries, dtype),
            state=_State(columns, columns, pltpu.VMEM(queries, jnp.float32)),
            query_sems=pltpu.SemaphoreType.DMA((slots,)),
            out_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def column(self, entry: Any, column: int) -> Any:
        last = self.table.shape[0] // NUM_TILE_COLUMNS - 1
        return self.table[jnp.minimum(entry, last) * NUM_TILE_COLUMNS + column]

    def num_blocks(self, entry: Any) -> Any:
        return self.column(entry, NUM_BLOCKS)

    def end(self, entry: Any) -> Any:
        """Of the keys that the tile sees."""
        return self.column(entry, POSITION) + self.column(entry, NUM_TOKENS)

    def spans(self, entry: Any, block: Any) -> list[_Span]:
        first_page = (self.column(entry, TILE_FIRST_BLOCK) + block) * self.pages
        num_pages = jnp.clip(pl.cdiv(self.end(entry), self.call.page_size) - first_page, 0, self.pages)
        return [_Span(self.column(entry, TILE_ROW), first_page, num_pages)]

    def place(self, entry: Any) -> Any:
        """The tile's tokens in the step."""
        return pl.ds(pl.multiple_of(self.column(entry, BASE_TOKEN), SUBLANES * 2), self.tokens)

    def query_copies(self, entry: Any, slot: Any, scratch: _TileScratch) -> list[Any]:
        queries, sem = self.refs.inputs.tile_queries.at[:, self.place(entry)], scratch.query_sems.at[slot]
        copies = [pltpu.make_async_copy(queries, scratch.queries.at[slot], sem)]
        if self.call.tree_words:
            words = self.refs.inputs.tree_words.at[self.place(entry)]
            copies.append(pltpu.make_async_copy(words, scratch.words.at[slot], sem))
        return copies

    def store_copy(self, entry: Any, scratch: _TileScratch) -> Any:
        return pltpu.make_async_copy(scratch.out, self.refs.tile_out.at[:, self.place(entry)], scratch.out_sems.at[0])

    def others_copy(self, entry: Any, scratch: _TileScratch) -> Any:
        place = self.refs.tile_out.at[:, self.place(entry)]
        return pltpu.make_async_copy(place, scratch.others, scratch.out_sems.at[1])

    def compute(self, entry: Any, block: Any, unit: Any, ring: _Pages, scratch: _TileScratch) -> None:
        slot = lax.rem(entry, self.blocks.slots)

        @pl.when(block == 0)
        def begin() -> None:
            for copy in self.query_copies(entry, slot, scratch):
                copy.wait()

            @pl.when(entry > 0)
            def order() -> None:  # the tile before may have written what this one must keep
                self.store_copy(entry - 1, scratch).wait()

            self.others_copy(entry, scratch).start()
            self.reset(scratch.state)

        first = (self.column(entry, TILE_FIRST_BLOCK) + block) * self.block_tokens
        self.prepare(ring, 0, self.end(entry) - first)
        visible = self.visible(entry, first, scratch.words.at[slot])
        together = heads_together(self.call, self.tokens)

        @pl.loop(0, self.call.num_query_heads // together)
        def attend(number: Any) -> None:
            heads = pl.ds(number * together, together)
            own = self.head_block(ring, 0, number * together // self.call.group)
            q = scratch.queries[slot, heads].reshape(together * self.tokens, self.call.width)
            scores = self.scores(q, own).reshape(together, self.tokens, self.block_tokens)

            def add_up(weights: Any) -> Any:
                rows = weights.reshape(together * self.tokens, self.block_tokens)
                return self.weighted_sum(rows, own).reshape(together, self.tokens, self.call.width)

            seen = jnp.broadcast_to(visible[None], scores.shape)
            _absorb(scratch.state, heads, scores, seen, add_up, None)

        @pl.when(block + 1 == self.num_blocks(entry))
        def store() -> None:
            self.others_copy(entry, scratch).wait()
            self.merge(entry, scratch)
            self.store_copy(entry, scratch).start()

    def reset(self, state: _State) -> None:
        shape = (self.tokens, LANES)
        for head in range(self.call.num_query_heads):
            sink = self.refs.inputs.tile_sinks[head] if self.call.has_sinks else MASKED
            state.max_score[head] = jnp.full(shape, sink, jnp.float32)
        state.denominator[...] = jnp.full(state.denominator.shape, 1.0 if self.call.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def visible(self, entry: Any, first: Any, words: Any) -> Any:
        """Which keys of the block from token `first` on each query of the tile sees, `[tokens, keys]`."""
        shape = (self.tokens, self.block_tokens)
        query = lax.broadcasted_iota(jnp.int32, shape, 0) + self.column(entry, POSITION) - self.column(entry, LEAD)
        key = lax.broadcasted_iota(jnp.int32, shape, 1) + first
        visible = key <= query
        if self.call.window is not None:
            visible &= key > query - self.call.window
        if self.call.tree_words:
            visible &= self.in_tree(key - self.column(entry, PAST_LEN), words)
        return visible

    def in_tree(self, new_id: Any, words: Any) -> Any:
        """Which keys each query sees; `new_id` counts from the row's first new token, past ones are negative."""
        num_words = self.call.tree_words
        visible = (new_id < 0) | (new_id >= 32 * num_words)
        for i in range(num_words):
            word = jnp.broadcast_to(words[:, i : i + 1], new_id.shape)
            bit = lax.shift_right_logical(word, new_id & 31) & 1
            visible |= (new_id >= 32 * i) & (new_id < 32 * (i + 1)) & (bit == 1)
        return visible

    def merge(self, entry: Any, scratch: _TileScratch) -> None:
        """The tile's output, and what others wrote to the same memory tiles."""
        shape = (self.tokens, self.call.width)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) - self.column(entry, LEAD)
        is_own = (token >= 0) & (token < self.column(entry, NUM_TOKENS))

        @pl.loop(0, self.call.num_query_heads)
        def merge_head(head: Any) -> None:
            others = scratch.others[head].astype(jnp.float32)
            scratch.out[head] = jnp.where(is_own, _result(scratch.state, head), others).astype(scratch.out.dtype)

    def finish(self, scratch: _TileScratch) -> None:
        @pl.when(self.num_units > 0)
        def drain() -> None:
            self.store_copy(0, scratch).wait()
