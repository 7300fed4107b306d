"""Persistent thread blocks: one warpgroup loads blocks into a shared-memory ring, the others multiply them.

A work item is one output tile, `[rows, outputs]`, or one split of the x and matrix columns that it sums over. The
columns are loaded and multiplied one block at a time. Each multiprocessor has one thread block; thread block b works on
items b, b + num_cores and so on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.kernel_values import Scalar
from jaxserve.pallas_kernels.warpgroups import divide, i32, launcher

P = TypeVar("P", bound=Problem)


class ThreadBlock(ABC, Generic[P]):
    """Body of a matmul kernel in one thread block, which works on every `num_cores`-th work item.

    Methods take `number`, an item's index among this thread block's items: 0, 1, ...

    Args:
        launch: static parameters.
        num_items: number of work items for all thread blocks together.
        shared: named tuple with the shared memory: rings with `launch.tiles.stages` slots for x and matrix blocks, and
            for each slot the barriers `ready` (a block is loaded) and `free` (it has been multiplied).
    """

    def __init__(self, launch: Launch[P], num_items: Scalar, shared: Any) -> None:
        """Determine how many of `num_items` work items this thread block has; `shared` is its shared memory."""
        self.launch, self.shared, self.index = launch, shared, lax.axis_index("block")
        num_cores = launch.chip.num_cores
        self.num_items = lax.div(jnp.maximum(num_items - self.index, 0) + (num_cores - 1), i32(num_cores))

    @abstractmethod
    def copier(self, number: Scalar) -> Callable[[Scalar, Scalar], None]:
        """Return a function `copy(block, slot)` for work item `number`.

        It starts TMA copies of column block `block`, of the item's x rows and matrix rows, from global memory to ring
        slot `slot` in shared memory.
        """

    @abstractmethod
    def compute_item(self, number: Scalar, warpgroup: Scalar) -> None:
        """Multiply work item `number`'s column blocks from the ring, and store computing warpgroup `warpgroup`'s 64
        rows or matrix rows of the output tile.
        """

    def load(self) -> None:
        """Copy the column blocks of all this thread block's items to the ring, each as soon as its slot is free."""
        num_blocks, num_slots = self.launch.num_blocks, self.launch.tiles.stages

        @pl.loop(0, self.num_items)
        def load_item(number: Scalar) -> None:
            copy = self.copier(number)

            @pl.loop(0, num_blocks)
            def load_block(block: Scalar) -> None:
                count = number * num_blocks + block
                slot = lax.rem(count, i32(num_slots))

                @pl.when(count >= num_slots)
                def wait() -> None:
                    plgpu.barrier_wait(self.shared.free.at[slot])

                copy(block, slot)

        # Wait for loads that are still in flight.
        total = self.num_items * num_blocks

        @pl.loop(jnp.maximum(total - num_slots, 0), total)
        def drain(count: Scalar) -> None:
            plgpu.barrier_wait(self.shared.free.at[lax.rem(count, i32(num_slots))])

    def compute(self, warpgroup: Scalar) -> None:
        """Call `compute_item` for all this thread block's items, in computing warpgroup `warpgroup`."""

        @pl.loop(0, self.num_items)
        def compute_item(number: Scalar) -> None:
            self.compute_item(number, warpgroup)

    def item(self, number: Scalar) -> Scalar:
        """Convert `number`, an index among this thread block's items, to the index among all thread blocks' items."""
        return self.index + number * self.launch.chip.num_cores

    def slot(self, number: Scalar, block: Scalar) -> Scalar:
        """Return the shared-memory ring slot that holds column block `block` of this thread block's item `number`."""
        return lax.rem(number * self.launch.num_blocks + block, i32(self.launch.tiles.stages))


def persistent_kernel(
    launch: Launch[P],
    thread_block: Callable[..., ThreadBlock[P]],
    shared: Any,
    out: jax.ShapeDtypeStruct,
    *,
    name: str,
    loading_registers: int | None,
) -> Callable[..., Array]:
    """Return a function that runs a matmul kernel, one thread block per multiprocessor, and returns its output.

    Args:
        launch: static parameters.
        thread_block: `ThreadBlock` subclass, called with `launch`, operand and output references, and `shared`.
        shared: named tuple with the shared memory and barriers to allocate per thread block.
        out: output shape and dtype.
        name: kernel name in profiles.
        loading_registers: registers that a loading thread keeps; see `divide`.
    """
    num_computing = launch.tiles.warpgroups

    def body(*refs: Any) -> None:
        block = thread_block(launch, *refs[: -len(shared)], type(shared)(*refs[-len(shared) :]))
        divide(lambda _: block.load(), block.compute, num_computing=num_computing, loading_registers=loading_registers)

    return launcher(
        body,
        name=name,
        num_blocks=launch.chip.num_cores,
        num_warpgroups=num_computing + 1,
        shared=shared,
        interpret=launch.interpret,
        out=out,
    )


def tiled(shape: tuple[int, ...], dtype: jnp.dtype, columns: int) -> Any:
    """Return a shared-memory array to allocate, in the swizzled layout that TMA writes and wgmma reads.

    Args:
        shape: shape of the array; the last axis is a multiple of `columns`.
        dtype: dtype of the array.
        columns: elements per shared-memory line, which has 32, 64 or 128 bytes.
    """
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * dtype.itemsize)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
