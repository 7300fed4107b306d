"""The kernel: a ring of blocks that one warpgroup fills and two dequantise and multiply. See the package."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.interface import INT4_ZERO, Quantized, e2m1_floats
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu.plan import COLUMNS, WARPGROUPS, Call

REGISTERS = (40, 232)  # registers of a loading and of a computing thread
_REQUIRED_OF_LOAD = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}
_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block."""

    x: Any  # [stages, parts, rows, columns]
    elements: Any  # [stages, outputs, columns]
    scale: Any  # [stages, parts, groups, outputs]
    offset: Any  # [stages, parts, groups, outputs], zero points or minima
    weight: Any  # [warpgroups, parts, outputs, columns], dequantised
    out: Any  # [warpgroups, 64, outputs], sums that wait to be stored
    ready: Any
    free: Any


def multiply(
    call: Call, x: Float[Array, "padded K"], matrix: Quantized, layer: Int[Array, ""]
) -> Float32[Array, "splits padded N"]:
    """Return the sums of each split of the columns."""
    mesh = plgpu.Mesh(grid=(call.num_cores,), grid_names=("block",), num_threads=WARPGROUPS + 1, thread_name="thread")
    interpret = {} if call.interpret is None else {"interpret": call.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_kernel, call, *refs), *_shared_memory(call), collective_axes="thread")

    launch = pl.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((call.tiles.splits, x.shape[0], call.problem.num_outputs), jnp.float32),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="quantized_matmul",
        **interpret,
    )
    offset = matrix.scale if matrix.offset is None else matrix.offset
    y: Array = launch(layer[None], x, matrix.elements, matrix.scale, offset)
    return y


