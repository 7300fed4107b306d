"""Visits: which tiles of x rows grouped matmul kernels multiply by which group's matrix, and in which order."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Visits(NamedTuple):
    """List of visits, in group order: in a visit, a tile of x rows is multiplied by one group's matrix.

    The tile may contain other groups' rows, whose results in this visit are not valid. Visits from index `num_visits`
    on are padding.
    """

    matrix: Int32[Array, "visits"]
    """Index of the group's matrix among all layers' matrices."""
    base: Int32[Array, "visits"]
    """First x row in the tile."""
    begin: Int32[Array, "visits"]
    """First x row that is in the tile and in the group."""
    end: Int32[Array, "visits"]
    """End of the x rows that are in the tile and in the group."""
    num_visits: Int32[Array, ""]
    """Number of visits that are not padding."""


def plan_visits(
    group_sizes: Int32[Array, "G"], first: Int[Array, ""], num_rows: int, tile_rows: int, alignment: int
) -> Visits:
    """List the visits that multiply each x row in a group once.

    Args:
        group_sizes: rows per group.
        first: index of group 0's matrix among all layers' matrices.
        num_rows: number of x rows.
        tile_rows: x rows per tile.
        alignment: number of rows that divides each tile's first row. If it is `tile_rows`, neighbouring groups visit
            the tile that contains rows of both. If it is smaller, each group has its own tiles; the first one
            starts less than `alignment` rows before the group.
    """
    G = group_sizes.shape[0]
    extra = 0 if alignment == tile_rows else G * (alignment - 1)
    max_visits = max(1, min(num_rows, -(-(num_rows + extra) // tile_rows) + G))
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    leads = starts % alignment
    visits = jnp.where(group_sizes > 0, (leads + group_sizes + (tile_rows - 1)) // tile_rows, 0)
    visit_ends = jnp.cumsum(visits, dtype=jnp.int32)
    index = jnp.arange(max_visits, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(visit_ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32), G - 1)
    base = (starts - leads)[group] + (index - (visit_ends - visits)[group]) * tile_rows
    begin, end = jnp.maximum(base, starts[group]), jnp.minimum(base + tile_rows, ends[group])
    is_live = index < visit_ends[-1]
    base, begin, end = (jnp.where(is_live, each, 0) for each in (base, begin, end))
    return Visits(first + group, base, begin, end, visit_ends[-1])
