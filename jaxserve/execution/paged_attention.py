"""Paged attention in a step: over the pool by KV group, with the states of recurrent layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.kv_forms import NewTokens
from jaxserve.layers.state_forms import StateRows
from jaxserve.layers.token_context import LayerContext, NarrowingAttention, TokenContext
from jaxserve.pallas_kernels.ragged_paged_attention import ChosenTokens, HeadMatrices, IndexInputs, RaggedRows


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttention(NarrowingAttention):
    """Attention over the paged KV pool, for all layers; each layer returns an instance with its writes to the pool.

    Attributes:
        backend: attention backend.
        kv_pages: KV pool.
        groups: rows and page tables for the kernel, by KV group.
        tree_mask: ancestor bits for tokens in drafted trees; None without trees.
        states: pool of recurrent states.
        state_rows: rows for recurrent layers; None if the model has none.
        shared: this step's keys and values that later layers reuse, by layer.
        choosing: rows that choose the pages that they attend to; None if none do.
        ahead: number of later tokens that each token sees in layers with `sees_images`; None if there are none.
        chosen: tokens chosen in earlier layers; None if no layer shares an earlier layer's choice.
    """

    backend: str = field(metadata={"static": True})
    kv_pages: Any  # `Pool` in the backend's layout
    groups: tuple[RaggedRows, ...]
    tree_mask: Int[Array, " T"] | None = None
    states: Any = None
    state_rows: StateRows | None = None
    shared: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    choosing: Bool[Array, " R"] | None = None
    ahead: Int[Array, " T"] | None = None
    chosen: ChosenTokens | None = None

    @classmethod
    def after(cls, tokens: TokenContext) -> PagedAttention:
        """Return the attention, with its pools, that the last layer has left in `tokens`."""
        assert isinstance(tokens.attention, cls), "layers leave attention of the same type"
        return tokens.attention

    def attend(
        self,
        q: Float[Array, "N Q W"],
        k: Float[Array, "T K S"] | None,
        v: Float[Array, "T K H"] | HeadMatrices | None,
        layer: LayerContext,
        sinks: Float[Array, " Q"] | None,
        index: IndexInputs | None = None,
    ) -> tuple[Float[Array, "N Q V"], PagedAttention]:
        """Write the new tokens to the pool and attend over it; return outputs, and attention with the updated pool.

        A layer that shares another's keys and values writes the same values to the same pages again.
        """
        options = layer.options
        k, v, shared = options.share(k, v, self.shared)
        ahead = self.ahead if options.spec.attention.sees_images else None
        new = NewTokens(q, k, v, layer.rope, sinks, self.tree_mask, index, self.choosing, ahead)
        rows = self.groups[options.kv_group]
        kernel_options = dataclasses.replace(options.spec.attention.options, last_only=layer.last_only)
        args = new, rows, self.kv_pages, layer.index, kernel_options
        if isinstance(options.kv, IndexedLatents):
            out, kv_pages, chosen = options.kv.attend_chosen(*args, backend=self.backend, earlier=self.chosen)
            return out, dataclasses.replace(self, kv_pages=kv_pages, shared=shared, chosen=chosen)
        out, kv_pages = options.kv.attend(*args, backend=self.backend)
        return out, dataclasses.replace(self, kv_pages=kv_pages, shared=shared)

    def advance(self, inputs: Any, layer: LayerContext) -> tuple[Float[Array, "T heads size"], PagedAttention]:
        """Run a recurrent layer: return the outputs for its `inputs`, and attention with each row's state updated."""
        assert self.state_rows is not None, "a step of a model with recurrent layers has their rows"
        assert layer.state is not None, "the layer is recurrent"
        out, states = layer.state.advance(inputs, self.state_rows, self.states, layer.index)
        return out, dataclasses.replace(self, states=states)

    def for_last(self, last: Int[Array, " R"]) -> PagedAttention:
        """Return the attention for layers that compute only each row's last token, at index `last`."""
        groups = tuple(rows.last_tokens()[0] for rows in self.groups)
        shared = jax.tree.map(lambda x: x.at[last].get(mode="clip"), self.shared)
        return dataclasses.replace(self, groups=groups, shared=shared, ahead=None)

    def part(self, start: Int[Array, ""], num_tokens: int) -> PagedAttention:
        """Return the attention for `num_tokens` of the step's tokens from `start` on."""
        groups = tuple(rows.part(start, num_tokens) for rows in self.groups)
        chosen = self.chosen
        shared, ahead, bits = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, num_tokens), (self.shared, self.ahead, chosen and chosen.bits)
        )
        chosen = chosen and chosen._replace(bits=bits)
        return dataclasses.replace(self, groups=groups, shared=shared, ahead=ahead, chosen=chosen)

    def with_pools(self, after: PagedAttention) -> PagedAttention:
        """Return this attention with the pools that later layers have left in `after`."""
        return dataclasses.replace(self, kv_pages=after.kv_pages, states=after.states)
