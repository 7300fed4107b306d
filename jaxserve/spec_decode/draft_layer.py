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

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.proposer import BothParams, Drafts
from jaxserve.execution.rows import Rows, place_tokens, ragged_rows
from jaxserve.execution.sampling import SamplingRows
from jaxserve.execution.state import CLIPPED, ServeState, new_pool
from jaxserve.layers.linear import embed, linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import draft_head
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.ragged_paged_attention import Pages
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_sampling import draw_draft, over_vocabulary
from jaxserve.spec_decode.medusa import whole_logits


@dataclass(frozen=True)
class LayerHead:
    """Draft layer method and sizes.

    Attributes:
        method: the way embedding and feature enter.
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
@struct.dataclass
class DraftLayerState:
    """Draft layer state.

    Attributes:
        kv_pages: its KV pool.
        feature: feature at the last computed position, by slot.
        is_known: False until a step has computed tokens for the slot.
    """

    kv_pages: Pages
    feature: Float[Array, "S D"]
    is_known: Bool[Array, " S"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class _Drafting:
    """State of drafting: the pool, and each row's feature, tokens and weights so far."""

    kv_pages: Pages
    feature: Float[Array, "R D"]
    token_ids: Int[Array, "R K"]
    weights: Float[Array, "K R V"]


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

    @property
    def max_nodes(self) -> int:
        """Maximum drafts per row."""
        return self.max_drafts

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Model layers whose inputs it reads."""
        return self.head.feature_layers

    def new_state(self) -> DraftLayerState:
        s, arch = self.schedule, self.head.arch
        return DraftLayerState(
            kv_pages=new_pool(arch, s.num_pages, s.page_size, kv_dtype=jnp.dtype(self.kv_dtype), backend=self.backend),
            feature=jnp.zeros((s.max_num_seqs, arch.hidden_size), jnp.dtype(self.dtype)),
            is_known=jnp.zeros(s.max_num_seqs, bool),
        )

    def admit(self, state: DraftLayerState, slot: Int[Array, " A"]) -> DraftLayerState:
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
        """Compute the entries of all positions whose next token is known: all but the last, whose feature is kept."""
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
        R, K, V = rows.slot.shape[0], self.max_drafts, self.vocab_size
        own: DraftLayerState = state.draft
        num_drafts = jnp.where(own.is_known.at[rows.slot].get(**CLIPPED), num_drafts, 0)
        records = state.sequences.records.at[rows.slot].get(**CLIPPED)
        known = state.slots.token_history.at[rows.slot, rows.start.history].get(**CLIPPED)

        def draft(index: Int[Array, ""], so_far: _Drafting) -> _Drafting:
            live = index < num_drafts
            at = rows.moved(jnp.maximum(index - 1, -rows.start.cached), live.astype(jnp.int32))
            row, _, (_, position, _), is_token = place_tokens(at, R)
            drafted = so_far.token_ids.at[:, index - 1].get(**CLIPPED)
            ids = jnp.where(index == 0, known, drafted)[row]
            feature = so_far.feature[row]
            hidden, kv_pages = self._forward(params, state, at, ids, feature, position, is_token, so_far.kv_pages)
            hidden = hidden.at[at.cu_q_lens[1:] - 1].get(**CLIPPED)
            normed = rms_norm(hidden, params[1]["final_norm"], self.head.arch.norm_eps)
            sampling = SamplingRows(records, rows.start.history + 1 + index, live)
            logits = self._logits(params, normed)
            token_ids, weights = draw_draft(logits, sampling, index, so_far.weights, base_seed)
            return _Drafting(
                kv_pages=kv_pages,
                feature=normed if self.head.norms_output else hidden,
                token_ids=lax.dynamic_update_slice(so_far.token_ids, token_ids[:, None], (0, index)),
                weights=weights,
            )

        drafting = _Drafting(
            kv_pages=own.kv_pages,
            feature=own.feature.at[rows.slot].get(**CLIPPED),
            token_ids=jnp.zeros((R, K), jnp.int32),
            weights=jnp.zeros((K, R, V), jnp.float32),
        )
        drafting = lax.fori_loop(0, jnp.max(num_drafts), draft, drafting)
        drafts = Drafts(drafting.token_ids, num_drafts, drafting.weights)
        return drafts, dataclasses.replace(own, kv_pages=drafting.kv_pages)

    def _forward(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        feature: Float[Array, "T D"],
        position: Int[Array, " T"],
        live: Bool[Array, " T"],
        kv_pages: Pages,
    ) -> tuple[Float[Array, "T D"], Pages]:
        """Return the layer's outputs for features and the tokens that follow them, and the pool."""
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
        target, own = params
        if "lm_head" in own:
            logits = linear(hidden, own["lm_head"], dtype=jnp.float32)
        else:
            logits = whole_logits(target, self.target, hidden)
        return over_vocabulary(logits, self.vocab_size, own.get("outputs"))


def project_features(own: Params, head: LayerHead, observed: Float[Array, "T observed"]) -> Float[Array, "T D"]:
    """Return the features of tokens from the hidden states that the model computed for them."""
    x = observed
    if "fc" not in own:
        return x
    if "fc_norm" in own:  # one norm over the whole vector, or one per layer
        norms, eps = own["fc_norm"], head.arch.norm_eps
        x = jnp.concatenate(
            [rms_norm(part, norm, eps) for part, norm in zip(jnp.split(x, len(norms), 1), norms, strict=True)], 1
        )
    return linear(x, own["fc"])


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
