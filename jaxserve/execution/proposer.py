"""Proposers: the protocol for drafting tokens on the device, and the drafts (chains or trees) that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.page_programs import PageLayout
from jaxserve.execution.rows import Rows
from jaxserve.execution.state import ServeState
from jaxserve.models.params import Params

BothParams = tuple[Params, Params]  # parameters for model and proposer


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Up to N draft tokens for each of R rows, as a chain or a tree.

    Node 0 is the row's last known token; node n, from 1 on, is the draft token in column n - 1.

    Attributes:
        token_ids: draft tokens; in a tree, parents before their children.
        count: number of draft tokens per row.
        weights: unnormalised probabilities from which each token in a chain was sampled; None if none was sampled.
        ancestors: bit mask per draft token in a tree: bit n is set if node n precedes it on its path, so bit 0 always
            is. None for chains.
    """

    token_ids: Int[Array, "R N"]
    count: Int[Array, " R"]
    weights: Float[Array, "N R V"] | None
    ancestors: Int[Array, "R N"] | None = None

    @property
    def words(self) -> Int[Array, "R N1"]:
        """Ancestor bits per node, beginning with node 0."""
        R, N = self.token_ids.shape
        chain = jnp.asarray((1 << np.arange(1, N + 1)) - 1, jnp.int32)
        words = jnp.broadcast_to(chain, (R, N)) if self.ancestors is None else self.ancestors
        return jnp.pad(words, ((0, 0), (1, 0)))

    @property
    def depth(self) -> Int[Array, "R N1"]:
        """Tokens from node 0 (exclusive) to each node (inclusive)."""
        return lax.population_count(self.words)

    @property
    def parent(self) -> Int[Array, "R N"]:
        """Parent node per proposed token."""
        return 31 - lax.clz(self.words[:, 1:])

    @property
    def num_levels(self) -> Int[Array, " R"]:
        """Longest proposed continuation per row, in tokens."""
        return jnp.max(jnp.where(jnp.arange(self.words.shape[1])[None] <= self.count[:, None], self.depth, 0), axis=1)

    def children(self, sampled: Int[Array, "R N1"]) -> Bool[Array, "R N"]:
        """Mask the proposed tokens that match their parents' samples; of equal siblings only the first."""
        N, parent = self.token_ids.shape[1], self.parent
        index = jnp.arange(N)[None]
        fits = (index < self.count[:, None]) & (self.token_ids == jnp.take_along_axis(sampled, parent, axis=1))
        if self.ancestors is None:
            return fits
        same = (parent[:, :, None] == parent[:, None]) & fits[:, :, None] & (index[:, :, None] < index[:, None])
        return fits & ~jnp.any(same, axis=1)


@runtime_checkable
class Proposer(Protocol):
    """Source for drafted tokens on the device. Hashable; its arrays are program parameters and state."""

    @property
    def max_drafts(self) -> int:
        """Maximum proposed continuation length, K."""

    @property
    def max_nodes(self) -> int:
        """Maximum proposed tokens per row, N: more than K if it proposes trees."""

    def new_state(self) -> Any:
        """Return the initial state; None if it has none."""

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return the state with new requests in some slots; slots out of range are padding."""

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose tokens after each row's last known one, the first token of `rows`.

        Args:
            params: parameters for model and proposer.
            state: state with all sequences; its `draft` is the proposer's own.
            rows: rows in the round.
            num_drafts: continuation length wanted for each row; 0 for rows that take no part.
            base_seed: engine seed.

        Returns:
            The tokens, and the proposer's new state.
        """

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return the new state after a round.

        Args:
            state: state with all sequences, and lengths after the round.
            rows: rows in the round.
            drafts: proposed tokens.
            path: node taken by each row at each depth, node 0 first; the depth itself after its end.
        """


@runtime_checkable
class StageProposer(Proposer, Protocol):
    """Proposer for a pipeline stage before the last one, which learns later which tokens were sampled."""

    def take(
        self,
        state: Any,
        slot: Int[Array, " S"],
        length: Int[Array, " S"],
        num_drafts: Int[Array, " S"],
        token_ids: Int[Array, "S K"],
    ) -> Any:
        """Return the state after a round.

        Args:
            state: the proposer's own state.
            slot: slots of the rows that have sampled; slots out of range are padding.
            length: length of each sequence's history before its last known token.
            num_drafts: number of tokens that the last stage has drafted to follow it.
            token_ids: these tokens.
        """


@runtime_checkable
class PagedProposer(Proposer, Protocol):
    """Proposer whose state has a pool, `kv_pages`, with entries that later requests with the same prefix use."""

    @property
    def page_layout(self) -> PageLayout:
        """Layout of that pool's pages."""


@runtime_checkable
class ReadsFeatures(Proposer, Protocol):
    """Proposer for which layers must return their inputs, for itself or for the one in a later pipeline stage."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose inputs are read, each once; empty for the hidden states after the final norm.

        The number of layers denotes the last layer's output.
        """


@runtime_checkable
class Observer(ReadsFeatures, Protocol):
    """Proposer that reads the model's hidden states, even in plain steps."""

    def observe(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        observed: Float[Array, "T observed"],
    ) -> Any:
        """Return the new state after the model has computed tokens that are certain to belong to the sequences.

        Args:
            params: parameters for model and proposer.
            state: state with all sequences; its `draft` is the proposer's own.
            rows: rows with these tokens.
            token_ids: tokens on the rows' token axis.
            observed: the tokens' hidden states, concatenated over layers, replicated on each device.
        """
