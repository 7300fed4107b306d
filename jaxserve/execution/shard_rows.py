"""Split of a round over data-parallel attention shards: which rows and tokens each shard computes.

Slots are divided among the shards in order and equally, and so is the token axis, with the same capacity per shard.
Work over all rows, mainly sampling, is replicated on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.execution.rows import Rows, Tokens, place_tokens


class ShardRows(NamedTuple):
    """Assignment of rows and tokens to D data-parallel attention shards.

    Attributes:
        shard: shard of each row.
        padded_index: index of each token when the shards' padded token axes are concatenated.
        live: mask over those concatenated axes: True for tokens, False for padding.
        max_rows: maximum rows per shard.
        num_shards: number of shards, D.
    """

    shard: Int[Array, " R"]
    padded_index: Int[Array, " T"]
    live: Bool[Array, " T"]
    max_rows: int
    num_shards: int

    @classmethod
    def from_rows(cls, rows: Rows, tokens: Tokens, num_slots: int, num_shards: int) -> ShardRows:
        """Assign each row, with its tokens, to the shard that has its slot; `num_slots` is the number in all shards."""
        shard_len, slots_per_shard = tokens.row.shape[0] // num_shards, num_slots // num_shards
        shard = rows.slot // slots_per_shard
        lens = jnp.where(shard[None, :] == jnp.arange(num_shards)[:, None], rows.q_lens[None, :], 0)
        first = jnp.take_along_axis(jnp.cumsum(lens, axis=1) - lens, shard[None, :], axis=0)[0]
        offset = jnp.arange(tokens.row.shape[0], dtype=jnp.int32) - rows.cu_q_lens[tokens.row]
        padded_index = (shard * shard_len + first)[tokens.row] + offset
        live = jnp.arange(shard_len)[None, :] < lens.sum(axis=1)[:, None]
        return cls(shard, padded_index, live.reshape(-1), min(shard_len, slots_per_shard), num_shards)

    def select(self, rows: Rows, tokens: Tokens, index: Int[Array, ""]) -> tuple[Rows, Tokens, Int[Array, ""]]:
        """Return the rows in shard `index` that have tokens, in order, then their tokens, and the number of rows."""
        is_own = (self.shard == index) & (rows.q_lens > 0)
        order = jnp.argsort(~is_own, stable=True)[: self.max_rows]
        q_lens = jnp.where(is_own, rows.q_lens, 0)[order]
        start, pages = jax.tree.map(lambda x: x[order], (rows.start, rows.pages_to_read))
        own = Rows.packed(rows.slot[order], start, q_lens, rows.samples[order], pages)
        row, offset, before, live = place_tokens(own, self.live.shape[0] // self.num_shards)
        batch_index = jnp.where(live, rows.cu_q_lens[order[row]] + offset, 0)
        return own, tokens.at(batch_index, row, before, live), jnp.sum(is_own, dtype=jnp.int32)
