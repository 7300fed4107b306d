"""Medusa: heads on the model's last hidden state propose the tokens after the next one (Cai et al. 2024).

Head n reads the hidden state from which the model sampled the last known token, and proposes the n-th token after it.
Heads do not see each other's proposals. A tree combines each head's most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.api.token_tree import TokenTree
from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import CLIPPED, ServeState
from jaxserve.layers.linear import linear
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params


@dataclass(frozen=True)
class Medusa:
    """Proposer with a head per position.

    Parameters: `blocks`, per head its residual blocks, each `weight` [D, D] and an optional `bias` [D]; and
    `lm_heads`, a matrix [V, D] per head, empty if the heads use the model's.

    Attributes:
        max_drafts: maximum draft length, K, at most one token per head.
        arch: model sizes, per device if it is sharded.
        vocab_size: whole vocabulary size, V.
        max_num_seqs: number of slots, S.
        dtype: hidden-state dtype name.
        tree: tree shape, K levels, filled with the most likely tokens; None for a chain.
    """

    max_drafts: int
    arch: ArchConfig
    vocab_size: int
    max_num_seqs: int
    dtype: str
    tree: TokenTree | None = None

    @property
    def max_nodes(self) -> int:
        """Maximum drafts per row, N."""
        return self.max_drafts if self.tree is None else self.tree.num_nodes

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Empty: the heads read hidden states after the final norm."""
        return ()

    def new_state(self) -> Float[Array, "S D"]:
        """Return zeros; later the last hidden state by slot."""
        return jnp.zeros((self.max_num_seqs, self.arch.hidden_size), jnp.dtype(self.dtype))

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return the state unchanged: a request computes a token before it drafts any."""
        return state

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return the state unchanged: `observe` keeps the hidden states of accepted tokens."""
        return state.draft

    def observe(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        observed: Float[Array, "T D"],
    ) -> Float[Array, "S D"]:
        """Return the state with the hidden state of each row's last token.

        Args:
            params: parameters for model and proposer.
            state: state with all sequences.
            rows: rows with tokens that the model has computed.
            token_ids: these tokens.
            observed: their hidden states after the final norm.
        """
        slot = jnp.where(rows.q_lens > 0, rows.slot, self.max_num_seqs)
        last = observed.at[rows.cu_q_lens[1:] - 1].get(**CLIPPED)
        new: Float[Array, "S D"] = state.draft.at[slot].set(last.astype(self.dtype), mode="drop")
        return new

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose the most likely tokens of each head."""
        hidden = state.draft.at[rows.slot].get(**CLIPPED)
        num_likely = 1 if self.tree is None else max(self.tree.rank) + 1
        likely = jnp.stack([self._likely(params, head, hidden, num_likely) for head in range(self.max_drafts)], axis=1)
        if self.tree is None:
            return Drafts(likely[:, :, 0], num_drafts, None), state.draft
        token_ids = likely[:, np.array(self.tree.depth[1:]) - 1, np.array(self.tree.rank)]
        ancestors = jnp.broadcast_to(jnp.array([self.tree.ancestors]), token_ids.shape)
        return Drafts(token_ids, jnp.array(self.tree.num_within)[num_drafts], None, ancestors), state.draft

    def _likely(self, params: BothParams, head: int, hidden: Float[Array, "R D"], count: int) -> Int[Array, "R count"]:
        """Return a head's `count` most likely tokens per row, best first, from the rows' hidden states."""
        target, own = params
        x = apply_blocks(own["blocks"][head], hidden)
        if own["lm_heads"]:
            logits = linear(x, own["lm_heads"][head], dtype=jnp.float32)
        else:
            logits = whole_logits(target, self.arch, x)
        return lax.top_k(logits[:, : self.vocab_size], count)[1]


def apply_blocks(blocks: Sequence[Params], hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """Return the hidden states after a head's residual blocks."""
    for p in blocks:
        hidden = hidden + jax.nn.silu(linear(hidden, p["weight"], bias=p.get("bias")))
    return hidden


def whole_logits(params: Any, arch: ArchConfig, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Return a model's logits over its whole vocabulary, replicated on its devices."""
    logits = decoder.compute_logits(params, arch, hidden)
    return logits if arch.vocab_axis is None else lax.all_gather(logits, arch.vocab_axis, axis=1, tiled=True)
