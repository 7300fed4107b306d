"""Stateless: a base for proposers that keep nothing between rounds."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from jaxserve.execution.proposer import Drafts
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import ServeState


class Stateless:
    """Proposer methods that only pass the proposer's own state on; see `StageProposer`."""

    def new_state(self) -> Any:
        """Return no state."""
        return None

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return the state unchanged."""
        return state

    def take(
        self,
        state: Any,
        slot: Int[Array, " S"],
        length: Int[Array, " S"],
        num_drafts: Int[Array, " S"],
        token_ids: Int[Array, "S K"],
    ) -> Any:
        """Return the state unchanged."""
        return state

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return the state unchanged."""
        return state.draft
