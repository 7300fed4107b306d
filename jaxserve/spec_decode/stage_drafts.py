"""Proposers for pipeline stages whose drafts come from other stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import CLIPPED, ServeState
from jaxserve.spec_decode.stateless import Stateless


@dataclass(frozen=True)
class PreviousStage(Stateless):
    """Proposer for stages whose drafts come from the previous stage, with the hidden states.

    Attributes:
        max_drafts: maximum drafts per row, K.
        feature_layers: layers of the whole model whose inputs the last stage's proposer reads.
    """

    max_drafts: int
    feature_layers: tuple[int, ...]

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
        """Refuse to draft: this stage has no drafts of its own."""
        raise AssertionError("drafts come from the previous stage")


class DraftTable(NamedTuple):
    """Drafts by slot.

    Attributes:
        token_ids: drafts.
        num_drafts: number of drafts.
        length: length of the history before the token that they follow; they are stale at any other length.
    """

    token_ids: Int[Array, "S K"]
    num_drafts: Int[Array, " S"]
    length: Int[Array, " S"]


@dataclass(frozen=True)
class LastStage(PreviousStage):
    """First stage's proposer if the last stage drafts, after each round, the tokens for a row's next round.

    Such drafts depend on the last stage's hidden states. If they were made when the next round begins, that round would
    wait until all earlier ones have passed all stages. After a plain step a row has no drafts for one round.

    Attributes:
        max_num_seqs: number of slots, S.
    """

    max_num_seqs: int

    def new_state(self) -> DraftTable:
        """Return a table without drafts."""
        S, K = self.max_num_seqs, self.max_drafts
        return DraftTable(jnp.zeros((S, K), jnp.int32), jnp.zeros(S, jnp.int32), jnp.zeros(S, jnp.int32))

    def admit(self, state: DraftTable, slot: Int[Array, " A"]) -> DraftTable:
        """Return the state without drafts for new requests."""
        return state._replace(num_drafts=state.num_drafts.at[slot].set(0, mode="drop"))

    def take(
        self,
        state: DraftTable,
        slot: Int[Array, " S"],
        length: Int[Array, " S"],
        num_drafts: Int[Array, " S"],
        token_ids: Int[Array, "S K"],
    ) -> DraftTable:
        """Return the state with the last stage's drafts; see `StageProposer`."""
        return DraftTable(
            state.token_ids.at[slot].set(token_ids, mode="drop"),
            state.num_drafts.at[slot].set(num_drafts, mode="drop"),
            state.length.at[slot].set(length, mode="drop"),
        )

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose the last stage's drafts."""
        table = DraftTable(*(column.at[rows.slot].get(**CLIPPED) for column in state.draft))
        count = jnp.where(table.length == rows.start.history, table.num_drafts, 0)
        return Drafts(table.token_ids, jnp.minimum(count, num_drafts), None), state.draft
