"""Visits: the order in which grouped matmul kernels multiply row tiles."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Visits(NamedTuple):
    """Row tiles that are multiplied by one group's matrix each, in group order.

    Visits from index `num_visits` on have no rows. A visit's results are valid only in its group's rows.
    """

    matrix: Int32[Array, "visits"]
    """Matrix index."""
    base: Int32[Array, "visits"]
    """First tile row."""
    begin: Int32[Array, "visits"]
    """First group row in the tile."""
    end: Int32[Array, "visits"]
    """End of the group rows in the tile."""
    num_visits: Int32[Array, ""]


def plan_visits(
    group_sizes: Int32[Array, "G"], first: Int[Array, ""], num_rows: int, tile_rows: int, alignment: int
) -> Visits:
    """Return visits that multiply each group row once.

    Args:
        group_sizes: rows in each group.
        first: matrix index for group 0.
        num_rows: x rows.
        tile_rows: rows per tile.
        alignment: divides each tile's first row. If it is `tile_rows`, groups share tiles. If it is smaller,
            each group has its own tiles, which start less than `alignment` rows before the group.
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