def _shared_memory(call: Call) -> Shared:
    tiles, problem = call.tiles, call.problem
    stages, parts, dtype = tiles.stages, problem.per_byte, problem.dtype

    def lines(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
        transforms = plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(COLUMNS * dtype.itemsize)
        return plgpu.SMEM((*shape, COLUMNS), dtype, transforms=transforms)

    unused = plgpu.SMEM((8,), jnp.float32)
    grid = (stages, parts, problem.block_groups(COLUMNS), tiles.item_outputs)
    has_offset, offset_dtype = bool(problem.offset_bytes), jnp.uint8 if problem.has_zero else jnp.float32
    return Shared(
        x=lines((stages, parts, tiles.rows), dtype),
        elements=lines((stages, tiles.item_outputs), call.element_dtype),
        scale=plgpu.SMEM(grid, problem.scale_dtype) if problem.is_scaled else unused,
        offset=plgpu.SMEM(grid, offset_dtype) if has_offset else unused,
        weight=lines((WARPGROUPS, parts, tiles.outputs), dtype),
        out=plgpu.SMEM((WARPGROUPS, WARPGROUP_ROWS, tiles.outputs), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=1 + parts * (1 + problem.is_scaled + has_offset), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    )


def _kernel(call: Call, *refs: Any) -> None:
    """Run one thread block: a loading warpgroup and the computing ones."""
    layer, x, elements, scale, offset, out, *scratch = refs
    block = ThreadBlock(call, layer[0], x, elements, scale, offset, out, Shared(*scratch))
    thread = lax.axis_index("thread")

    @pl.when(thread == WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        block.load()

    @pl.when(thread < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        block.compute(thread)


class ThreadBlock:
    """Thread block that works on every `num_cores`-th item: a tile of x, one of the matrix, and a split of columns."""

    def __init__(
        self, call: Call, layer: Any, x: Any, elements: Any, scale: Any, offset: Any, out: Any, shared: Shared
    ) -> None:
        self.call, self.layer, self.out, self.shared = call, layer, out, shared
        self.x, self.elements, self.scale, self.offset = x, elements, scale, offset
        self.index = lax.axis_index("block")
        rest = call.num_items - self.index
        self.num_items = lax.div(jnp.maximum(rest, 0) + (call.num_cores - 1), _i32(call.num_cores))

    def load(self) -> None:
        """Fill the ring, the blocks of one turn after the other."""
        call, shared, problem = self.call, self.shared, self.call.problem
        tiles, blocks = call.tiles, call.blocks

        @pl.loop(0, self.num_items)
        def load_item(number: Any) -> None:
            first_row, first_output, split = self._item(number)
            rows, outputs = pl.ds(first_row, call.copied_rows), pl.ds(first_output, tiles.item_outputs)

            @pl.loop(0, blocks)
            def load_block(block: Any) -> None:
                count = number * blocks + block
                slot = lax.rem(count, _i32(tiles.stages))
                ready = shared.ready.at[slot]

                @pl.when(count >= tiles.stages)
                def wait() -> None:
                    plgpu.barrier_wait(shared.free.at[slot])

                start = (split * blocks + block) * COLUMNS
                stored = self.elements.at[self.layer, outputs, pl.ds(start, COLUMNS)]
                plgpu.copy_gmem_to_smem(stored, shared.elements.at[slot], ready)
                for part in range(problem.per_byte):
                    first = part * problem.row_bytes + start
                    x = shared.x.at[slot, part, pl.ds(0, call.copied_rows)]
                    plgpu.copy_gmem_to_smem(self.x.at[rows, pl.ds(first, COLUMNS)], x, ready)
                    groups = pl.ds(lax.div(first, _i32(problem.group_size)), problem.block_groups(COLUMNS))
                    place = self.layer, groups, outputs
                    if problem.is_scaled:
                        plgpu.copy_gmem_to_smem(self.scale.at[place], shared.scale.at[slot, part], ready)
                    if problem.offset_bytes:
                        plgpu.copy_gmem_to_smem(self.offset.at[place], shared.offset.at[slot, part], ready)

        # Wait for loads that are still in flight.
        total = self.num_items * blocks

        @pl.loop(jnp.maximum(total - tiles.stages, 0), total)
        def drain(count: Any) -> None:
            plgpu.barrier_wait(shared.free.at[lax.rem(count, _i32(tiles.stages))])

    def compute(self, warpgroup: Any) -> None:
        """Multiply with this warpgroup's rows of each tile of the matrix."""
        tiles = self.call.tiles

        @pl.loop(0, self.num_items)
        def compute_item(number: Any) -> None:
            sums = [plgpu.ACC((WARPGROUP_ROWS, tiles.outputs), jnp.float32)] * tiles.row_blocks
            products = pl.run_scoped(functools.partial(self._multiply, warpgroup, number), *sums)
            self._store(products, number, warpgroup)

    def _item(self, number: Any) -> tuple[Any, Any, Any]:
        """Return the first rows of x and of the matrix of this thread block's next item, and its split."""
        call = self.call
        item = self.index + number * call.num_cores
        split, tile = lax.rem(item, _i32(call.tiles.splits)), lax.div(item, _i32(call.tiles.splits))
        row_tile, output_tile = lax.div(tile, _i32(call.output_tiles)), lax.rem(tile, _i32(call.output_tiles))
        return row_tile * call.tiles.rows, output_tile * call.tiles.item_outputs, split

    def _multiply(self, warpgroup: Any, number: Any, *sums: Any) -> list[Any]:
        """Return the sums over the item's columns, for each block of rows."""
        call, shared, blocks = self.call, self.shared, self.call.blocks
        outputs = pl.ds(warpgroup * call.tiles.outputs, call.tiles.outputs)

        @pl.loop(0, blocks)
        def add(block: Any) -> None:
            slot = lax.rem(number * blocks + block, _i32(call.tiles.stages))
            plgpu.barrier_wait(shared.ready.at[slot])
            for part in range(call.problem.per_byte):
                self._dequantise(slot, part, outputs, shared.weight.at[warpgroup, part])
            plgpu.commit_smem()
            for part in range(call.problem.per_byte):
                weight = shared.weight.at[warpgroup, part].transpose((1, 0))
                for index, acc in enumerate(sums):
                    rows = pl.ds(index * WARPGROUP_ROWS, WARPGROUP_ROWS)
                    plgpu.wgmma(acc, shared.x.at[slot, part, rows], weight)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.free.at[slot])

        return [acc[...] for acc in sums]

    def _dequantise(self, slot: Any, part: int, outputs: Any, weight: Any) -> None:
        """Write one part of a block's elements, scaled, to where wgmma reads them."""
        problem, shared = self.call.problem, self.shared
        stored = _load(shared.elements.at[slot, outputs])
        if problem.per_byte == 1:
            # Integers of 8 bits are exact in 16, and there is a fast conversion.
            values = stored.astype(problem.dtype if problem.elements == "int8" else jnp.float32).astype(jnp.float32)
        else:
            codes = stored.astype(jnp.int32)
            codes = codes & 15 if part == 0 else lax.shift_right_logical(codes, jnp.full_like(codes, 4)) & 15
            values = e2m1_floats(codes) if problem.elements == "e2m1" else codes.astype(jnp.float32)
            values = values if problem.elements == "e2m1" or problem.offset_bytes else values - INT4_ZERO
        if problem.has_zero:
            values -= self._spread(shared.offset.at[slot, part], outputs)
        if problem.is_scaled:
            values *= self._spread(shared.scale.at[slot, part], outputs)
        if problem.has_minimum:
            values -= self._spread(shared.offset.at[slot, part], outputs)
        weight[...] = values.astype(problem.dtype)

    def _spread(self, grid: Any, outputs: Any) -> Any:
        """Return the value of each element's group, of a grid [groups, outputs] of a block."""
        problem, shape = self.call.problem, (self.call.tiles.outputs, COLUMNS)
        values = _spread(grid.at[0, outputs], shape)
        if (num_groups := problem.block_groups(COLUMNS)) > 1:
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
            for group in range(1, num_groups):
                others = _spread(grid.at[group, outputs], shape)
                values = jnp.where(column >= group * problem.group_size, others, values)
        return values

    def _store(self, products: list[Any], number: Any, warpgroup: Any) -> None:
        """Copy sums to the output, by way of shared memory."""
        first_row, first_output, split = self._item(number)
        out = self.shared.out.at[warpgroup]
        columns = pl.ds(first_output + warpgroup * self.call.tiles.outputs, self.call.tiles.outputs)
        for index, product in enumerate(products):
            size = min(WARPGROUP_ROWS, self.call.copied_rows - index * WARPGROUP_ROWS)
            if size <= 0:
                break
            out[...] = product
            plgpu.commit_smem()
            rows = pl.ds(first_row + index * WARPGROUP_ROWS, size)
            plgpu.copy_smem_to_gmem(out.at[pl.ds(0, size)], self.out.at[split, rows, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load(ref: Any, layout: Any = _LAYOUT) -> Any:
    """Load from memory to registers."""
    index = [()] if "idx" in _REQUIRED_OF_LOAD else []  # jax 0.10 requires the argument
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _spread(row: Any, shape: tuple[int, int]) -> Any:
    """Return one value for each row of a matrix, for all of its columns."""
    values = _load(row, _LAYOUT.reduce(1))
    values = (values.astype(jnp.int32) if values.dtype == jnp.uint8 else values).astype(jnp.float32)
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [0]), _LAYOUT)


def _i32(x: int) -> Array:
    """Return a 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
