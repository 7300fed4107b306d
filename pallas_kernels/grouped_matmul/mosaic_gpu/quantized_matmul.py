"""Matmul with quantised matrices on Hopper GPUs: supported problems and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.elements import scale_floats
from jaxserve.pallas_kernels.grouped_matmul.launch import Launch, MatmulKernel, Tiles
from jaxserve.pallas_kernels.grouped_matmul.problem import QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS
from jaxserve.pallas_kernels.target import TargetChip

DTYPES = ("bfloat16", "float16")
MIN_GROUP_SIZE = 8  # columns that are adjacent in wgmma's registers
COPY_BYTES = 128  # TMA copies scales to shared memory in multiples
WGMMA_COLUMNS = 64  # columns per wgmma with registers: a 128-byte line of x
MIN_COLUMNS = 64  # bytes per matrix row in a block, or twice as many
ROW_MULTIPLE = 8  # x rows per tile are a multiple
MAX_ROWS = 256  # x rows that one instruction multiplies
SCALED_SUM_ROWS = 64  # x rows up to which scaling sums costs less than scaling elements, for 64-column groups
MAX_ROWS_BY_WARPGROUPS = {4: 32, 3: 64, 2: MAX_ROWS}  # computing warpgroups: x rows whose sums fit their registers
RING_BYTES = SHARED_BYTES - 2048  # shared memory less everything else that a thread block keeps there
LATENCY_BYTES = 24 * 1024  # bytes that a multiprocessor can load in the time to start and store a work item


@dataclass(frozen=True)
class TileLimits:
    """Tile size limits of the Hopper kernel for quantised matrices; tuned values override the defaults.

    Attributes:
        rows: maximum x rows per tile. Each row tile reads and dequantises the matrix again.
        columns: maximum bytes per matrix row in a column block.
        warpgroups: maximum computing warpgroups, with 64 matrix rows each.
        stages: maximum column blocks in the shared-memory ring.
    """

    rows: int = MAX_ROWS
    columns: int = 2 * MIN_COLUMNS
    warpgroups: int = 4
    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is free only once it is multiplied
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.columns < MIN_COLUMNS:
            raise ValueError(f"columns must be at least {MIN_COLUMNS}, got {self.columns}")
        if not ROW_MULTIPLE <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be between {ROW_MULTIPLE} and {MAX_ROWS}, got {self.rows}")
        if self.warpgroups < min(MAX_ROWS_BY_WARPGROUPS):
            raise ValueError(f"warpgroups must be at least {min(MAX_ROWS_BY_WARPGROUPS)}, got {self.warpgroups}")


class QuantizedMatmul(MatmulKernel[QuantizedProblem]):
    """Backend for matmuls with quantised matrices on Hopper GPUs."""

    platform = "gpu"
    module = f"{__package__}.quantized_kernel"
    limits = TileLimits

    def unsupported_problem(self, problem: QuantizedProblem) -> str | None:
        """Return why the kernel cannot run the problem on any Hopper GPU: a dtype, matrix size or scale group size.

        Return None if it can.
        """
        if (reason := problem.unsupported_elements(DTYPES)) is not None:
            return reason
        if problem.has_zero and problem.elements != "int4":
            return f"zero points must be those of int4, not of {problem.elements}"
        if problem.stored_columns % MIN_COLUMNS:
            return f"rows of the matrix must have a multiple of {MIN_COLUMNS} bytes, not {problem.stored_columns}"
        size = problem.group_size
        if size % WGMMA_COLUMNS and (WGMMA_COLUMNS % size or size < MIN_GROUP_SIZE):
            known = f"{WGMMA_COLUMNS} columns, or of a multiple or a part of them of {MIN_GROUP_SIZE} or more"
            return f"groups must be of {known}, not of {size}"
        return None

    def choose_tiles(self, problem: QuantizedProblem, limits: TileLimits, chip: TargetChip) -> Tiles:
        """Return the tiles, within `limits` and shared memory, with the lowest estimated time (`_cost`).

        Raises:
            ValueError: shared memory does not hold two column blocks.
        """
        num_tiles = -(-problem.num_rows // limits.rows)
        rows = -(-problem.num_rows // (num_tiles * ROW_MULTIPLE)) * ROW_MULTIPLE  # about equal tiles
        min_warpgroups = min(MAX_ROWS_BY_WARPGROUPS)
        possible = [
            (stages, columns, warpgroups)
            for columns in (2 * MIN_COLUMNS, MIN_COLUMNS)
            if columns <= limits.columns and problem.stored_columns % columns == 0
            if columns % problem.group_size == 0 or problem.group_size % columns == 0
            for warpgroups, max_rows in MAX_ROWS_BY_WARPGROUPS.items()
            if warpgroups <= limits.warpgroups and (rows <= max_rows or warpgroups == min_warpgroups)
            if all(size % COPY_BYTES == 0 for size in _grid_bytes(problem, columns, warpgroups))
            if (stages := min(limits.stages, RING_BYTES // _stage_bytes(problem, rows, columns, warpgroups))) >= 2
        ]
        if not possible:
            raise ValueError(f"stages must be at least 2, and memory holds fewer for {rows} rows of x")
        choices = [
            Tiles(rows, warpgroups * WARPGROUP_ROWS, columns, warpgroups=warpgroups, stages=stages, splits=splits)
            for stages, columns, warpgroups in possible
            if stages >= min(3, max(possible)[0])
            for splits in range(1, problem.stored_columns // columns + 1)
            if problem.stored_columns // columns % splits == 0
        ]
        return min(choices, key=lambda tiles: _cost(problem, tiles, chip.num_cores))

    def multiply(
        self,
        problem: QuantizedProblem,
        x: Float[Array, "T K"],
        matrix: QuantizedStack,
        group_sizes: None,
        layer: Int[Array, ""],
    ) -> Float[Array, "T N"]:
        """Multiply x by one layer's transposed quantised matrix; return float32.

        Args:
            problem: static parameters.
            x: rows.
            matrix: quantised matrices for all layers.
            group_sizes: None, since all rows have one matrix.
            layer: layer whose matrix is used.
        """
        launch = self.launch(problem)
        _, padded_rows, _ = sums_shape(launch)
        x = jnp.pad(x, ((0, padded_rows - problem.num_rows), (0, 0)))
        y: Array = self.kernel().multiply(launch, x, matrix, layer).sum(axis=0)
        y = y[: problem.num_rows, : problem.num_outputs]
        return y if problem.scales_elements else y * scale_floats(jnp.take(matrix.scale, layer, axis=0))


KERNEL = QuantizedMatmul()


def scales_sums(problem: QuantizedProblem, rows: int) -> bool:
    """Return whether scales multiply each scale group's float32 sums instead of the matrix elements.

    This rounds nothing, and is cheaper for few x rows per tile (`rows`) and large groups.
    """
    size = problem.group_size
    max_rows = 0 if size % WGMMA_COLUMNS else SCALED_SUM_ROWS if size == WGMMA_COLUMNS else 2 * SCALED_SUM_ROWS
    return problem.scales_elements and not problem.has_minimum and rows <= max_rows


def sums_shape(launch: Launch[QuantizedProblem]) -> tuple[int, int, int]:
    """Return the kernel's output shape: (splits, x rows, matrix rows), both padded to whole tiles."""
    tiles = launch.tiles
    return tiles.splits, launch.num_row_tiles * tiles.rows, launch.num_output_tiles * tiles.outputs


