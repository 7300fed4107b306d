"""Writes of new keys and values to their pages. See the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import work_plan
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import SCALE_TOKENS, SUBLANES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import page_ref
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE


class PageWriter:
    """Part of the kernel that writes new keys and values to their pages, one slab after the other.

    A slab is read from HBM, changed in VMEM and written back, while others are in flight. All slabs are written before
    any row attends, so that rows see them in shared pages.
    """

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs) -> None:
        """Write the slabs that the plan, in `refs`, lists; block sizes determine how many are in flight."""
        self.config, self.refs = config, refs
        self.ahead, self.slots = blocks.writes, 2 * blocks.writes
        self.count = refs.counts[0]

    def run(self) -> None:
        """Allocate memory, and write the new keys and values in all slabs of `WorkPlan.writes`."""
        config = self.config
        pl.run_scoped(
            self._write_all,
            pltpu.VMEM((self.slots, config.num_matrices, config.slab, config.columns.matrix_columns), config.kv_dtype),
            pltpu.VMEM(
                (self.slots, config.num_matrices, config.slab + SUBLANES, config.columns.matrix_columns), jnp.float32
            ),
            [pltpu.VMEM((self.slots, *self.refs.scales.shape[3:]), SCALE_DTYPE)] * 2 if config.has_scales else [],
            pltpu.SemaphoreType.DMA((self.slots, 4)),
            pltpu.SemaphoreType.DMA((self.slots, 2)),
        )

    def _write_all(self, slabs: Ref, news: Ref, scales: Sequence[Any], read_sems: Ref, write_sems: Ref) -> None:
        """Read, change and write back all slabs of `WorkPlan.writes`, through buffers that `run` has allocated.

        Args:
            slabs: VMEM buffers for slabs read from the pool, `[slots, matrices, slab, columns]`.
            news: VMEM buffers for new vectors, f32 `[slots, matrices, slab + 8, columns]`.
            scales: VMEM buffers for the slabs' scales, then for new scales, `[slots, rows, 128]` each; empty if the
                pool has no scales.
            read_sems: semaphores for copies from HBM, `[slots, 4]`.
            write_sems: semaphores for copies to HBM, `[slots, 2]`.
        """

        def reads(index: Scalar) -> Sequence[Any]:
            """Return the copies from HBM for slab `index`: the slab, the new vectors, and the scales of both."""
            slot = lax.rem(index, self.slots)
            first = pl.multiple_of(self._first_new(index) // SUBLANES * SUBLANES, SUBLANES)
            new = self.refs.inputs.new.at[:, pl.ds(first, self.config.slab + SUBLANES)]
            sources = [self._slab_ref(index), new]
            new_scales = self.refs.inputs.new_scales
            if new_scales is not None:
                sources += [self._scale_ref(index), new_scales.at[index]]
            targets = [x.at[slot] for x in (slabs, news, *scales)]
            return [
                pltpu.make_async_copy(source, target, read_sems.at[slot, number])
                for number, (source, target) in enumerate(zip(sources, targets, strict=True))
            ]

        def writes(index: Scalar) -> Sequence[Any]:
            """Return the copies to HBM for slab `index`: the changed slab and its scales."""
            slot = lax.rem(index, self.slots)
            copies = [pltpu.make_async_copy(slabs.at[slot], self._slab_ref(index), write_sems.at[slot, 0])]
            for kept in scales[:1]:
                copies.append(pltpu.make_async_copy(kept.at[slot], self._scale_ref(index), write_sems.at[slot, 1]))
            return copies

        @pl.loop(0, jnp.minimum(self.ahead, self.count))
        def start(index: Scalar) -> None:
            for copy in reads(index):
                copy.start()

        @pl.loop(0, self.count)
        def step(index: Scalar) -> None:
            @pl.when(index >= self.ahead)
            def free() -> None:
                for copy in writes(index - self.ahead):
                    copy.wait()

            @pl.when(index + self.ahead < self.count)
            def read_ahead() -> None:
                for copy in reads(index + self.ahead):
                    copy.start()

            for copy in reads(index):
                copy.wait()
            slot = lax.rem(index, self.slots)
            self._merge(index, slabs.at[slot], news.at[slot])
            if scales:
                self._merge_scales(index, *[x.at[slot] for x in scales])
            for copy in writes(index):
                copy.start()

        @pl.loop(jnp.maximum(self.count - self.ahead, 0), self.count)
        def drain(index: Scalar) -> None:
            for copy in writes(index):
                copy.wait()

    def _column(self, index: Scalar, column: int) -> Scalar:
        """Read an element in `WorkPlan.writes`: slab `index`, and a column such as `work_plan.PAGE`."""
        return self.refs.writes[index * work_plan.NUM_WRITE_COLUMNS + column]

    def _slab_ref(self, index: Scalar) -> Ref:
        """Return slab `index` in the pool (HBM), `[matrices, slab, columns]`."""
        offset = pl.multiple_of(self._column(index, work_plan.OFFSET), self.config.slab)
        page = page_ref(self.config, self.refs, self.refs.layer[0], self._column(index, work_plan.PAGE))
        return page.at[:, pl.ds(offset, self.config.slab)]

    def _scale_ref(self, index: Scalar) -> Ref:
        """Return the scales of slab `index` in the pool (HBM), `[rows, 128]`."""
        page = self.refs.scales.at[self.refs.layer[0], self._column(index, work_plan.PAGE)]
        return page.at[self._column(index, work_plan.OFFSET) // self.config.slab]

    def _first_new(self, index: Scalar) -> Scalar:
        """Return the index in `Operands.new` at which the tokens of slab `index` begin.

        The first one may be another row's token or padding.
        """
        return self._column(index, work_plan.FIRST_TOKEN) + self.config.slab

    def _merge(self, index: Scalar, slab: Ref, new: Ref) -> None:
        """Replace a slab's rows that this step writes, in VMEM.

        Args:
            index: slab index.
            slab: content of the page, `[matrices, slab, columns]`, which is changed.
            new: new vectors, f32 `[matrices, slab + 8, columns]`; they begin up to seven rows before the slab's.
        """
        size = self.config.slab + SUBLANES
        shift = lax.rem(size - lax.rem(self._first_new(index), SUBLANES), size)
        begin, end = self._column(index, work_plan.BEGIN), self._column(index, work_plan.END)
        for unit in range(self.config.num_matrices):
            rows = pltpu.roll(new[unit], shift, 0)[: self.config.slab]
            row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            kept = slab[unit].astype(jnp.float32)
            slab[unit] = jnp.where((row >= begin) & (row < end), rows, kept).astype(slab.dtype)

    def _merge_scales(self, index: Scalar, kept: Ref, new: Ref) -> None:
        """Replace the scales of slab `index`'s rows that this step writes, in VMEM.

        Args:
            index: slab index.
            kept: scales of the page, `[rows, 128]`, which are changed.
            new: new scales, `[rows, 128]`.
        """
        token = lax.broadcasted_iota(jnp.int32, kept.shape, 1) & (SCALE_TOKENS - 1)
        is_new = (token >= self._column(index, work_plan.BEGIN)) & (token < self._column(index, work_plan.END))
        merged = jnp.where(is_new, new[...].astype(jnp.float32), kept[...].astype(jnp.float32))
        kept[...] = merged.astype(kept.dtype)
