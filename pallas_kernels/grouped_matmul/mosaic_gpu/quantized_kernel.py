"""Matmul kernel with quantised matrices for Hopper GPUs.

A work item is an x tile with a matrix tile, or one split of their columns if there would be too few items. TMA copies
x blocks, and elements and scales as they are stored, from the arrays with all layers. Each computing warpgroup has 64
matrix rows: it converts their elements to 16-bit floats in registers, and wgmma multiplies them by the x block while
the next elements are converted. So few x rows cost few instructions. Scales multiply their groups' float32 sums if that
takes fewer instructions than scaling the elements.

Splits are added up after the kernel. If tiles do not divide the matrix rows, TMA fills the last tile with zeros, and
its sums are cut off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from jaxserve.pallas_kernels.grouped_matmul.elements import FLOAT16_BITS, INT4_ZERO
from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu import fragments
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.pipeline import ThreadBlock, i32, persistent_kernel, tiled
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.quantized_matmul import WGMMA_COLUMNS, scales_sums, sums_shape
from jaxserve.pallas_kernels.grouped_matmul.problem import QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS

LOADING_REGISTERS = {2: 40, 3: 56, 4: 32}  # registers per loading thread, by computing warpgroups
_LOAD_PARAMETERS = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}
_LAYOUT = plgpu.Layout.WGMMA


class Shared(NamedTuple):
    """A thread block's shared memory and barriers."""

    x: Any  # [stages, halves, rows, columns]: bytes with two elements meet x from both halves of a row
    elements: Any  # [stages, outputs, columns]
    scale: Any  # [stages, halves, groups, outputs]
    offset: Any  # [stages, halves, groups, outputs], zero points or minima
    weight: Any  # [warpgroups, 64, 64], for the interpreter, which has no wgmma with registers
    ready: Any
    free: Any


def multiply(
    launch: Launch[QuantizedProblem], x: Float[Array, "padded K"], matrix: QuantizedStack, layer: Int[Array, ""]
) -> Float32[Array, "splits padded outputs"]:
    """Run the kernel; return the sums for each column split."""
    run = persistent_kernel(
        launch,
        QuantizedThreadBlock,
        shared_memory(launch),
        jax.ShapeDtypeStruct(sums_shape(launch), jnp.float32),
        name="quantized_matmul",
        loading_registers=LOADING_REGISTERS[launch.tiles.warpgroups],
    )
    offset = matrix.scale if matrix.offset is None else matrix.offset
    return run(layer[None], x, matrix.elements, matrix.scale, offset)


def shared_memory(launch: Launch[QuantizedProblem]) -> Shared:
    tiles, problem = launch.tiles, launch.problem
    stages, halves, dtype = tiles.stages, problem.per_byte, problem.dtype
    unused = plgpu.SMEM((8,), jnp.float32)
    grid = (stages, halves, problem.block_groups(tiles.columns), tiles.outputs)
    has_offset, offset_dtype = bool(problem.offset_bytes), jnp.uint8 if problem.has_zero else jnp.float32
    weight = tiled((tiles.warpgroups, WARPGROUP_ROWS, WGMMA_COLUMNS), dtype, WGMMA_COLUMNS)
    num_copies = 1 + halves * (1 + problem.scales_elements + has_offset)
    return Shared(
        x=tiled((stages, halves, tiles.rows, tiles.columns), dtype, WGMMA_COLUMNS),
        elements=tiled((stages, tiles.outputs, tiles.columns), problem.matrix_dtype, tiles.columns),
        scale=plgpu.SMEM(grid, problem.scale_dtype) if problem.scales_elements else unused,
        offset=plgpu.SMEM(grid, offset_dtype) if has_offset else unused,
        weight=unused if launch.interpret is None else weight,
        ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages),
    )


