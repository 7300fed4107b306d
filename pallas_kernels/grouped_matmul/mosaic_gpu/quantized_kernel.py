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

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from jaxserve.pallas_kernels.elements import FLOAT16_BITS, INT4_ZERO
from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu import fragments
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.pipeline import ThreadBlock, persistent_kernel, tiled
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.quantized_matmul import WGMMA_COLUMNS, scales_sums, sums_shape
from jaxserve.pallas_kernels.grouped_matmul.problem import QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.warpgroups import i32, load, spread, store

LOADING_REGISTERS = {2: 40, 3: 56, 4: 32}  # registers per loading thread, by computing warpgroups
_LAYOUT = plgpu.Layout.WGMMA


class Shared(NamedTuple):
    """A thread block's shared memory and barriers; a stage is a ring slot for one column block.

    There are two halves if a stored byte holds two elements, one from each half of a matrix row; else one.
    """

    x: Ref  # [stages, halves, rows, columns], the x columns that the elements are multiplied by
    elements: Ref  # [stages, outputs, columns], stored bytes
    scale: Ref  # [stages, halves, groups, outputs]
    offset: Ref  # [stages, halves, groups, outputs], zero points or minima
    weight: Ref  # [warpgroups, 64, 64], for the interpreter, which has no wgmma with registers
    ready: Ref  # barrier per stage: all copies are complete
    free: Ref  # barrier per stage: all warpgroups have multiplied the block


