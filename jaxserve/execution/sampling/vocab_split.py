"""Sampling from logits that are split over devices by vocabulary.

If all rows take their most likely token, devices exchange one candidate per row. Otherwise each device adjusts its
shard of the logits; then devices exchange logits so that each has some rows whole and draws for them as a single device
would; finally they exchange the results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.execution.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.execution.sampling.rows import SamplingRows, SlotTable, by_blocks
from jaxserve.execution.sampling.sampler import (
    DraftedTokens,
    adjust_logits,
    draw_tokens,
    rows_at_a_time,
    takes_most_likely,
)
from jaxserve.execution.sampling.token_gather import first_argmax


@dataclass(frozen=True)
class VocabSplit:
    """Sampler for logits whose vocabulary is split over n devices; its methods are called in a shard_map.

    Each device has logits [R, ceil(V / n)]. The shards are in token id order, with padding at the end.

    Attributes:
        axis: names of the mesh axes.
        num_devices: devices along those axes, n.
        vocab_size: vocabulary size, V.
    """

    axis: str | tuple[str, ...]
    num_devices: int
    vocab_size: int

    @property
    def first_id(self) -> Int[Array, ""]:
        """Id of the first token in this device's vocabulary shard."""
        return lax.axis_index(self.axis) * -(-self.vocab_size // self.num_devices)

    def sample(
        self,
        logits: Float[Array, "R part"],
        rows: SamplingRows,
        table: SlotTable,
        base_seed: UInt32[Array, ""],
        drafted: DraftedTokens | None = None,
    ) -> Int[Array, " R"]:
        """Return the result of `sampling.sample` over the whole vocabulary, the same on every device.

        Counts and masks in the table cover only the device's own shard of the vocabulary. Each device adjusts all rows
        in its shard, then draws for a part of the rows.
        """

        def draw(logits: Array, rows: tuple[SamplingRows, DraftedTokens | None]) -> Int[Array, " R"]:
            def one_block(block: tuple[Array, tuple[SamplingRows, DraftedTokens | None]]) -> Array:
                logits, (rows, drafted) = block
                return draw_tokens(logits, rows, base_seed, drafted)

            token_ids: Array = by_blocks(one_block, (logits, rows), rows_at_a_time(logits.shape[0]))
            return token_ids

        token_ids: Array = lax.cond(
            takes_most_likely(rows),
            lambda: self._most_likely(logits),
            lambda: self._by_rows(draw, adjust_logits(logits, rows, table, self.first_id), (rows, drafted)),
        )
        return token_ids

    def token_logprobs(
        self, logits: Float[Array, "R part"], token_ids: Int[Array, " R"], num_top: int
    ) -> TokenLogprobs:
        """Return the result of `sampling.token_logprobs` over the whole vocabulary, the same on every device."""
        found: TokenLogprobs = self._by_rows(partial(token_logprobs, num_top=num_top), logits, token_ids)
        return found

    def _most_likely(self, logits: Float[Array, "R part"]) -> Int[Array, " R"]:
        """Return the id of each row's first largest logit over the whole vocabulary, the same on every device."""
        first_id = self.first_id
        token_id = first_id + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(token_id < self.vocab_size, logits, -jnp.inf)
        candidate = first_id + first_argmax(logits)
        value = jnp.max(logits, axis=1)
        pair = jnp.stack([lax.bitcast_convert_type(value, jnp.int32), candidate])  # [2, R], for a single exchange
        pairs = lax.all_gather(pair, self.axis)  # [n, 2, R]
        best = jnp.argmax(lax.bitcast_convert_type(pairs[:, 0], jnp.float32), axis=0)[None, :]
        return jnp.minimum(jnp.take_along_axis(pairs[:, 1], best, axis=0)[0], self.vocab_size - 1)

    def _by_rows(self, compute: Callable[[Array, Any], Any], logits: Float[Array, "R part"], rows: Any) -> Any:
        """Return `compute(whole logits, rows)`; each device computes it for a part of the rows.

        Devices exchange logits, so that each has the whole vocabulary for its rows, and finally the results.

        Args:
            compute: function of logits [rows, V] and a pytree with an entry per row; returns such a pytree.
            logits: this device's vocabulary shard.
            rows: pytree with an entry per row.
        """
        num_rows = logits.shape[0]
        part = -(-num_rows // self.num_devices)

        def pad(x: Array) -> Array:
            return jnp.pad(x, [(0, part * self.num_devices - num_rows)] + [(0, 0)] * (x.ndim - 1))

        def own(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(pad(x), lax.axis_index(self.axis) * part, part)

        def gather(x: Array) -> Array:
            return lax.all_gather(x, self.axis, tiled=True)[:num_rows]

        whole = lax.all_to_all(pad(logits), self.axis, split_axis=0, concat_axis=1, tiled=True)
        return jax.tree.map(gather, compute(whole[:, : self.vocab_size], jax.tree.map(own, rows)))
