"""Pages of keys and values in memory, and the products with one head's block of them. See the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Call
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import LOG2E
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import LANES, SCALE_HEADS, SCALE_TOKENS


def page_at(call: Call, refs: Refs, layer: Any, page_id: Any) -> Any:
    """Return the reference to the matrices of a page, `[units, P, columns]`."""
    if call.num_parts == 1:
        return refs.kv_pages.at[layer, page_id]
    page, part = lax.div(page_id, jnp.int32(call.num_parts)), lax.rem(page_id, jnp.int32(call.num_parts))
    return refs.kv_pages.at[layer, page, pl.ds(part * call.num_units, call.num_units)]


class PageBuffers(NamedTuple):
    """Buffers for the pages of several work items, or of one."""

    values: Any  # [slots, pages, units, P, columns]
    scales: Any  # [slots, pages, slabs, rows, 128]; None for pools without scales
    scales_by_token: Any  # f32[sequences, vectors of heads, tokens], scales of the current work item

    def at(self, slot: Any) -> PageBuffers:
        """Return the buffers of one work item."""
        scales = None if self.scales is None else self.scales.at[slot]
        return self._replace(values=self.values.at[slot], scales=scales)


class HeadBlock(NamedTuple):
    """One KV head of a sequence's block."""

    call: Call
    keys: Any  # [tokens, keys]
    values: Any  # [tokens, sums]
    key_scales: Any  # f32[1, tokens]; None for pools without scales
    value_scales: Any

    def scores(self, q: Any) -> Any:
        """Return soft-capped scores in base 2, `[rows, tokens]`, of queries `[rows, keys]` with the keys."""
        scale, soft_cap = self.call.options.scale, self.call.options.soft_cap
        products = _dot(q, self.keys, 1)
        if self.key_scales is not None:
            products *= self.key_scales
        if soft_cap is None:
            return products * (scale * LOG2E)
        return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)

    def weighted_sum(self, weights: Any) -> Any:
        """Return sums of the values, `[rows, sums]`, weighted by `[rows, tokens]`."""
        if self.value_scales is not None:
            weights = weights * self.value_scales
        return _dot(weights.astype(self.values.dtype), self.values, 0)


def _dot(a: Any, b: Any, contracted: int) -> Any:
    """Return `a[m, c] . b`, contracted over the given dimension of b, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class WorkItem:
    """Work item: one block each of some sequences, whose pages have been fetched."""

    call: Call
    pages: PageBuffers
    num_pages: int  # pages per sequence

    @property
    def num_tokens(self) -> int:
        """Tokens per sequence."""
        return self.num_pages * self.call.page_size

    def prepare(self, sequence: int, end: Any) -> None:
        """Put zeros in place of a sequence's keys and values from token `end` of the block on, if it ends there.

        A stale NaN would pass through a weight of zero; integers have no NaN, but their scales may.
        """
        if not jnp.issubdtype(self.call.kv_dtype, jnp.integer):
            self._clear_tail(sequence, end)
        if self.call.has_scales:
            self._order_scales(sequence, end)

    def head_block(self, sequence: int, head: Any) -> HeadBlock:
        """Return one KV head of a prepared sequence, in the dtype of the products."""
        columns = self.call.columns
        if columns.units == 2:
            keys, values = self._unit(sequence, 2 * head), self._unit(sequence, 2 * head + 1)
        else:
            kv, (first, end) = self._unit(sequence, head), columns.values
            keys, values = kv[:, : columns.keys], kv[:, first:end]
        if not self.call.has_scales:
            return HeadBlock(self.call, keys, values, None, None)
        tokens = slice(0, self.num_tokens)
        key = head * columns.num_vectors
        scales = [
            self.pages.scales_by_token[sequence, pl.ds(vector, 1), tokens]
            for vector in (key, key + columns.num_vectors - 1)
        ]
        return HeadBlock(self.call, keys, values, *scales)

    def _unit(self, sequence: int, unit: Any) -> Any:
        """Return one of the matrices of a sequence's pages, `[tokens, columns]`, in the dtype of the products."""
        own = self.pages.values[sequence * self.num_pages : (sequence + 1) * self.num_pages, unit]
        return own.reshape(self.num_tokens, own.shape[-1]).astype(self.call.product_dtype)

    def _clear_tail(self, sequence: int, end: Any) -> None:
        slab = self.call.slab
        slabs_per_page, num_slabs = self.call.page_size // slab, self.num_tokens // slab

        @pl.when((end > 0) & (end < self.num_tokens))
        def clear() -> None:
            @pl.loop(end // slab, num_slabs)
            def clear_slab(index: Any) -> None:
                page, offset = index // slabs_per_page, lax.rem(index, slabs_per_page) * slab
                rows = pl.ds(pl.multiple_of(offset, slab), slab)
                place = self.pages.values.at[sequence * self.num_pages + page, :, rows]
                token = lax.broadcasted_iota(jnp.int32, place.shape, 1) + index * slab
                place[...] = jnp.where(token < end, place[...].astype(jnp.float32), 0).astype(place.dtype)

    def _order_scales(self, sequence: int, end: Any) -> None:
        """Put the scales of each head side by side, token after token; zeros from token `end` of the block on.

        Rows of a tile of scales hold several heads for the tokens of a slab; afterwards a row holds one head for
        several slabs.
        """
        pages, num_rows = self.pages, self.pages.scales.shape[-2]
        slabs_per_page, num_slabs = self.call.page_size // SCALE_TOKENS, self.num_tokens // SCALE_TOKENS
        together = min(SCALE_HEADS, num_slabs)

        @pl.loop(0, num_slabs // together)
        def order(group: Any) -> None:
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
