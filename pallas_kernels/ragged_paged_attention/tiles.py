"""Query tiles for a step's new tokens, in which some tokens from one row attend together."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Tiles(NamedTuple):
    """Query tiles in token order. Tiles without tokens come last, as padding."""

    row: Int32[Array, "tiles"]
    """Row whose tokens attend."""
    start: Int32[Array, "tiles"]
    """First token, counted from the row's first new token: negative if it belongs to an earlier row."""
    lead: Int32[Array, "tiles"]
    """Number of tokens from earlier rows at the tile's beginning."""
    num_tokens: Int32[Array, "tiles"]
    """Number of the row's tokens in the tile."""


def cut_into_tiles(
    starts: Int32[Array, "R"], q_lens: Int32[Array, "R"], *, tile_tokens: int, alignment: int, num_tiles: int
) -> Tiles:
    """Cut each row's new tokens into tiles.

    Args:
        starts: index of each row's first new token in the step.
        q_lens: new tokens per row.
        tile_tokens: tokens per tile.
        alignment: number that divides each tile's first token, counted in the step. A row's first tile may therefore
            begin with tokens from earlier rows.
        num_tiles: number of tiles to return, including padding.
    """
    leads = starts % alignment
    row_tiles = jnp.where(q_lens > 0, ceil_div(leads + q_lens, tile_tokens), 0)
    tile_ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(range_index(tile_ends, tile), q_lens.shape[0] - 1)
    start = (tile - (tile_ends - row_tiles)[row]) * tile_tokens - leads[row]
    lead = jnp.maximum(-start, 0)
    num_tokens = jnp.where(tile < tile_ends[-1], jnp.minimum(q_lens[row] - start, tile_tokens) - lead, 0)
    return Tiles(row, start, lead, num_tokens)


def ceil_div(x: Int32[Array, "*n"], divisor: int) -> Int32[Array, "*n"]:
    """Return `x / divisor`, rounded up."""
    return (x + (divisor - 1)) // divisor


def range_index(ends: Int32[Array, "n"], x: Int32[Array, "m"]) -> Int32[Array, "m"]:
    """Return for each element of x which of n consecutive ranges contains it, n if none does.

    Args:
        ends: each range's end, which is the next one's start; the first range starts at 0.
        x: elements, not negative.
    """
    return jnp.sum(ends[None, :] <= x[:, None], axis=1, dtype=jnp.int32)
