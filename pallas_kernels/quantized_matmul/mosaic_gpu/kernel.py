"""The kernel: a ring of blocks that one warpgroup fills and others dequantise and multiply. See the package."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.interface import FLOAT16_BITS, INT4_ZERO, Quantized
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu import fragments
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu.memory import Shared, shared_memory
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu.plan import UNIT, Call
from jaxserve.pallas_kernels.warpgroups import divide
from jaxtyping import Array, Float, Float32, Int

LOADING_REGISTERS = {2: 40, 3: 56, 4: 32}  # registers of a loading thread, by the number of computing warpgroups
_REQUIRED_OF_LOAD = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}
_LAYOUT = plgpu.Layout.WGMMA


def multiply(
    call: Call, x: Float[Array, "padded K"], matrix: Quantized, layer: Int[Array, ""]
) -> Float32[Array, "splits padded outputs"]:
    """Return the sums of each split of the columns."""
    num_threads = call.tiles.warpgroups + 1
    mesh = plgpu.Mesh(grid=(call.num_cores,), grid_names=("block",), num_threads=num_threads, thread_name="thread")
    interpret = {} if call.interpret is None else {"interpret": call.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_kernel, call, *refs), *shared_memory(call), collective_axes="thread")

    launch = pl.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(call.shape, jnp.float32),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="quantized_matmul",
        **interpret,
    )
    offset = matrix.scale if matrix.offset is None else matrix.offset
    y: Array = launch(layer[None], x, matrix.elements, matrix.scale, offset)
    return y


def _kernel(call: Call, *refs: Any) -> None:
    """Run one thread block: a loading warpgroup and the computing ones."""
    layer, x, elements, scale, offset, out, *scratch = refs
    block = ThreadBlock(call, layer[0], x, elements, scale, offset, out, Shared(*scratch))
    num_computing = call.tiles.warpgroups
    divide(
        lambda _: block.load(),
        block.compute,
        num_computing=num_computing,
        loading_registers=LOADING_REGISTERS[num_computing],
    )


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
            rows, outputs = pl.ds(first_row, tiles.rows), pl.ds(first_output, tiles.item_outputs)

            @pl.loop(0, blocks)
            def load_block(block: Any) -> None:
                count = number * blocks + block
                slot = lax.rem(count, _i32(tiles.stages))
                ready = shared.ready.at[slot]

                @pl.when(count >= tiles.stages)
                def wait() -> None:
                    plgpu.barrier_wait(shared.free.at[slot])

                start = (split * blocks + block) * tiles.columns
                stored = self.elements.at[self.layer, outputs, pl.ds(start, tiles.columns)]
                plgpu.copy_gmem_to_smem(stored, shared.elements.at[slot], ready)
                for part in range(problem.per_byte):
                    first = part * problem.row_bytes + start
                    x = self.x.at[rows, pl.ds(first, tiles.columns)]
                    plgpu.copy_gmem_to_smem(x, shared.x.at[slot, part], ready)
                    groups = pl.ds(lax.div(first, _i32(problem.group_size)), problem.block_groups(tiles.columns))
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

        @pl.loop(0, self.num_items)
        def compute_item(number: Any) -> None:
            multiply = self._multiply_groups if self.call.scales_sums else self._multiply
            self._store(multiply(warpgroup, number), number, warpgroup)

    def _item(self, number: Any) -> tuple[Any, Any, Any]:
        """Return the first rows of x and of the matrix of this thread block's next item, and its split."""
        call = self.call
        item = self.index + number * call.num_cores
        split, tile = lax.rem(item, _i32(call.tiles.splits)), lax.div(item, _i32(call.tiles.splits))
        row_tile, output_tile = lax.div(tile, _i32(call.output_tiles)), lax.rem(tile, _i32(call.output_tiles))
        return row_tile * call.tiles.rows, output_tile * call.tiles.item_outputs, split

    def _multiply(self, warpgroup: Any, number: Any) -> Any:
        """Return the sums over the item's columns of elements that are scaled, or that have no scale of a group."""
        shape, columns = (WARPGROUP_ROWS, self.call.tiles.rows), self.call.tiles.columns

        def multiply(acc: Any) -> Any:
            @pl.loop(0, self.call.blocks)
            def add(block: Any) -> None:
                slot, elements = self._next(number, block, warpgroup)
                for part in range(self.call.problem.per_byte):
                    for unit in range(columns // UNIT):
                        weight = self._weight(slot, elements, part, unit, warpgroup)
                        self._add(acc, weight, slot, part, unit, warpgroup)
                        plgpu.wgmma_wait(1)
                plgpu.wgmma_wait(0)
                self._give_back(slot)

            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def _multiply_groups(self, warpgroup: Any, number: Any) -> Any:
        """Return the sums over the item's columns, of which those of each group are scaled."""
        shape, problem, columns = (WARPGROUP_ROWS, self.call.tiles.rows), self.call.problem, self.call.tiles.columns
        units = [(part, unit) for part in range(problem.per_byte) for unit in range(columns // UNIT)]
        num_units = min(problem.group_size, columns) // UNIT  # of a sum

        @pl.loop(0, self.call.blocks, init_carry=plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT))
        def products(block: Any, total: Any) -> Any:
            slot, elements = self._next(number, block, warpgroup)
            weight = self._weight(slot, elements, *units[0], warpgroup)
            for first in range(0, len(units), num_units):
                part, group = units[first][0], units[first][1] // num_units

                def multiply(acc: Any, weight: Any = weight, first: int = first) -> tuple[Any, Any]:
                    for index in range(first, first + num_units):
                        self._add(acc, weight, slot, *units[index], warpgroup)
                        if index > first:
                            plgpu.wgmma_wait(1)
                        if index + 1 < len(units):  # while products run
                            weight = self._weight(slot, elements, *units[index + 1], warpgroup)
                    return acc[...], weight

                sums, weight = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
                total += sums * _spread(self._rows(self.shared.scale.at[slot, part, group], warpgroup), shape)
            self._give_back(slot)
            return total

        return products

    def _next(self, number: Any, block: Any, warpgroup: Any) -> tuple[Any, Any]:
        """Wait for a block; return its place, and this warpgroup's bytes of elements."""
        slot = lax.rem(number * self.call.blocks + block, _i32(self.call.tiles.stages))
        plgpu.barrier_wait(self.shared.ready.at[slot])
        outputs = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        stored = _load(self.shared.elements.at[slot, outputs], fragments.LOADED)
        return slot, fragments.exchanged(stored, self.call.problem.elements, self.call.interpret)

    def _give_back(self, slot: Any) -> None:
        """Say that a block is used up."""
        if self.call.interpret is not None:  # to it, a barrier alone orders no reads before copies to what was read
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.free.at[slot])

    def _add(self, acc: Any, weight: Any, slot: Any, part: int, unit: int, warpgroup: Any) -> None:
        """Begin to multiply a unit of a block's columns, and to add the products to sums."""
        x = self.shared.x.at[slot, part, :, pl.ds(unit * UNIT, UNIT)].transpose((1, 0))
        if self.call.interpret is not None:  # it has no products with registers
            self.shared.weight[warpgroup] = weight
            plgpu.commit_smem()
            weight = self.shared.weight.at[warpgroup]
        plgpu.wgmma(acc, weight, x)

    def _weight(self, slot: Any, elements: Any, part: int, unit: int, warpgroup: Any) -> Any:
        """Return a unit's elements as 16-bit floats: scaled, where sums are not."""
        call, problem, shared, dtype = self.call, self.call.problem, self.shared, self.call.problem.dtype
        values = fragments.floats(elements, problem.elements, dtype, part, unit, call.interpret)

        def of_groups(grid: Any, convert: Any) -> Any:
            count = problem.block_groups(UNIT)
            first = unit * UNIT // problem.group_size if call.tiles.columns > problem.group_size else 0
            rows = [convert(self._rows(grid.at[slot, part, first + group], warpgroup)) for group in range(count)]
            return fragments.joined([_spread(row, (WARPGROUP_ROWS, UNIT)) for row in rows], call.interpret)

        if problem.elements == "int4":
            bias = fragments.BIAS[dtype.name]
            if problem.has_zero:
                values -= of_groups(shared.offset, lambda zero: (zero + bias).astype(dtype))
            else:
                values -= jnp.asarray(bias + (0 if problem.has_minimum else INT4_ZERO), dtype)
        if not problem.is_scaled or call.scales_sums:
            return values
        is_exact = dtype == jnp.bfloat16 and problem.scale_dtype.name in ("bfloat16", "float8_e4m3fn")
        if is_exact and not problem.has_minimum:
            return values * of_groups(shared.scale, lambda scale: scale.astype(dtype))
        values = values.astype(jnp.float32) * of_groups(shared.scale, lambda scale: scale)
        if problem.has_minimum:
            values -= of_groups(shared.offset, lambda minimum: minimum)
        return values.astype(dtype)

    def _rows(self, grid: Any, warpgroup: Any) -> Any:
        """Return a group's values for this warpgroup's rows of the matrix, as floats."""
        values = _load(grid.at[pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)], _LAYOUT.reduce(1))
        if values.dtype == FLOAT16_BITS:
            values = lax.bitcast_convert_type(values, jnp.float16)
        return (values.astype(jnp.int32) if values.dtype == jnp.uint8 else values).astype(jnp.float32)

    def _store(self, products: Any, number: Any, warpgroup: Any) -> None:
        """Write sums to the output, transposed: 32 bytes of a row of it at once."""
        first_row, first_output, split = self._item(number)
        outputs = pl.ds(first_output + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        out = self.out.at[split, pl.ds(first_row, self.call.tiles.rows), outputs]
        out.transpose((1, 0))[...] = plgpu.layout_cast(products, plgpu.Layout.WGMMA_TRANSPOSED)


def _load(ref: Any, layout: Any) -> Any:
    """Load from memory to registers."""
    index = [()] if "idx" in _REQUIRED_OF_LOAD else []  # jax 0.10 requires the argument
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _spread(values: Any, shape: tuple[int, int]) -> Any:
    """Return one value for each row of a matrix, for all of its columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [0]), _LAYOUT)


def _i32(x: int) -> Array:
    """Return a 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
