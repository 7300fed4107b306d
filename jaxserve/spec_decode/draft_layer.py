"""DraftLayer: one decoder layer over the model's features drafts token by token (EAGLE-3, MTP).

A feature summarises the sequence up to one position: hidden states that the model computed there, or the layer's own
output. From the feature at a position and the embedding of the next token, the layer predicts the token after that. Its
KV pool uses the page ids of the sequence, and a feature's keys and values lie at the feature's position. Entries that
it computed from its own outputs while drafting are replaced by entries from the model's features: for all tokens in
plain steps, and for accepted tokens in rounds with drafts.

- EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the feature is a projection of the inputs of several layers. Queries, keys
  and values are projected from the concatenated embedding and feature; the residual stream holds only the feature.
- MTP (DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362): the feature is the hidden state after the final norm.
  A projection of embedding and feature goes through an ordinary layer.

A request that continues a cached prefix finds, at the prefix's last position, keys and values of the request that
computed it, whose next token may differ. That may cost an accepted draft, and nothing else.

Each device has the whole layer, except an MTP layer in the model's own layout, which is sharded like the model. If the
layer has no embedding or logits of its own, it uses the model's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.page_programs import KVLayout
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows, place_tokens, ragged_rows
from jaxserve.execution.state import CLIPPED, ServeState, new_pool
from jaxserve.layers.linear import embed, linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.pools import Pool
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import draft_head
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_sampling import draft_chain, over_vocabulary
from jaxserve.spec_decode.medusa import whole_logits


@dataclass(frozen=True)
class LayerHead:
    """Method and sizes of a draft layer.

    Attributes:
        method: the way in which embedding and feature enter.
        arch: layer sizes, per device if it is sharded.
        feature_layers: model layers whose inputs make the feature; empty for the hidden state after the final norm.
        norms_residual: True if EAGLE-3's residual stream starts from the normed feature.
        norms_output: True if the next feature is the output after the norm.
    """

    method: Literal["eagle3", "mtp"]
    arch: ArchConfig
    feature_layers: tuple[int, ...] = ()
    norms_residual: bool = False
    norms_output: bool = True


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftLayerState:
    """Draft layer state.

    Attributes:
        kv_pages: its KV pool.
        feature: feature at the last computed position, by slot.
        is_known: False until a step has computed tokens for the slot.
    """

    kv_pages: Pool
    feature: Float[Array, "S D"]
    is_known: Bool[Array, " S"]


@dataclass(frozen=True)
class DraftLayer:
    """Proposer with one decoder layer.

    Parameters: the decoder layer in `layers`; `embedding_norm`, `feature_norm`, `final_norm`; either `fc` (EAGLE-3: the
    projection of the concatenated layer inputs, with optional norms `fc_norm`) or `proj` (MTP). If they differ from the
    model's: `embed`, `lm_head`, and `outputs`, which maps the model's token ids to rows of `lm_head`.

    Attributes:
        max_drafts: maximum drafts per row, K.
        head: layer method and sizes.
        target: model sizes, per device if it is sharded.
        vocab_size: whole vocabulary size, V.
        schedule: step and pool sizes.
        dtype: feature dtype name.
        kv_dtype: pool dtype name.
        backend: attention backend.
        kv_group: model KV group whose pages it uses.
        is_greedy: True to draft the most likely tokens rather than to sample them.
    """

    max_drafts: int
    head: LayerHead
    target: ArchConfig
    vocab_size: int
    schedule: ScheduleConfig
    dtype: str
    kv_dtype: str
    backend: str
    kv_group: int
    is_greedy: bool = False

    @property
    def max_nodes(self) -> int:
        """Maximum drafts per row."""
        return self.max_drafts

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Model layers whose inputs it reads."""
        return self.head.feature_layers

    @property
    def page_layout(self) -> KVLayout:
        """Layout of its pool, whose pages move between tiers with the model's."""
        return KVLayout(self.backend, self.head.arch.kv_layout.pool.kind)

    def new_state(self) -> DraftLayerState:
        """Return an empty pool and no known features."""
        s, arch = self.schedule, self.head.arch
        return DraftLayerState(
            kv_pages=new_pool(arch, s.num_pages, s.page_size, kv_dtype=jnp.dtype(self.kv_dtype), backend=self.backend),
            feature=jnp.zeros((s.max_num_seqs, arch.hidden_size), jnp.dtype(self.dtype)),
            is_known=jnp.zeros(s.max_num_seqs, bool),
        )

    def admit(self, state: DraftLayerState, slot: Int[Array, " A"]) -> DraftLayerState:
        """Return the state without features for these slots; slots out of range are padding."""
        return dataclasses.replace(state, is_known=state.is_known.at[slot].set(False, mode="drop"))

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return the state unchanged: `observe` replaces the entries of drafts."""
        return state.draft

    def observe(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        observed: Float[Array, "T observed"],
    ) -> DraftLayerState:
        """Return the new state after the model has computed tokens.

        Its pool then has an entry for each feature whose next token is known; each row's last feature is kept.

        Args:
            params: parameters for model and proposer.
            state: state with all sequences.
            rows: rows with these tokens.
            token_ids: tokens on the rows' token axis.
            observed: the tokens' hidden states, concatenated over the feature layers.
        """
        draft: DraftLayerState = state.draft
        feature = project_features(params[1], self.head, observed.astype(self.dtype))
        # A row's first token pairs with the feature kept from the previous step, if there was one.
        first = jnp.where(draft.is_known.at[rows.slot].get(**CLIPPED), 0, 1)
        at = rows.moved(jnp.maximum(first - 1, -rows.start.cached), jnp.maximum(rows.q_lens - first, 0))
        row, offset, (_, position, _), live = place_tokens(at, token_ids.shape[0])
        offset = offset + first[row]
        token = rows.cu_q_lens[row] + offset
        before = jnp.where(
            (offset > 0)[:, None],
            feature.at[token - 1].get(**CLIPPED),
            draft.feature.at[rows.slot[row]].get(**CLIPPED),
        )
        ids = token_ids.at[token].get(**CLIPPED)
        _, kv_pages = self._forward(params, state, at, ids, before, position, live, draft.kv_pages)
        slot = jnp.where(rows.q_lens > 0, rows.slot, draft.is_known.shape[0])  # out of range, dropped
        last = feature.at[rows.cu_q_lens[1:] - 1].get(**CLIPPED)
        return DraftLayerState(
            kv_pages=kv_pages,
            feature=draft.feature.at[slot].set(last, mode="drop"),
            is_known=draft.is_known.at[slot].set(True, mode="drop"),
        )

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Draft token by token, each sampled with the row's parameters."""
        own: DraftLayerState = state.draft
        num_drafts = jnp.where(own.is_known.at[rows.slot].get(**CLIPPED), num_drafts, 0)
        known = state.slots.token_history.at[rows.slot, rows.start.history].get(**CLIPPED)

        def compute(
            index: Int[Array, ""], live: Bool[Array, " R"], drafted: Int[Array, "R K"], carry: tuple[Array, Pool]
        ) -> tuple[Float[Array, "R V"], tuple[Array, Pool]]:
            """Return the logits after the token before `index`, and the next feature and pool."""
            feature, kv_pages = carry
            at = rows.moved(jnp.maximum(index - 1, -rows.start.cached), live.astype(jnp.int32))
            row, _, (_, position, _), is_token = place_tokens(at, rows.slot.shape[0])
            ids = jnp.where(index == 0, known, drafted.at[:, index - 1].get(**CLIPPED))[row]
            hidden, kv_pages = self._forward(params, state, at, ids, feature[row], position, is_token, kv_pages)
            hidden = hidden.at[at.cu_q_lens[1:] - 1].get(**CLIPPED)
            normed = rms_norm(hidden, params[1]["final_norm"], self.head.arch.norm_eps)
            return self._logits(params, normed), (normed if self.head.norms_output else hidden, kv_pages)

        first = own.feature.at[rows.slot].get(**CLIPPED), own.kv_pages
        K, V = self.max_drafts, None if self.is_greedy else self.vocab_size
        drafts, (_, kv_pages) = draft_chain(
            state, rows, num_drafts, base_seed, compute, first, max_drafts=K, vocab_size=V
        )
        return drafts, dataclasses.replace(own, kv_pages=kv_pages)

    def _forward(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        feature: Float[Array, "T D"],
        position: Int[Array, " T"],
        live: Bool[Array, " T"],
        kv_pages: Pool,
    ) -> tuple[Float[Array, "T D"], Pool]:
        """Return the layer's outputs and its updated pool.

        Args:
            params: parameters for model and proposer.
            state: state with all sequences.
            rows: rows on the token axis.
            token_ids: tokens that follow the features.
            feature: features.
            position: positions of the features.
            live: mask of tokens that are no padding.
            kv_pages: the layer's KV pool.
        """
        target, own = params
        table, axis = (own["embed"], None) if "embed" in own else (target["embed"], self.target.vocab_axis)
        embedding = embed(token_ids, table, dtype=feature.dtype, axis=axis)
        num_rows = jnp.int32(rows.slot.shape[0])
        group = ragged_rows(state.sequences, rows, num_rows)[self.kv_group]
        arch = self.head.arch
        attention = PagedAttention(self.backend, kv_pages, (arch.kv_layout.pool.step_rows(self.backend, group),))
        tokens = TokenContext(position, attention, live=live)
        x, tokens = apply_layer(own, self.head, embedding, feature, tokens)
        return x, PagedAttention.after(tokens).kv_pages

    def _logits(self, params: BothParams, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return logits over the model's vocabulary, from the layer's own matrix or the model's."""
        target, own = params
        if "lm_head" in own:
            logits = linear(hidden, own["lm_head"], dtype=jnp.float32)
        else:
            logits = whole_logits(target, self.target, hidden)
        return over_vocabulary(logits, self.vocab_size, own.get("outputs"))


def project_features(own: Params, head: LayerHead, observed: Float[Array, "T observed"]) -> Float[Array, "T D"]:
    """Return the features for a draft layer: hidden states of the model, for EAGLE-3 normalised and projected.

    Args:
        own: parameters as `DraftLayer` lists them.
        head: layer method and sizes.
        observed: the model's hidden states, concatenated over the feature layers.
    """
    if "fc" not in own:
        return observed
    if "fc_norm" in own:  # one norm over the whole vector, or one per layer
        norms = own["fc_norm"]
        parts = zip(jnp.split(observed, len(norms), 1), norms, strict=True)
        observed = jnp.concatenate([rms_norm(part, norm, head.arch.norm_eps) for part, norm in parts], 1)
    return linear(observed, own["fc"])


def apply_layer(
    own: Params,
    head: LayerHead,
    embedding: Float[Array, "T D"],
    feature: Float[Array, "T D"],
    tokens: TokenContext,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return the layer's outputs before the final norm, and the updated context.

    Args:
        own: parameters as `DraftLayer` lists them.
        head: layer method and sizes.
        embedding: embeddings of the tokens that follow the features.
        feature: features.
        tokens: token context, at the feature positions.
    """
    arch, p, eps = head.arch, own["layers"][0], head.arch.norm_eps
    normed = rms_norm(feature, own["feature_norm"], eps)
    both = jnp.concatenate([rms_norm(embedding, own["embedding_norm"], eps), normed], axis=1)
    residual = None
    if head.method == "mtp":
        both = linear(both, own["proj"])
    else:
        residual = normed if head.norms_residual else feature
    return draft_head.block(p, both, tokens, arch=arch, residual=residual)
