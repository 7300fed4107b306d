"""NGram: proposes the tokens after an earlier occurrence of the last tokens (prompt lookup)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import CLIPPED, ServeState
from jaxserve.spec_decode.stateless import Stateless


@dataclass(frozen=True)
class NGram(Stateless):
    """Proposer that finds the longest earlier match of a sequence's last tokens, on the device (Saxena 2023).

    Among equally long matches it takes the latest that at least K tokens follow: in a repeating sequence the very
    latest match ends one period before the sequence does, and would yield only one period. It has no parameters and no
    state.

    Attributes:
        max_drafts: maximum drafts per row, K.
        max_ngram: maximum tokens to match.
        min_ngram: minimum tokens to match; a row without such a match gets no drafts.
    """

    max_drafts: int
    max_ngram: int
    min_ngram: int

    @property
    def max_nodes(self) -> int:
        """Maximum drafts per row."""
        return self.max_drafts

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose the tokens after an earlier occurrence of each row's last tokens, up to `num_drafts`."""
        history = state.slots.token_history.at[rows.slot].get(**CLIPPED)
        last = rows.start.history
        token_ids, count = find_continuation(history, last, self.max_drafts, self.max_ngram, self.min_ngram)
        return Drafts(token_ids, jnp.minimum(count, num_drafts), None), state.draft


def find_continuation(
    history: Int[Array, "R C"], last: Int[Array, " R"], num_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[Int[Array, "R K"], Int[Array, " R"]]:
    """Return the tokens that follow the longest earlier match of each sequence's last tokens, and their number.

    Among equally long matches the one with the most following tokens wins, `num_tokens` being enough, then the latest.

    Args:
        history: token ids by sequence.
        last: last token index by sequence.
        num_tokens: maximum tokens to return, K.
        max_ngram: maximum tokens to match.
        min_ngram: minimum tokens to match.
    """
    C = history.shape[1]
    end = jnp.arange(C)[None]  # last token of a possible match
    matches = (end < last[:, None]).astype(bool)
    length = jnp.zeros(history.shape, jnp.int32)
    for back in range(max_ngram):
        token = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        shifted = jnp.pad(history, ((0, 0), (back, 0)))[:, :C]
        matches &= (shifted == token) & (end >= back)
        length += matches
    num_following = last[:, None] - end
    # matches that fewer than K tokens follow rank below all others
    order = jnp.where(num_following >= num_tokens, num_tokens + end, num_following)
    best = jnp.argmax(jnp.where(length >= min_ngram, length * (C + num_tokens) + order, -1), axis=1)
    is_found = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0] >= min_ngram
    index = best[:, None] + 1 + jnp.arange(num_tokens)[None]
    token_ids = jnp.take_along_axis(history, jnp.minimum(index, C - 1), axis=1)
    return token_ids, jnp.where(is_found, jnp.clip(last - best, 0, num_tokens), 0)
