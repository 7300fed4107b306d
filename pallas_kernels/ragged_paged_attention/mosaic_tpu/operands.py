"""What the kernel gets and gives, and its references to that."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float32, Int32, Shaped


class Operands(NamedTuple):
    """What the kernel gets beside its plan."""

    page_ids: Int32[Array, "chunks 1 128"]
    """The page table, in pieces that can be fetched."""
    new: Float32[Array, "K padded columns"]
    """New keys and values side by side, `slab` tokens of padding before them and more behind."""
    lane_queries: Float32[Array, "lanes K filled width"]
    tile_queries: Shaped[Array, "Q padded width"]
    lane_sinks: Float32[Array, "rows 128"]
    """In base 2, as those of tiles; of all query heads of a lane."""
    tile_sinks: Float32[Array, "Q"]
    tree_words: Int32[Array, "padded words"]
    kv_pages: Shaped[Array, "L N K P columns"]
    new_scales: Float32[Array, "slabs rows 128"] | None = None
    """Of the tokens of each slab that is written, as the pool has them; None for pools without scales."""
    scales: Float32[Array, "L N slabs rows 128"] | None = None


class Refs(NamedTuple):
    """Scalars, operands and results of the kernel."""

    layer: Any
    counts: Any
    writes: Any
    lanes: Any
    groups: Any
    tiles: tuple[Any, ...]
    inputs: Operands
    kv_pages: Any  # the pool as it becomes
    scales: Any  # None for pools without
    lane_out: Any
    tile_out: Any
