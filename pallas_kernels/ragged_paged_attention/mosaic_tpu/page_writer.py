"""Writes of new keys and values to their pages. See the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import SCALE_TOKENS, SUBLANES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import page_ref
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import (
    BEGIN,
    END,
    FIRST_TOKEN,
    NUM_WRITE_COLUMNS,
    OFFSET,
    PAGE,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE


class PageWriter:
    """Writer for new keys and values: each slab is read, changed and written back.

    All slabs are written before any row attends, so rows see them in shared pages.
    """

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs) -> None:
        self.config, self.refs = config, refs
        self.ahead, self.slots = blocks.writes, 2 * blocks.writes
        self.count = refs.counts[0]

    def run(self) -> None:
        """Write all slabs."""
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

    def _write_all(self, slabs: Any, news: Any, scales: Sequence[Any], read_sems: Any, write_sems: Any) -> None:
        def reads(index: Any) -> Sequence[Any]:
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

        def writes(index: Any) -> Sequence[Any]:
            slot = lax.rem(index, self.slots)
            copies = [pltpu.make_async_copy(slabs.at[slot], self._slab_ref(index), write_sems.at[slot, 0])]
            for kept in scales[:1]:
                copies.append(pltpu.make_async_copy(kept.at[slot], self._scale_ref(index), write_sems.at[slot, 1]))
            return copies

        @pl.loop(0, jnp.minimum(self.ahead, self.count))
        def start(index: Any) -> None:
            for copy in reads(index):
                copy.start()

        @pl.loop(0, self.count)
        def step(index: Any) -> None:
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
        def drain(index: Any) -> None:
            for copy in writes(index):
                copy.wait()

    def _column(self, index: Any, column: int) -> Any:
        return self.refs.writes[index * NUM_WRITE_COLUMNS + column]

    def _slab_ref(self, index: Any) -> Any:
        offset = pl.multiple_of(self._column(index, OFFSET), self.config.slab)
        page = page_ref(self.config, self.refs, self.refs.layer[0], self._column(index, PAGE))
        return page.at[:, pl.ds(offset, self.config.slab)]

    def _scale_ref(self, index: Any) -> Any:
        page = self.refs.scales.at[self.refs.layer[0], self._column(index, PAGE)]
        return page.at[self._column(index, OFFSET) // self.config.slab]

    def _first_new(self, index: Any) -> Any:
        """Return the index in `Operands.new` for a slab's first token, which may be another row's token or padding."""
        return self._column(index, FIRST_TOKEN) + self.config.slab

    def _merge(self, index: Any, slab: Any, new: Any) -> None:
        """Replace the slab's new rows by rows from `new`, which begins up to seven rows earlier."""
        size = self.config.slab + SUBLANES
        shift = lax.rem(size - lax.rem(self._first_new(index), SUBLANES), size)
        begin, end = self._column(index, BEGIN), self._column(index, END)
        for unit in range(self.config.num_matrices):
            rows = pltpu.roll(new[unit], shift, 0)[: self.config.slab]
            row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            kept = slab[unit].astype(jnp.float32)
            slab[unit] = jnp.where((row >= begin) & (row < end), rows, kept).astype(slab.dtype)

    def _merge_scales(self, index: Any, kept: Any, new: Any) -> None:
        token = lax.broadcasted_iota(jnp.int32, kept.shape, 1) & (SCALE_TOKENS - 1)
        is_new = (token >= self._column(index, BEGIN)) & (token < self._column(index, END))
        merged = jnp.where(is_new, new[...].astype(jnp.float32), kept[...].astype(jnp.float32))
        kept[...] = merged.astype(kept.dtype)