def _grid_bytes(problem: QuantizedProblem, columns: int, warpgroups: int) -> tuple[int, ...]:
    """Return the shared-memory bytes of a column block's scales, and of its zero points or minima; omit absent ones.

    Args:
        problem: static parameters.
        columns: stored bytes per matrix row in the block.
        warpgroups: computing warpgroups, with 64 matrix rows each.
    """
    count = problem.block_groups(columns) * warpgroups * WARPGROUP_ROWS
    sizes = (problem.scale_dtype.itemsize if problem.scales_elements else 0, problem.offset_bytes)
    return tuple(count * size for size in sizes if size)


def _stage_bytes(problem: QuantizedProblem, rows: int, columns: int, warpgroups: int) -> int:
    """Return the shared-memory bytes per ring stage: a column block of x, elements, scales and offsets.

    Args:
        problem: static parameters.
        rows: x rows in the block.
        columns: stored bytes per matrix row in the block.
        warpgroups: computing warpgroups, with 64 matrix rows each.
    """
    x_bytes, element_bytes = rows * columns * problem.dtype.itemsize, warpgroups * WARPGROUP_ROWS * columns
    return problem.per_byte * (x_bytes + sum(_grid_bytes(problem, columns, warpgroups))) + element_bytes


def _cost(problem: QuantizedProblem, tiles: Tiles, num_cores: int) -> float:
    """Estimate a kernel's time as the bytes that the busiest multiprocessor loads and stores.

    Bytes from the L2 cache (x, sums) count half.
    """
    row_tiles = -(-problem.num_rows // tiles.rows)
    items = row_tiles * -(-problem.num_outputs // tiles.outputs) * tiles.splits
    x_bytes = tiles.rows * problem.num_inputs * problem.dtype.itemsize
    sum_bytes = tiles.rows * tiles.outputs * 4 * (2 if tiles.splits > 1 else 1)
    item = (tiles.outputs * problem.stored_columns + x_bytes / 2) / tiles.splits + sum_bytes / 2 + LATENCY_BYTES
    return -(-items // num_cores) * item
