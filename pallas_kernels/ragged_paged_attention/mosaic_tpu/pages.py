"""A work item's pages in vector memory, and matmuls with one head's block. See the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import SCALE_HEADS, SCALE_TOKENS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import LOG2E
from jaxserve.pallas_kernels.tpu import LANES


def page_ref(config: KernelConfig, refs: Refs, layer: Scalar, page_id: Scalar) -> Ref:
    """Return one page of one layer in the pool (HBM), `[matrices, P, columns]`.

    If the pool was made for larger heads, a page id counts the smaller pages, `config.num_parts` per page.
    """
    if config.num_parts == 1:
        return refs.kv_pages.at[layer, page_id]
    page, part = lax.div(page_id, jnp.int32(config.num_parts)), lax.rem(page_id, jnp.int32(config.num_parts))
    return refs.kv_pages.at[layer, page, pl.ds(part * config.num_matrices, config.num_matrices)]


class PageBuffers(NamedTuple):
    """VMEM for pages: for several work items, one per slot; or, from `at`, for one work item."""

    values: Ref  # [slots, pages, matrices, P, columns]
    scales: Ref  # [slots, pages, slabs, rows, 128]; None for pools without scales
    scales_by_token: Ref  # f32[sequences, vectors, tokens], rearranged scales for the current work item

    def at(self, slot: Scalar) -> PageBuffers:
        """Return the buffers of one slot, without the axis for slots."""
        scales = None if self.scales is None else self.scales.at[slot]
        return self._replace(values=self.values.at[slot], scales=scales)


class HeadBlock(NamedTuple):
    """One KV head's keys and values in one sequence's key block, in the matmul dtype."""

    config: KernelConfig
    keys: Registers  # [tokens, keys]
    values: Registers  # [tokens, sums]
    key_scales: Registers | None  # f32[1, tokens]; None for pools without scales
    value_scales: Registers | None  # f32[1, tokens]

    def scores(self, q: Registers) -> Registers:
        """Return scaled and soft-capped scores `[rows, tokens]` in base 2 for queries `[rows, keys]`."""
        scale, soft_cap = self.config.options.scale, self.config.options.soft_cap
        scores = _dot(q, self.keys, 1)
        if self.key_scales is not None:
            scores *= self.key_scales
        if soft_cap is None:
            return scores * (scale * LOG2E)
        return jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)

    def weighted_sum(self, weights: Registers) -> Registers:
        """Return the sums of the values times their weights, `[rows, sums]`, for weights `[rows, tokens]`."""
        if self.value_scales is not None:
            weights = weights * self.value_scales
        return _dot(weights.astype(self.values.dtype), self.values, 0)


def _dot(a: Registers, b: Registers, contracted: int) -> Registers:
    """Multiply a, `[m, c]`, by b with float32 sums.

    Args:
        a: left operand.
        b: right operand, `[c, n]` or `[n, c]`.
        contracted: b's axis with size c, 0 or 1.
    """
    return lax.dot_general(
        a,
        b,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class WorkItem:
    """Pages in VMEM that the kernel attends to together: one key block from each of several sequences.

    Attributes:
        config: static parameters.
        pages: buffers, with the sequences' pages one after the other.
        num_pages: number of pages per sequence.
    """

    config: KernelConfig
    pages: PageBuffers
    num_pages: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens per sequence."""
        return self.num_pages * self.config.page_size

    def prepare(self, sequence: int, end: Scalar) -> None:
        """Make a sequence's pages ready for `head_block`: clear tokens past its end and rearrange scales.

        A stale NaN times a zero weight would be NaN; integers have no NaN, but their scales may.

        Args:
            sequence: the sequence's index in the work item.
            end: end of the sequence, counted from the block's first token.
        """
        if not jnp.issubdtype(self.config.kv_dtype, jnp.integer):
            self._clear_tail(sequence, end)
        if self.config.has_scales:
            self._order_scales(sequence, end)

    def head_block(self, sequence: int, head: Scalar) -> HeadBlock:
        """Load one KV head's keys and values from VMEM, for a sequence on which `prepare` was called.

        Args:
            sequence: the sequence's index in the work item.
            head: KV head.
        """
        columns = self.config.columns
        if columns.num_matrices == 2:
            keys, values = self._matrix(sequence, 2 * head), self._matrix(sequence, 2 * head + 1)
        else:
            kv, (first, end) = self._matrix(sequence, head), columns.values
            keys, values = kv[:, : columns.keys], kv[:, first:end]
        if not self.config.has_scales:
            return HeadBlock(self.config, keys, values, None, None)
        tokens = slice(0, self.num_tokens)
        key = head * columns.num_vectors
        scales = [
            self.pages.scales_by_token[sequence, pl.ds(vector, 1), tokens]
            for vector in (key, key + columns.num_vectors - 1)
        ]
        return HeadBlock(self.config, keys, values, *scales)

    def _matrix(self, sequence: int, unit: Scalar) -> Registers:
        """Load matrix `unit` of all a sequence's pages, `[tokens, columns]`, in the matmul dtype."""
        own = self.pages.values[sequence * self.num_pages : (sequence + 1) * self.num_pages, unit]
        return own.reshape(self.num_tokens, own.shape[-1]).astype(self.config.matmul_dtype)

    def _clear_tail(self, sequence: int, end: Scalar) -> None:
        """Write zeros to a sequence's keys and values from the block's token `end` on, if the block has such tokens."""
        slab = self.config.slab
        slabs_per_page, num_slabs = self.config.page_size // slab, self.num_tokens // slab

        @pl.when((end > 0) & (end < self.num_tokens))
        def clear() -> None:
            @pl.loop(end // slab, num_slabs)
            def clear_slab(index: Any) -> None:
                page, offset = index // slabs_per_page, lax.rem(index, slabs_per_page) * slab
                rows = pl.ds(pl.multiple_of(offset, slab), slab)
                slabs = self.pages.values.at[sequence * self.num_pages + page, :, rows]
                token = lax.broadcasted_iota(jnp.int32, slabs.shape, 1) + index * slab
                slabs[...] = jnp.where(token < end, slabs[...].astype(jnp.float32), 0).astype(slabs.dtype)

    def _order_scales(self, sequence: int, end: Scalar) -> None:
        """Write a sequence's scales to `scales_by_token` in float32, with zeros from the block's token `end` on.

        In the pool, a row has the scales of four vectors for the 32 tokens in a slab; in `scales_by_token`, a row has
        the scales of one vector for all tokens.
        """
        pages, num_rows = self.pages, self.pages.scales.shape[-2]
        slabs_per_page, num_slabs = self.config.page_size // SCALE_TOKENS, self.num_tokens // SCALE_TOKENS
        together = min(SCALE_HEADS, num_slabs)

        @pl.loop(0, num_slabs // together)
        def order(group: Scalar) -> None:
            columns = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
            column = lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 1)
            slabs = []
            for number in range(together):
                index = group * together + number
                page = sequence * self.num_pages + index // slabs_per_page
                slabs.append(pages.scales[page, lax.rem(index, slabs_per_page)].astype(jnp.float32))
            for part in range(SCALE_HEADS):
                ordered = jnp.zeros((num_rows, LANES), jnp.float32)
                for number, slab in enumerate(slabs):
                    shift = (number - part) % SCALE_HEADS * SCALE_TOKENS
                    moved = pltpu.roll(slab, shift, 1) if shift else slab
                    ordered = jnp.where(column >= number * SCALE_TOKENS, moved, ordered)
                ordered = jnp.where(column + group * LANES < end, ordered, 0)
                pages.scales_by_token[sequence, part * num_rows : (part + 1) * num_rows, columns] = ordered
