"""DraftModel: a smaller model drafts a chain token by token, or a tree level by level.

Its keys and values are in its own pool, under the page ids of the sequences. It computes a sequence when it first
drafts for it, and catches up after plain steps, so steps without drafts cost nothing extra.

A draft model with another tokenizer maps each sequence token to one of its own, the same if it has it, and proposes
only tokens that both vocabularies have (token-level intersection, Timor et al. 2025, arXiv 2502.05202). Drafts are
sampled from its distribution over these, so verification stays exact.

Each device has the whole draft model: it is small, and collectives between its layers would take longer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.api.token_tree import TokenTree
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows, num_draftable, place_tokens, ragged_rows
from jaxserve.execution.state import CLIPPED, Lengths, ServeState, new_pool
from jaxserve.layers.pools import Pool
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_sampling import draft_chain, over_vocabulary


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """Draft model state.

    Attributes:
        kv_pages: its KV pool.
        length: number of cached tokens by slot.
    """

    kv_pages: Pool
    length: Int[Array, " S"]


@dataclass(frozen=True)
class DraftModel:
    """Proposer that runs a draft model.

    Attributes:
        max_drafts: maximum draft length, K.
        arch: draft model sizes; all layers are in one KV group.
        vocab_size: target vocabulary size, V; tokens that the draft model lacks are never drafted.
        schedule: step and pool sizes.
        kv_dtype: pool dtype name.
        backend: attention backend.
        kv_group: target KV group whose pages it uses.
        chunk: tokens per forward pass while catching up.
        tree: tree shape, K levels, filled with the most likely tokens; None for a chain of sampled tokens.
        is_mapped: True if the draft model has another tokenizer; its parameters then include the `CommonTokens` arrays,
            each as long as the target vocabulary.
        is_greedy: True to draft the most likely tokens in chains too, rather than to sample them.
    """

    max_drafts: int
    arch: ArchConfig
    vocab_size: int
    schedule: ScheduleConfig
    kv_dtype: str
    backend: str
    kv_group: int
    chunk: int
    tree: TokenTree | None = None
    is_mapped: bool = False
    is_greedy: bool = False

    @property
    def max_nodes(self) -> int:
        """Maximum drafts per row, N."""
        return self.max_drafts if self.tree is None else self.tree.num_nodes

    def new_state(self) -> DraftState:
        """Return an empty pool."""
        s = self.schedule
        pool = new_pool(self.arch, s.num_pages, s.page_size, kv_dtype=jnp.dtype(self.kv_dtype), backend=self.backend)
        return DraftState(kv_pages=pool, length=jnp.zeros(s.max_num_seqs, jnp.int32))

    def admit(self, state: DraftState, slot: Int[Array, " A"]) -> DraftState:
        """Return the state with nothing cached for these slots; slots out of range are padding."""
        return dataclasses.replace(state, length=state.length.at[slot].set(0, mode="drop"))

    def take(
        self,
        state: DraftState,
        slot: Int[Array, " S"],
        length: Int[Array, " S"],
        num_drafts: Int[Array, " S"],
        token_ids: Int[Array, "S K"],
    ) -> DraftState:
        """Return the state without entries for tokens that were drafted, but not accepted; see `StageProposer`."""
        return dataclasses.replace(state, length=state.length.at[slot].min(length, mode="drop"))

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> DraftState:
        """Return the state after a round, with each row's length extended by its accepted drafts.

        Args:
            state: state with all sequences, and lengths after the round.
            rows: rows in the round.
            drafts: drafts of the round.
            path: node taken by each row at each depth; a tree's entries are moved accordingly.
        """
        own = state.draft
        if self.tree is not None:
            table_row = state.sequences.table_rows(rows.slot)[self.kv_group]
            moves = (state.sequences.page_table, table_row, rows.start.cached, path)
            own = dataclasses.replace(
                own, kv_pages=self.arch.kv_layout.pool.move_tokens(self.backend, own.kv_pages, *moves)
            )
        slot = jnp.where(drafts.count > 0, rows.slot, own.length.shape[0])
        length = state.sequences.length.at[rows.slot].get(**CLIPPED)
        computed = jnp.minimum(rows.start.history + drafts.num_levels, length)
        return dataclasses.replace(own, length=own.length.at[slot].set(computed, mode="drop"))

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, DraftState]:
        """Catch up with the sequences, then draft token by token, or level by level."""
        # Drafts past the draft model's maximum length would be worthless.
        num_drafts = jnp.minimum(num_drafts, jnp.maximum(self.arch.max_position - 1 - rows.start.position, 0))
        missing = rows.start.history - state.draft.length.at[rows.slot].get(**CLIPPED)
        # dropped tokens have no entries
        missing = jnp.where(num_drafts > 0, jnp.minimum(missing, rows.start.cached), 0)
        _, draft_params = params
        kv_pages, missing = self._catch_up(draft_params, state, rows, missing)
        state = dataclasses.replace(state, draft=dataclasses.replace(state.draft, kv_pages=kv_pages))
        if self.tree is None:
            drafts, kv_pages = self._draft_chain(draft_params, state, rows, missing, num_drafts, base_seed)
        else:
            drafts, kv_pages = self._draft_tree(draft_params, state, rows, missing, num_drafts, self.tree)
        return drafts, dataclasses.replace(state.draft, kv_pages=kv_pages)

    def _draft_chain(
        self,
        params: Params,
        state: ServeState,
        rows: Rows,
        missing: Int[Array, " R"],
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Pool]:
        """Draft token by token, each sampled with the row's parameters; return the drafts and the pool.

        Args:
            params: draft model parameters.
            state: state with all sequences.
            rows: rows in the round.
            missing: number of tokens, at most 1, that the pool lacks before each row's last known token.
            num_drafts: tokens to draft per row.
            base_seed: engine seed.
        """
        num_tokens = 2 * rows.slot.shape[0]

        def compute(
            index: Int[Array, ""], live: Bool[Array, " R"], drafted: Int[Array, "R K"], kv_pages: Pool
        ) -> tuple[Float[Array, "R V"], Pool]:
            """Return the logits after the token before `index`, and the pool."""
            by = jnp.where(index == 0, -missing, index)
            at = rows.moved(by, jnp.where(live, 1 + index - by, 0))
            hidden, kv_pages = self._forward(params, state, at, rows.start, drafted, kv_pages, num_tokens)
            return self._logits(params, hidden.at[at.cu_q_lens[1:] - 1].get(**CLIPPED)), kv_pages

        pool, K, V = state.draft.kv_pages, self.max_drafts, None if self.is_greedy else self.vocab_size
        return draft_chain(state, rows, num_drafts, base_seed, compute, pool, max_drafts=K, vocab_size=V)

    def _draft_tree(
        self,
        params: Params,
        state: ServeState,
        rows: Rows,
        missing: Int[Array, " R"],
        num_drafts: Int[Array, " R"],
        tree: TokenTree,
    ) -> tuple[Drafts, Pool]:
        """Draft each inner node's most likely children, level by level; return the drafts and the pool.

        Each level recomputes all earlier nodes: attention sees a tree only among the tokens of one call, and reads the
        weights once for all of them.

        Args:
            params: draft model parameters.
            state: state with all sequences.
            rows: rows in the round.
            missing: number of tokens, at most 1, that the pool lacks before each row's last known token.
            num_drafts: levels to draft per row.
            tree: tree shape.
        """
        R, N = rows.slot.shape[0], tree.num_nodes
        num_within, levels = jnp.array(tree.num_within), jnp.array(tree.levels)
        # each node's parent, as an index in the parent's level
        parent_index = np.array([tree.levels[tree.depth[node]].index(node) for node in tree.parent])
        max_nodes = num_draftable(state.sequences, rows)  # later nodes are cut; ancestors precede their descendants
        words, rank, depth = jnp.array([0, *tree.ancestors]), np.array(tree.rank), jnp.array([tree.depth[1:]])

        def draft(level: Int[Array, ""], so_far: tuple[Array, Pool]) -> tuple[Array, Pool]:
            """Fill in the tokens of a level."""
            token_ids, kv_pages = so_far
            live = level < num_drafts
            before = jnp.where(level == 0, missing, 0)
            num_nodes = jnp.minimum(num_within[level], max_nodes)
            at = rows.moved(-before, jnp.where(live, before + 1 + num_nodes, 0))
            hidden, kv_pages = self._forward(params, state, at, rows.start, token_ids, kv_pages, R * (N + 1), words)
            token = at.cu_q_lens[:-1, None] + before[:, None] + levels[level][None]
            logits = self._logits(params, hidden.at[token.reshape(-1)].get(**CLIPPED))
            _, likely = lax.top_k(logits, max(tree.rank) + 1)
            likely = likely.reshape(R, len(tree.levels[0]), -1)
            return jnp.where(depth == level + 1, likely[:, parent_index, rank], token_ids), kv_pages

        so_far = jnp.zeros((R, N), jnp.int32), state.draft.kv_pages
        token_ids, kv_pages = lax.fori_loop(0, jnp.max(num_drafts), draft, so_far)
        ancestors = jnp.broadcast_to(words[1:], (R, N))
        return Drafts(token_ids, num_within[num_drafts], None, ancestors), kv_pages

    def _catch_up(
        self, params: Params, state: ServeState, rows: Rows, missing: Int[Array, " R"]
    ) -> tuple[Pool, Int[Array, " R"]]:
        """Compute the tokens that the pool lacks before each row's last known one, chunk by chunk.

        Args:
            params: draft model parameters.
            state: state with all sequences.
            rows: rows in the round.
            missing: number of these tokens per row.

        Returns:
            The pool, and the number of tokens per row that it still lacks, at most 1.
        """

        def compute(carry: tuple[Pool, Array]) -> tuple[Pool, Array]:
            kv_pages, missing = carry
            before = jnp.cumsum(missing) - missing
            q_lens = jnp.clip(self.chunk - before, 0, missing)
            at = rows.moved(-missing, q_lens)
            token_ids = jnp.zeros((rows.slot.shape[0], 1), jnp.int32)
            _, kv_pages = self._forward(params, state, at, rows.start, token_ids, kv_pages, self.chunk)
            return kv_pages, missing - q_lens

        caught_up: tuple[Pool, Array] = lax.while_loop(
            lambda carry: jnp.any(carry[1] > 1), compute, (state.draft.kv_pages, missing)
        )
        return caught_up

    def _forward(
        self,
        params: Params,
        state: ServeState,
        rows: Rows,
        last: Lengths,
        drafted: Int[Array, "R N"],
        kv_pages: Pool,
        num_tokens: int,
        words: Int[Array, " N1"] | None = None,
    ) -> tuple[Float[Array, "T D"], Pool]:
        """Run the draft model; return hidden states on the token axis, and the pool.

        Args:
            params: draft model parameters.
            state: state with all sequences.
            rows: rows to compute.
            last: lengths up to each row's last known token; all later tokens are drafts.
            drafted: drafts so far.
            kv_pages: the draft model's KV pool.
            num_tokens: length of the token axis, T.
            words: ancestor bits by tree node; None for a chain.
        """
        row, offset, (history, position, _), live = place_tokens(rows, num_tokens)
        known = state.slots.token_history.at[rows.slot[row], history].get(**CLIPPED)
        node = history - last.history[row]
        ids = jnp.where(node > 0, drafted[row, jnp.clip(node - 1, 0, drafted.shape[1] - 1)], known)
        if self.is_mapped:
            ids = params["inputs"].at[ids].get(**CLIPPED)
        tree_mask = None if words is None else words.at[offset].get(**CLIPPED)
        if words is not None:
            depth = lax.population_count(words.at[node].get(**CLIPPED))
            position = jnp.where(node > 0, last.position[row] + depth, position)
        num_rows = jnp.int32(rows.slot.shape[0])
        group = ragged_rows(state.sequences, rows, num_rows)[self.kv_group]
        form, num_tokens = self.arch.kv_layout.pool, ids.shape[0]
        attention = PagedAttention(
            *(self.backend, kv_pages, (form.step_rows(self.backend, group),), tree_mask),
            chosen=form.no_choice(self.backend, kv_pages, group, num_tokens),
        )
        hidden, tokens = decoder.forward(params, self.arch, ids, TokenContext(position, attention, live=live))
        return hidden, PagedAttention.after(tokens).kv_pages

    def _logits(self, params: Params, hidden: Float[Array, "M D"]) -> Float[Array, "M V"]:
        """Return logits over the target's vocabulary."""
        logits = decoder.compute_logits(params, self.arch, hidden)
        return over_vocabulary(logits, self.vocab_size, params.get("outputs"))
