"""Persistent thread blocks: one warpgroup loads blocks into a shared-memory ring, the others multiply them.

A work item is one output tile, or one split of its columns. Each multiprocessor has one thread block; thread block b
works on items b, b + num_cores and so on.
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
from jaxserve.pallas_kernels.warpgroups import divide

P = TypeVar("P", bound=Problem)


class ThreadBlock(ABC, Generic[P]):
    """Thread block that works on every `num_cores`-th work item.

    Methods take `number`, an item's index among this thread block's items: 0, 1, ...

    Args:
        launch: static parameters.
        num_items: number of work items for all thread blocks together.
        shared: shared memory, with barriers `ready` (a block is loaded) and `free` (it has been multiplied).
    """

    def __init__(self, launch: Launch[P], num_items: Any, shared: Any) -> None:
        self.launch, self.shared, self.index = launch, shared, lax.axis_index("block")
        num_cores = launch.chip.num_cores
        self.num_items = lax.div(jnp.maximum(num_items - self.index, 0) + (num_cores - 1), i32(num_cores))

    @abstractmethod
    def copier(self, number: Any) -> Callable[[Any, Any], None]:
        """Return `copy(block, slot)`, which starts copying one of the item's column blocks to a shared-memory ring
        slot.
        """

    @abstractmethod
    def compute_item(self, number: Any, warpgroup: Any) -> None:
        """Multiply all the item's column blocks and store this warpgroup's results."""

    def load(self) -> None:
        """Fill the ring with all items' blocks, in order."""
        num_blocks, num_slots = self.launch.num_blocks, self.launch.tiles.stages

        @pl.loop(0, self.num_items)
        def load_item(number: Any) -> None:
            copy = self.copier(number)

            @pl.loop(0, num_blocks)
            def load_block(block: Any) -> None:
                count = number * num_blocks + block
                slot = lax.rem(count, i32(num_slots))

                @pl.when(count >= num_slots)
                def wait() -> None:
                    plgpu.barrier_wait(self.shared.free.at[slot])

                copy(block, slot)

        # Wait for loads that are still in flight.
        total = self.num_items * num_blocks

        @pl.loop(jnp.maximum(total - num_slots, 0), total)
        def drain(count: Any) -> None:
            plgpu.barrier_wait(self.shared.free.at[lax.rem(count, i32(num_slots))])

    def compute(self, warpgroup: Any) -> None:

        @pl.loop(0, self.num_items)
        def compute_item(number: Any) -> None:
            self.compute_item(number, warpgroup)

    def item(self, number: Any) -> Any:
        """Convert `number`, an index among this thread block's items, to the index among all thread blocks' items."""
        return self.index + number * self.launch.chip.num_cores

    def slot(self, number: Any, block: Any) -> Any:
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
    """Return a function that runs the thread blocks on all multiprocessors.

    Args:
        launch: static parameters.
        thread_block: `ThreadBlock` subclass, called with `launch`, operand and output references, and `shared`.
        shared: named tuple with the shared memory to allocate.
        out: output shape and dtype.
        name: kernel name.
        loading_registers: registers that a loading thread keeps; see `divide`.
    """
    num_computing = launch.tiles.warpgroups

    def kernel(*refs: Any) -> None:
        def run(*memory: Any) -> None:
            block = thread_block(launch, *refs, type(shared)(*memory))
            divide(
                lambda _: block.load(),
                block.compute,
                num_computing=num_computing,
                loading_registers=loading_registers,
            )

        pl.run_scoped(run, *shared, collective_axes="thread")

    num_cores = launch.chip.num_cores
    run_kernel: Callable[..., Array] = pl.kernel(
        kernel,
        out_type=out,
        mesh=plgpu.Mesh(grid=(num_cores,), grid_names=("block",), num_threads=num_computing + 1, thread_name="thread"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name=name,
        **launch.options,
    )
    return run_kernel


def tiled(shape: tuple[int, ...], dtype: jnp.dtype, columns: int) -> Any:
    """Return shared memory in the layout that TMA writes and wgmma reads, with `columns` columns per line."""
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * dtype.itemsize)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def i32(x: int) -> Array:
    """Return a 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