def multiply(
    launch: Launch[QuantizedProblem], x: Float[Array, "padded K"], matrix: QuantizedStack, layer: Int[Array, ""]
) -> Float32[Array, "splits padded outputs"]:
    """Multiply x by one layer's transposed quantised matrix in one kernel launch.

    Args:
        launch: static parameters.
        x: rows, padded to whole row tiles.
        matrix: quantised matrices for all layers.
        layer: layer whose matrix is used.

    Returns:
        Sums over the columns in each split, padded to whole tiles; without the scales if there is one scale per row.
    """
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
    """Return shapes, dtypes and layouts for the shared memory to allocate per thread block, and its barriers."""
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
    """Matmul with a quantised matrix in one thread block; work items are output tiles, or their column splits.

    Args:
        launch: static parameters.
        layer: layer whose matrix is used, `[1]`.
        x: x in global memory, `[padded, K]`.
        elements: stored elements in global memory, `[layers, N, bytes]`.
        scale: scales in global memory, `[layers, groups, N]`.
        offset: zero points or minima in global memory, shaped like `scale`; not read if there are none.
        out: output in global memory, `[splits, padded, outputs]`.
        shared: shared memory.
    """

    def __init__(
        self,
        launch: Launch[QuantizedProblem],
        layer: Ref,
        x: Ref,
        elements: Ref,
        scale: Ref,
        offset: Ref,
        out: Ref,
        shared: Shared,
    ) -> None:
        """Take the references to a quantised matmul's operands and output in global memory; see the class."""
        self.layer, self.out = layer[0], out
        self.x, self.elements, self.scale, self.offset = x, elements, scale, offset
        super().__init__(launch, launch.num_row_tiles * launch.num_output_tiles * launch.tiles.splits, shared)

    def copier(self, number: Scalar) -> Callable[[Scalar, Scalar], None]:
        """Return a function `copy(block, slot)` that loads column block `block` of work item `number` to a ring slot:
        x columns, elements, scales and offsets.
        """
        shared, problem, tiles = self.shared, self.launch.problem, self.launch.tiles
        first_row, first_output, split = self._tile(number)
        rows, outputs = pl.ds(first_row, tiles.rows), pl.ds(first_output, tiles.outputs)

        def copy(block: Scalar, slot: Scalar) -> None:
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

    def compute_item(self, number: Scalar, warpgroup: Scalar) -> None:
        """Multiply and store computing warpgroup `warpgroup`'s 64 matrix rows in work item `number`'s output tile."""
        is_sum_scaled = scales_sums(self.launch.problem, self.launch.tiles.rows)
        multiply = self._multiply_groups if is_sum_scaled else self._multiply
        self._store(multiply(warpgroup, number), number, warpgroup)

    def _tile(self, number: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return the first x row, first matrix row and column split of this thread block's item `number`."""
        tiles, num_output_tiles, item = self.launch.tiles, i32(self.launch.num_output_tiles), self.item(number)
        split, tile = lax.rem(item, i32(tiles.splits)), lax.div(item, i32(tiles.splits))
        row_tile, output_tile = lax.div(tile, num_output_tiles), lax.rem(tile, num_output_tiles)
        return row_tile * tiles.rows, output_tile * tiles.outputs, split

    def _multiply(self, warpgroup: Scalar, number: Scalar) -> Registers:
        """Return one work item's float32 sums, `[64, x rows]`; elements are scaled before the matmul.

        Elements with one scale per matrix row are not scaled: `QuantizedMatmul.multiply` scales the sums.

        Args:
            warpgroup: computing warpgroup, which has 64 matrix rows.
            number: the item's index in this thread block.
        """
        tiles = self.launch.tiles

        def multiply(acc: Ref) -> Registers:
            @pl.loop(0, self.launch.num_blocks)
            def add(block: Scalar) -> None:
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

    def _multiply_groups(self, warpgroup: Scalar, number: Scalar) -> Registers:
        """Return one work item's float32 sums, `[64, x rows]`; scales multiply each column group's sum.

        Args:
            warpgroup: computing warpgroup, which has 64 matrix rows.
            number: the item's index in this thread block.
        """
        problem, tiles = self.launch.problem, self.launch.tiles
        shape, num_units = (WARPGROUP_ROWS, tiles.rows), tiles.columns // WGMMA_COLUMNS
        units = [(half, unit) for half in range(problem.per_byte) for unit in range(num_units)]
        group_units = min(problem.group_size, tiles.columns) // WGMMA_COLUMNS

        @pl.loop(0, self.launch.num_blocks, init_carry=plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT))
        def totals(block: Scalar, total: Registers) -> Registers:
            slot, elements = self._next_block(number, block, warpgroup)
            weight = self._weight(slot, elements, *units[0], warpgroup)
            for first in range(0, len(units), group_units):
                half, group = units[first][0], units[first][1] // group_units

                def multiply(acc: Ref, weight: Registers = weight, first: int = first) -> tuple[Registers, Registers]:
                    for index in range(first, first + group_units):
                        self._start_wgmma(acc, weight, slot, *units[index], warpgroup)
                        if index > first:
                            plgpu.wgmma_wait(1)
                        if index + 1 < len(units):  # convert the next elements while wgmma runs
                            weight = self._weight(slot, elements, *units[index + 1], warpgroup)
                    return acc[...], weight

                sums, weight = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
                scales = self._row_floats(self.shared.scale.at[slot, half, group], warpgroup)
                total += sums * spread(scales, shape, _LAYOUT)
            self._free_block(slot)
            return total

        return totals

    def _next_block(self, number: Scalar, block: Scalar, warpgroup: Scalar) -> tuple[Scalar, Registers]:
        """Wait until column block `block` of work item `number` is in shared memory.

        Returns:
            The block's ring slot, and the stored bytes `[64, columns]` for computing warpgroup `warpgroup`'s matrix
            rows, in the register order that `fragments.floats` reads.
        """
        slot = self.slot(number, block)
        plgpu.barrier_wait(self.shared.ready.at[slot])
        outputs = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        stored = load(self.shared.elements.at[slot, outputs], fragments.LOADED)
        return slot, fragments.exchanged(stored, self.launch.problem.elements, self.launch.interpret)

    def _free_block(self, slot: Scalar) -> None:
        """Inform the loading warpgroup that this warpgroup no longer needs the block in ring slot `slot`."""
        if self.launch.interpret is not None:  # its barriers do not order earlier reads before later copies
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.free.at[slot])

    def _start_wgmma(self, acc: Ref, weight: Registers, slot: Scalar, half: int, unit: int, warpgroup: Scalar) -> None:
        """Start `acc += weight @ x.T` by wgmma for 64 columns, without waiting for the result.

        Args:
            acc: accumulator in registers, `[64, x rows]`.
            weight: matrix elements, `[64, 64]`, in x's dtype.
            slot: ring slot with the x block.
            half: index of x's columns in the slot: those for the low or for the high bits of each stored byte.
            unit: the 64 columns' index in the block.
            warpgroup: computing warpgroup index.
        """
        x = self.shared.x.at[slot, half, :, pl.ds(unit * WGMMA_COLUMNS, WGMMA_COLUMNS)].transpose((1, 0))
        if self.launch.interpret is not None:  # it has no wgmma with registers
            store(self.shared.weight.at[warpgroup], weight)
            plgpu.commit_smem()
            weight = self.shared.weight.at[warpgroup]
        plgpu.wgmma(acc, weight, x)

    def _weight(self, slot: Scalar, elements: Registers, half: int, unit: int, warpgroup: Scalar) -> Registers:
        """Convert 64 columns of stored elements to floats in x's dtype, scaled unless scales multiply the sums.

        Args:
            slot: ring slot with the scales and offsets.
            elements: stored bytes `[64, columns]` from `_next_block`.
            half: 0 for the elements in the low bits of each byte, 1 for the high bits; 0 if bytes have one element.
            unit: the 64 columns' index in the block.
            warpgroup: computing warpgroup index.

        Returns:
            Matrix elements, `[64, 64]`.
        """
        launch, problem, shared, dtype = self.launch, self.launch.problem, self.shared, self.launch.problem.dtype
        values = fragments.floats(elements, problem.elements, dtype, half, unit, launch.interpret)

        def spread_groups(grid: Ref, convert: Callable[[Registers], Registers]) -> Registers:
            """Return each element's converted scale or offset, `[64, 64]`; `grid` is the shared memory with all."""
            count = problem.block_groups(WGMMA_COLUMNS)
            first = unit * WGMMA_COLUMNS // problem.group_size if launch.tiles.columns > problem.group_size else 0
            rows = [convert(self._row_floats(grid.at[slot, half, first + group], warpgroup)) for group in range(count)]
            shape = (WARPGROUP_ROWS, WGMMA_COLUMNS)
            return fragments.joined([spread(row, shape, _LAYOUT) for row in rows], launch.interpret)

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

    def _row_floats(self, group: Ref, warpgroup: Scalar) -> Registers:
        """Load one column group's scales, zero points or minima as float32 for a warpgroup's 64 matrix rows.

        Args:
            group: one value per matrix row in shared memory, `[outputs]`.
            warpgroup: computing warpgroup index.
        """
        values = load(group.at[pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)], _LAYOUT.reduce(1))
        if values.dtype == FLOAT16_BITS:
            values = lax.bitcast_convert_type(values, jnp.float16)
        return (values.astype(jnp.int32) if values.dtype == jnp.uint8 else values).astype(jnp.float32)

    def _store(self, sums: Registers, number: Scalar, warpgroup: Scalar) -> None:
        """Write `sums`, `[64 matrix rows, x rows]`, to work item `number`'s output tile, transposed.

        The layout makes each thread write 32 adjacent bytes per x row.
        """
        first_row, first_output, split = self._tile(number)
        outputs = pl.ds(first_output + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        out = self.out.at[split, pl.ds(first_row, self.launch.tiles.rows), outputs]
        store(out.transpose((1, 0)), plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED))
