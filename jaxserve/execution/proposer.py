"""Proposers: the protocol of what drafts tokens on the device, and the drafts, chains or trees, that they return."""

from __future__ import annotations

from typing import Any, Protocol, no_type_check, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.rows import Rows
from jaxserve.execution.state import ServeState
from jaxserve.models.params import Params

BothParams = tuple[Params, Params]  # parameters of the model and of the proposer


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Drafts:
    """Tokens proposed for R rows, N at most for each. Node 0 is a row's last known token, node n its n-th proposal.

    Attributes:
        token_ids: proposed ids; parents before their children.
        count: number of tokens proposed for each row.
        weights: weights that each token of a chain was drawn by, up to a factor; None where the proposer does not draw.
        ancestors: word per proposed token of a tree: bit n is set if node n is on the path to it, bit 0 always. None
            for chains.
    """

    token_ids: Int[Array, "R N"]
    count: Int[Array, " R"]
    weights: Float[Array, "N R V"] | None
    ancestors: Int[Array, "R N"] | None = None

    @property
    def words(self) -> Int[Array, "R N1"]:
        """Ancestors of each node, that of node 0 first."""
        R, N = self.token_ids.shape
        chain = jnp.asarray((1 << np.arange(1, N + 1)) - 1, jnp.int32)
        words = jnp.broadcast_to(chain, (R, N)) if self.ancestors is None else self.ancestors
        return jnp.pad(words, ((0, 0), (1, 0)))

    @property
    def depth(self) -> Int[Array, "R N1"]:
        """Tokens between node 0 and each node, the node included."""
        return lax.population_count(self.words)

    @property
    def parent(self) -> Int[Array, "R N"]:
        """Node that each proposed token follows."""
        return 31 - lax.clz(self.words[:, 1:])

    @property
    def num_levels(self) -> Int[Array, " R"]:
        """Tokens of the longest continuation that is proposed for each row."""
        return jnp.max(jnp.where(jnp.arange(self.words.shape[1])[None] <= self.count[:, None], self.depth, 0), axis=1)

    def children(self, sampled: Int[Array, "R N1"]) -> Bool[Array, "R N"]:
        """Return the mask of proposed tokens that were sampled at their parents; of equal siblings only the first."""
        N, parent = self.token_ids.shape[1], self.parent
        index = jnp.arange(N)[None]
        fits = (index < self.count[:, None]) & (self.token_ids == jnp.take_along_axis(sampled, parent, axis=1))
        if self.ancestors is None:
            return fits
        same = (parent[:, :, None] == parent[:, None]) & fits[:, :, None] & (index[:, :, None] < index[:, None])
        return fits & ~jnp.any(same, axis=1)


@runtime_checkable
class Proposer(Protocol):
    """Source of drafted tokens on the device. Hashable; its arrays are parameters and state of the programs."""

    @property
    def max_drafts(self) -> int:
        """Most tokens of a continuation that it proposes for a row, K."""

    @property
    def max_nodes(self) -> int:
        """Most tokens that it proposes for a row, N: more than K if it proposes trees."""

    def new_state(self) -> Any:
        """Return its state before the first request; None where it needs none."""

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return its state with new requests in some slots; slots out of range pad."""

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose tokens to follow the last known one of each row, the first token of `rows`.

        Args:
            params: parameters of the model and of the proposer.
            state: state of all sequences; its `draft` is the proposer's own.
            rows: rows of the round.
            num_drafts: tokens of a continuation wanted for each row; 0 for those that take no part.
            base_seed: seed of the engine.

        Returns:
            The tokens, and the proposer's new state.
        """

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return its new state after a round.

        Args:
            state: state of all sequences, whose lengths are those after the round.
            rows: rows of the round.
            drafts: tokens proposed.
            path: node that each row took at each depth, node 0 first; the depth itself where it had ended.
        """


@runtime_checkable
class Observer(Proposer, Protocol):
    """Proposer that reads hidden states of the model, in plain steps too."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose inputs it reads, each once; none for the hidden states after the final norm.

        The number of layers stands for the output of the last one.
        """

    def observe(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        observed: Float[Array, "T observed"],
    ) -> Any:
        """Return its state after the model has computed tokens that belong to the sequences for certain.

        Args:
            params: parameters of the model and of the proposer.
            state: state of all sequences; its `draft` is the proposer's own.
            rows: rows of the tokens.
            token_ids: tokens on the axis of the rows.
            observed: hidden states of the tokens, those of several layers side by side, whole on each device.
        """
