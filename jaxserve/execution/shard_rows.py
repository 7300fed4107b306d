"""Shares of a round: the rows and tokens that each set of devices computes, where these have rows of their own.

The slots are divided among the shards, in order, equally many to each, and so is the token axis: there is room for as
many tokens of each shard. What a round computes of all rows, sampling above all, every device computes alike.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.execution.rows import Rows, Tokens, place_tokens
from jaxserve.execution.state import CLIPPED


class Shares(NamedTuple):
    """Division of a round's rows and tokens among D shards.

    Attributes:
        shard: the shard of each row.
        place: place of each token among those of all shards, which lie one shard's after the other's.
        live: True where there is a token there, False for padding.
        max_rows: most rows of a shard.
        num_shards: number of shards.
    """

    shard: Int[Array, " R"]
    place: Int[Array, " T"]
    live: Bool[Array, " T"]
    max_rows: int
    num_shards: int

    @classmethod
    def from_rows(cls, rows: Rows, tokens: Tokens, num_slots: int, num_shards: int) -> Shares:
        """Divide the rows by their slots."""
        share_len, slots_per_shard = tokens.row.shape[0] // num_shards, num_slots // num_shards
        shard = rows.slot // slots_per_shard
        lens = jnp.where(shard[None, :] == jnp.arange(num_shards)[:, None], rows.q_lens[None, :], 0)
        first = jnp.take_along_axis(jnp.cumsum(lens, axis=1) - lens, shard[None, :], axis=0)[0]
        offset = jnp.arange(tokens.row.shape[0], dtype=jnp.int32) - rows.cu_q_lens[tokens.row]
        place = (shard * share_len + first)[tokens.row] + offset
        live = jnp.arange(share_len)[None, :] < lens.sum(axis=1)[:, None]
        return cls(shard, place, live.reshape(-1), min(share_len, slots_per_shard), num_shards)

    def own(self, rows: Rows, tokens: Tokens, index: Int[Array, ""]) -> tuple[Rows, Tokens, Int[Array, ""]]:
        """Return the rows of a shard that compute tokens, in their order; their tokens; the number of these rows."""
        is_own = (self.shard == index) & (rows.q_lens > 0)
        order = jnp.argsort(~is_own, stable=True)[: self.max_rows]
        q_lens = jnp.where(is_own, rows.q_lens, 0)[order]
        start, pages = jax.tree.map(lambda x: x[order], (rows.start, rows.pages_to_read))
        own = Rows.packed(rows.slot[order], start, q_lens, rows.samples[order], pages)
        row, offset, before, live = place_tokens(own, self.live.shape[0] // self.num_shards)
        place = jnp.where(live, rows.cu_q_lens[order[row]] + offset, 0)
        of_round = (each.at[place].get(**CLIPPED) for each in (tokens.planned, tokens.token_ids))
        return own, Tokens(row, before.history, before.position, live, *of_round), jnp.sum(is_own, dtype=jnp.int32)