class QuantizedThreadBlock(ThreadBlock[QuantizedProblem]):
    """Thread block with output tiles, or their column splits, as work items."""

    def __init__(
        self,
        launch: Launch[QuantizedProblem],
        layer: Any,
        x: Any,
        elements: Any,
        scale: Any,
        offset: Any,
        out: Any,
        shared: Shared,
    ) -> None:
        self.layer, self.out = layer[0], out
        self.x, self.elements, self.scale, self.offset = x, elements, scale, offset
        super().__init__(launch, launch.num_row_tiles * launch.num_output_tiles * launch.tiles.splits, shared)

    def copier(self, number: Any) -> Callable[[Any, Any], None]:
        shared, problem, tiles = self.shared, self.launch.problem, self.launch.tiles
        first_row, first_output, split = self._tile(number)
        rows, outputs = pl.ds(first_row, tiles.rows), pl.ds(first_output, tiles.outputs)

        def copy(block: Any, slot: Any) -> None:
            ready = shared.ready.at[slot]
            start = (split * self.launch.num_blocks + block) * tiles.columns
            stored = self.elements.at[self.layer, outputs, pl.ds(start, tiles.columns)]
            plgpu.copy_gmem_to_smem(stored, shared.elements.at[slot], ready)
            for half in range(problem.per_byte):
                first = half * problem.stored_columns + start
                x = self.x.at[rows, pl.ds(first, tiles.columns)]
                plgpu.copy_gmem_to_smem(x, shared.x.at[slot, half], ready)
                groups = pl.ds(lax.div(first, i32(problem.group_size)), problem.block_groups(tiles.columns))
                grid_slice = self.layer, groups, outputs
                if problem.scales_elements:
                    plgpu.copy_gmem_to_smem(self.scale.at[grid_slice], shared.scale.at[slot, half], ready)
                if problem.offset_bytes:
                    plgpu.copy_gmem_to_smem(self.offset.at[grid_slice], shared.offset.at[slot, half], ready)

        return copy

    def compute_item(self, number: Any, warpgroup: Any) -> None:
        is_sum_scaled = scales_sums(self.launch.problem, self.launch.tiles.rows)
        multiply = self._multiply_groups if is_sum_scaled else self._multiply
        self._store(multiply(warpgroup, number), number, warpgroup)

    def _tile(self, number: Any) -> tuple[Any, Any, Any]:
        """Return the first x row, first matrix row and column split of this thread block's item `number`."""
        tiles, num_output_tiles, item = self.launch.tiles, i32(self.launch.num_output_tiles), self.item(number)
        split, tile = lax.rem(item, i32(tiles.splits)), lax.div(item, i32(tiles.splits))
        row_tile, output_tile = lax.div(tile, num_output_tiles), lax.rem(tile, num_output_tiles)
        return row_tile * tiles.rows, output_tile * tiles.outputs, split

    def _multiply(self, warpgroup: Any, number: Any) -> Any:
        """Compute one work item's float32 sums, with elements scaled before the matmul unless scales are per row.

        Args:
            warpgroup: index of the computing warpgroup, which has 64 matrix rows.
            number: index among this thread block's items.
        """
        tiles = self.launch.tiles

        def multiply(acc: Any) -> Any:
            @pl.loop(0, self.launch.num_blocks)
            def add(block: Any) -> None:
                slot, elements = self._next_block(number, block, warpgroup)
                for half in range(self.launch.problem.per_byte):
                    for unit in range(tiles.columns // WGMMA_COLUMNS):
                        weight = self._weight(slot, elements, half, unit, warpgroup)
                        self._start_wgmma(acc, weight, slot, half, unit, warpgroup)
                        plgpu.wgmma_wait(1)
                plgpu.wgmma_wait(0)
                self._free_block(slot)

            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, tiles.rows), jnp.float32))

    def _multiply_groups(self, warpgroup: Any, number: Any) -> Any:
        """Compute one work item's float32 sums, with scales applied to each column group's sum instead of its elements.

        Args:
            warpgroup: index of the computing warpgroup, which has 64 matrix rows.
            number: index among this thread block's items.
        """
        problem, tiles = self.launch.problem, self.launch.tiles
        shape, num_units = (WARPGROUP_ROWS, tiles.rows), tiles.columns // WGMMA_COLUMNS
        units = [(half, unit) for half in range(problem.per_byte) for unit in range(num_units)]
        group_units = min(problem.group_size, tiles.columns) // WGMMA_COLUMNS

        @pl.loop(0, self.launch.num_blocks, init_carry=plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT))
        def totals(block: Any, total: Any) -> Any:
            slot, elements = self._next_block(number, block, warpgroup)
            weight = self._weight(slot, elements, *units[0], warpgroup)
            for first in range(0, len(units), group_units):
                half, group = units[first][0], units[first][1] // group_units

                def multiply(acc: Any, weight: Any = weight, first: int = first) -> tuple[Any, Any]:
                    for index in range(first, first + group_units):
                        self._start_wgmma(acc, weight, slot, *units[index], warpgroup)
                        if index > first:
                            plgpu.wgmma_wait(1)
                        if index + 1 < len(units):  # convert the next elements while wgmma runs
                            weight = self._weight(slot, elements, *units[index + 1], warpgroup)
                    return acc[...], weight

                sums, weight = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
                total += sums * _spread(self._grid_row(self.shared.scale.at[slot, half, group], warpgroup), shape)
            self._free_block(slot)
            return total

        return totals

    def _next_block(self, number: Any, block: Any, warpgroup: Any) -> tuple[Any, Any]:
        """Wait for a block; return its slot, and the stored elements for this warpgroup's matrix rows."""
        slot = self.slot(number, block)
        plgpu.barrier_wait(self.shared.ready.at[slot])
        outputs = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        stored = _load(self.shared.elements.at[slot, outputs], fragments.LOADED)
        return slot, fragments.exchanged(stored, self.launch.problem.elements, self.launch.interpret)

    def _free_block(self, slot: Any) -> None:
        if self.launch.interpret is not None:  # its barriers do not order earlier reads before later copies
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.free.at[slot])

    def _start_wgmma(self, acc: Any, weight: Any, slot: Any, half: int, unit: int, warpgroup: Any) -> None:
        """Start to multiply one 64-column unit and add the result to `acc`."""
        x = self.shared.x.at[slot, half, :, pl.ds(unit * WGMMA_COLUMNS, WGMMA_COLUMNS)].transpose((1, 0))
        if self.launch.interpret is not None:  # it has no wgmma with registers
            self.shared.weight[warpgroup] = weight
            plgpu.commit_smem()
            weight = self.shared.weight.at[warpgroup]
        plgpu.wgmma(acc, weight, x)

    def _weight(self, slot: Any, elements: Any, half: int, unit: int, warpgroup: Any) -> Any:
        """Return a 64-column unit's elements as 16-bit floats, scaled unless their sums are."""
        launch, problem, shared, dtype = self.launch, self.launch.problem, self.shared, self.launch.problem.dtype
        values = fragments.floats(elements, problem.elements, dtype, half, unit, launch.interpret)

        def spread_groups(grid: Any, convert: Any) -> Any:
            """Return the converted scale or offset for each element."""
            count = problem.block_groups(WGMMA_COLUMNS)
            first = unit * WGMMA_COLUMNS // problem.group_size if launch.tiles.columns > problem.group_size else 0
            rows = [convert(self._grid_row(grid.at[slot, half, first + group], warpgroup)) for group in range(count)]
            return fragments.joined([_spread(row, (WARPGROUP_ROWS, WGMMA_COLUMNS)) for row in rows], launch.interpret)

        if problem.elements == "int4":
            bias = fragments.BIAS[dtype.name]
            if problem.has_zero:
                values -= spread_groups(shared.offset, lambda zero: (zero + bias).astype(dtype))
            else:
                values -= jnp.asarray(bias + (0 if problem.has_minimum else INT4_ZERO), dtype)
        if not problem.scales_elements or scales_sums(problem, launch.tiles.rows):
            return values
        is_exact = dtype == jnp.bfloat16 and problem.scale_dtype.name in ("bfloat16", "float8_e4m3fn")
        if is_exact and not problem.has_minimum:
            return values * spread_groups(shared.scale, lambda scale: scale.astype(dtype))
        values = values.astype(jnp.float32) * spread_groups(shared.scale, lambda scale: scale)
        if problem.has_minimum:
            values -= spread_groups(shared.offset, lambda minimum: minimum)
        return values.astype(dtype)

    def _grid_row(self, grid: Any, warpgroup: Any) -> Any:
        """Return a group's scales, zero points or minima for this warpgroup's matrix rows, as floats."""
        values = _load(grid.at[pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)], _LAYOUT.reduce(1))
        if values.dtype == FLOAT16_BITS:
            values = lax.bitcast_convert_type(values, jnp.float16)
        return (values.astype(jnp.int32) if values.dtype == jnp.uint8 else values).astype(jnp.float32)

    def _store(self, sums: Any, number: Any, warpgroup: Any) -> None:
        """Write sums to the output, transposed, in 32-byte pieces per row."""
        first_row, first_output, split = self._tile(number)
        outputs = pl.ds(first_output + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        out = self.out.at[split, pl.ds(first_row, self.launch.tiles.rows), outputs]
        out.transpose((1, 0))[...] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)


def _load(ref: Any, layout: Any) -> Any:
    """Load from memory to registers."""
    index = [()] if "idx" in _LOAD_PARAMETERS else []  # jax 0.10 requires the argument
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _spread(values: Any, shape: tuple[int, int]) -> Any:
    """Broadcast one value per matrix row over all columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [0]), _LAYOUT)
