"""The kernel: a ring of blocks that one warpgroup fills and one or two multiply. See the package."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.plan import MIN_ROWS, Call
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.warpgroups import divide
from jaxtyping import Array, Float, Int, Int32

MATRIX, BASE, BEGIN, END = range(4)  # columns of the visits
LOADING_REGISTERS = 72  # registers of a loading thread where there are three warpgroups; two have enough anyway


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block."""

    x: Any  # [stages, rows, inputs]
    weight: Any  # [stages, outputs, inputs]
    out: Any  # [warpgroups, 64, outputs], results that wait to be stored
    ready: Any
    free: Any


def multiply(
    call: Call,
    x: Float[Array, "padded K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Return the products; rows of no group are undefined."""
    problem, warpgroups = call.problem, call.tiles.warpgroups
    mesh = plgpu.Mesh(grid=(call.num_cores,), grid_names=("block",), num_threads=warpgroups + 1, thread_name="thread")
    interpret = {} if call.interpret is None else {"interpret": call.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_kernel, call, *refs), *_shared_memory(call), collective_axes="thread")

    launch = pl.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((problem.num_rows, problem.num_outputs), problem.kernel_dtype),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="grouped_matmul",
        **interpret,
    )
    visits = plan_visits(group_sizes, layer * problem.num_groups, problem.num_rows, call.tiles.rows, MIN_ROWS)
    columns = jnp.stack([visits.matrix, visits.base, visits.begin, visits.end], axis=1)
    y: Array = launch(
        visits.num_visits[None], columns, x, matrices.reshape(-1, problem.num_outputs, problem.num_inputs)
    )
    return y


def _shared_memory(call: Call) -> Shared:
    tiles, dtype = call.tiles, call.problem.matrix_dtype
    line = plgpu.TilingTransform((8, tiles.inputs)), plgpu.SwizzleTransform(tiles.inputs * dtype.itemsize)

    def ring(rows: int) -> Any:
        return plgpu.SMEM((tiles.stages, rows, tiles.inputs), dtype, transforms=line)

    return Shared(
        x=ring(tiles.rows),
        weight=ring(tiles.outputs),
        out=plgpu.SMEM((tiles.warpgroups, WARPGROUP_ROWS, tiles.outputs), call.problem.kernel_dtype),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
    )


def _kernel(call: Call, *refs: Any) -> None:
    """Run one thread block: a loading warpgroup and the computing ones."""
    num_visits, visits, x, matrices, out, *scratch = refs
    block = ThreadBlock(call, num_visits, visits, x, matrices, out, Shared(*scratch))
    num_computing = call.tiles.warpgroups
    divide(
        lambda _: block.load(),
        block.compute,
        num_computing=num_computing,
        loading_registers=LOADING_REGISTERS if num_computing > 1 else None,
    )


class ThreadBlock:
    """Thread block that works on every `num_cores`-th item: a visit with a block of the rows of its matrix."""

    def __init__(
        self, call: Call, num_visits: Any, visits: Any, x: Any, matrices: Any, out: Any, shared: Shared
    ) -> None:
        self.call, self.visits, self.x, self.matrices, self.out = call, visits, x, matrices, out
        self.shared, self.index = shared, lax.axis_index("block")
        rest = num_visits[0] * call.output_tiles - self.index
        self.num_items = lax.div(jnp.maximum(rest, 0) + (call.num_cores - 1), _i32(call.num_cores))

    def load(self) -> None:
        """Fill the ring, one pair of blocks after the other."""
        shared, tiles, blocks = self.shared, self.call.tiles, self.call.input_tiles

        @pl.loop(0, self.num_items)
        def load_item(number: Any) -> None:
            visit, first_output = self._item(number)
            rows = self.x.at[pl.ds(self.visits[visit, BASE], tiles.rows)]
            matrix = self.matrices.at[self.visits[visit, MATRIX], pl.ds(first_output, tiles.outputs)]

            @pl.loop(0, blocks)
            def load_block(block: Any) -> None:
                count, columns = number * blocks + block, pl.ds(block * tiles.inputs, tiles.inputs)
                slot = lax.rem(count, _i32(tiles.stages))

                @pl.when(count >= tiles.stages)
                def wait() -> None:
                    plgpu.barrier_wait(shared.free.at[slot])

                plgpu.copy_gmem_to_smem(rows.at[:, columns], shared.x.at[slot], shared.ready.at[slot])
                plgpu.copy_gmem_to_smem(matrix.at[:, columns], shared.weight.at[slot], shared.ready.at[slot])

        # Wait for loads that are still in flight.
        total = self.num_items * blocks

        @pl.loop(jnp.maximum(total - tiles.stages, 0), total)
        def drain(count: Any) -> None:
            plgpu.barrier_wait(shared.free.at[lax.rem(count, _i32(tiles.stages))])

    def compute(self, warpgroup: Any) -> None:
        """Multiply this warpgroup's rows of each tile, and store those of the group."""

        @pl.loop(0, self.num_items)
        def compute_item(number: Any) -> None:
            visit, first_output = self._item(number)
            shape = (WARPGROUP_ROWS, self.call.tiles.outputs)
            product = pl.run_scoped(functools.partial(self._multiply, warpgroup, number), plgpu.ACC(shape, jnp.float32))
            self._store(product, visit, first_output, warpgroup)

    def _item(self, number: Any) -> tuple[Any, Any]:
        """Return the visit of this thread block's next item, and the first row of its block of the matrix."""
        item, num_tiles = self.index + number * self.call.num_cores, _i32(self.call.output_tiles)
        return lax.div(item, num_tiles), lax.rem(item, num_tiles) * self.call.tiles.outputs

    def _multiply(self, warpgroup: Any, number: Any, sums: Any) -> Any:
        """Return the sums over all columns; blocks are given back one product later, when they have been read."""
        shared, tiles, blocks = self.shared, self.call.tiles, self.call.input_tiles
        rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def slot_of(block: Any) -> Any:
            return lax.rem(number * blocks + block, _i32(tiles.stages))

        @pl.loop(0, blocks)
        def add(block: Any) -> None:
            slot = slot_of(block)
            plgpu.barrier_wait(shared.ready.at[slot])
            plgpu.wgmma(sums, shared.x.at[slot, rows], shared.weight.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(block > 0)
            def give_back() -> None:
                plgpu.barrier_arrive(shared.free.at[slot_of(block - 1)])

        product = sums[...]  # waits for the last product
        plgpu.barrier_arrive(shared.free.at[slot_of(blocks - 1)])
        return product

    def _store(self, product: Any, visit: Any, first_output: Any, warpgroup: Any) -> None:
        """Copy the rows of the group to the output, by way of shared memory.

        A copy has a static size: a ladder of powers of two makes any number of rows.
        """
        out = self.shared.out.at[warpgroup]
        out[...] = product.astype(out.dtype)
        plgpu.commit_smem()
        base, columns = self.visits[visit, BASE] + warpgroup * WARPGROUP_ROWS, pl.ds(first_output, out.shape[1])
        done = jnp.clip(self.visits[visit, BEGIN] - base, 0, WARPGROUP_ROWS)
        num_rows = jnp.clip(self.visits[visit, END] - base, 0, WARPGROUP_ROWS) - done
        size = WARPGROUP_ROWS
        while size:

            @pl.when((num_rows & size) != 0)
            def copy(done: Any = done, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(out.at[pl.ds(done, size)], self.out.at[pl.ds(base + done, size), columns])

            done, size = done + (num_rows & size), size // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _i32(x: int) -> Array:
    """Return a 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
