"""NGram: proposes what followed the last tokens of a sequence where they occurred before (prompt lookup)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import CLIPPED, ServeState


@dataclass(frozen=True)
class NGram:
    """Proposer that looks up the longest match of a sequence's last tokens within it, on the device (Saxena 2023).

    Of several matches of equal length the latest with enough tokens behind it counts. In a run that repeats itself the
    latest of all ends a period before the sequence does, and would yield no more tokens than that. It has neither
    parameters nor state.

    Attributes:
        max_drafts: most tokens that it proposes for a row, K.
        max_ngram: most tokens to match.
        min_ngram: fewest tokens to match; a row without such a match gets no proposal.
    """

    max_drafts: int
    max_ngram: int
    min_ngram: int

    @property
    def max_nodes(self) -> int:
        """Most tokens that it proposes for a row: those of a chain."""
        return self.max_drafts

    def new_state(self) -> None:
        """Return no state."""

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return the state as it is."""
        return state

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return its state as it is."""
        return state.draft

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose the tokens behind the longest match."""
        history = state.slots.token_history.at[rows.slot].get(**CLIPPED)
        last = rows.start.history
        token_ids, count = find_continuation(history, last, self.max_drafts, self.max_ngram, self.min_ngram)
        return Drafts(token_ids, jnp.minimum(count, num_drafts), None), state.draft


def find_continuation(
    history: Int[Array, "R C"], last: Int[Array, " R"], num_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[Int[Array, "R K"], Int[Array, " R"]]:
    """Return the tokens behind the longest match of each sequence's end, and how many there are.

    Of equally long matches it is the one with most tokens behind it, of which `num_tokens` are enough, and of these the
    latest.

    Args:
        history: tokens of each sequence.
        last: place of its last token.
        num_tokens: most tokens to return, K.
        max_ngram: most tokens to match.
        min_ngram: fewest tokens to match.
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
    behind = last[:, None] - end
    order = jnp.where(behind >= num_tokens, num_tokens + end, behind)  # fewer than K behind: below all with K
    best = jnp.argmax(jnp.where(length >= min_ngram, length * (C + num_tokens) + order, -1), axis=1)
    is_found = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0] >= min_ngram
    place = best[:, None] + 1 + jnp.arange(num_tokens)[None]
    token_ids = jnp.take_along_axis(history, jnp.minimum(place, C - 1), axis=1)
    return token_ids, jnp.where(is_found, jnp.clip(last - best, 0, num_tokens), 0)
