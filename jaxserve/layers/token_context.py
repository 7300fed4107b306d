"""Forward-pass contexts: the tokens that layers compute, and the layer that computes them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.layers.norm import NormFunction
from jaxserve.layers.rope import Rotation
from jaxserve.pallas_kernels.ragged_paged_attention import HeadMatrices, IndexInputs, next_index

if TYPE_CHECKING:
    from jaxserve.layers.state_forms import StateForm
    from jaxserve.models.layer_spec import AttentionSpec, LayerOptions, MlpSpec


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerContext:
    """Layer that computes the tokens.

    Attributes:
        options: static options for its attention or state.
        norm: function for all its norms.
        index: index in the layer's KV group, or among the recurrent layers.
        rotation: rotation for queries and keys; None in NoPE layers.
        inputs: further inputs in addition to the residual stream, or None; see `ModelFamily.layer_inputs`.
        last_only: True if no layer after its attention reads other tokens than the rows' last ones.
    """

    options: LayerOptions = field(metadata={"static": True})
    norm: NormFunction = field(metadata={"static": True})
    index: Int[Array, ""]
    rotation: Rotation | None = None
    inputs: Float[Array, "N size"] | None = None
    last_only: bool = field(metadata={"static": True}, default=False)

    @property
    def attention(self) -> AttentionSpec:
        """Attention, if the layer is not recurrent."""
        return self.options.spec.attention

    @property
    def mlp(self) -> MlpSpec:
        """MLP, if the layer has one."""
        assert self.options.spec.mlp is not None, "the layer has an MLP"
        return self.options.spec.mlp

    @property
    def state(self) -> StateForm | None:
        """Recurrent state; None in attention layers."""
        return self.options.spec.state

    @property
    def rope(self) -> Float[Array, "2 T half"] | None:
        """Cosines and sines by which attention rotates queries and keys; None in NoPE layers."""
        return None if self.rotation is None else self.rotation.table


class Attention(ABC):
    """Attention and recurrent states in a forward pass: a pytree, which each layer returns updated."""

    @abstractmethod
    def attend(
        self,
        q: Float[Array, "N Q W"],
        k: Float[Array, "T K S"] | None,
        v: Float[Array, "T K H"] | HeadMatrices | None,
        layer: LayerContext,
        sinks: Float[Array, " Q"] | None,
        index: IndexInputs | None = None,
    ) -> tuple[Float[Array, "N Q V"], Self]:
        """Rotate queries and keys by `layer.rope`, keep the new keys and values, and attend.

        Args:
            q: queries, for the rows' last tokens if `layer.last_only`; with MLA, only their last elements are rotated.
            k: keys, or MLA latents; None in a layer that reads another layer's keys and values.
            v: values, or the matrices that expand latents to keys and values; None if `k` is.
            layer: the layer.
            sinks: logits that take part in the softmax without values.
            index: an indexer's queries, weights and keys, by which each query chooses its tokens; None to see all, or
                the earlier choice if `AttentionSpec.shares_choice`.
        """

    def advance(self, inputs: Any, layer: LayerContext) -> tuple[Float[Array, "T heads size"], Self]:
        """Return a recurrent layer's outputs; see `StateForm.advance`."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent states")


class NarrowingAttention(Attention):
    """Attention that can continue with some of the tokens, as `TokenContext.last` requires."""

    @abstractmethod
    def for_last(self, last: Int[Array, " R"]) -> Self:
        """Return the attention for layers that compute only the tokens `last`."""

    @abstractmethod
    def part(self, start: Int[Array, ""], num_tokens: int) -> Self:
        """Return the attention for some of the tokens, which have been written; later ones are not seen."""

    @abstractmethod
    def with_pools(self, after: Self) -> Self:
        """Return the attention with the keys, values and states that `after`, of later layers, has written."""


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenAdapters:
    """Adapters of tokens.

    Attributes:
        slot: adapter per token: 0 for the base model, otherwise 1 + its index in the stacks.
        num_slots: number of adapters, S.
    """

    slot: Int[Array, " T"]
    num_slots: int = field(metadata={"static": True})

    def select(self, take: Callable[[Int[Array, " T"]], Int[Array, " N"]]) -> Self:
        """Return the adapters of other tokens, whose slots `take` selects."""
        return dataclasses.replace(self, slot=take(self.slot))

    @property
    def index(self) -> Int[Array, " T"]:
        """Index in the stacks of each token's adapter; arbitrary for the base model."""
        return jnp.maximum(self.slot - 1, 0)

    @property
    def is_adapted(self) -> Bool[Array, " T"]:
        """Mask of tokens with an adapter."""
        return self.slot > 0

    @property
    def has_adapted(self) -> Bool[Array, ""]:
        """True if any token has an adapter."""
        return jnp.any(self.is_adapted)


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenImages:
    """Image embeddings of tokens.

    Attributes:
        cache: the encoder cache, with an embedding per row; with DeepStack, further features follow it.
        row: each token's row in the cache; -1 for a token that has the embedding of its id.
    """

    cache: Float[Array, "E features"]
    row: Int[Array, " T"]

    @property
    def is_image(self) -> Bool[Array, " T"]:
        """Mask of tokens that take an image's embedding."""
        return self.row >= 0

    def features(self, index: int, size: int) -> Float[Array, "T size"]:
        """Return the tokens' features: the embeddings for index 0, then those of each DeepStack layer.

        Those of tokens without an image are arbitrary.
        """
        part = lax.slice_in_dim(self.cache, index * size, (index + 1) * size, axis=1)
        return part.at[jnp.maximum(self.row, 0)].get(mode="clip")


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenContext:
    """Tokens in a forward pass, their rows, and the state that layers leave to later ones.

    Attributes:
        position: positions.
        attention: attention and recurrent states.
        row: rows in the step; arbitrary for padding, None outside a step.
        slot: the rows' slots, likewise.
        live: mask over all devices' tokens, False for padding; None if no token is padding.
        expert_tokens: token counts by MoE layer and expert; None if not counted.
        moe_index: the next MoE layer's index.
        num_live: number of tokens before all padding; kernels may compute only these. None if all may be live.
        last: index of each row's last token, rows with tokens first; see `RaggedRows.last_tokens`. None if the hidden
            states of all tokens are needed.
        adapters: LoRA adapters of the tokens; None without adapters.
        axes: positions on each axis, by which M-RoPE rotates; None if all axes have `position`.
        images: embeddings of images, and the tokens that take them; None in a model without images.
    """

    position: Int[Array, " T"]
    attention: Attention
    row: Int[Array, " T"] | None = None
    slot: Int[Array, " T"] | None = None
    live: Bool[Array, " all"] | None = None
    expert_tokens: Int[Array, "L E"] | None = None
    moe_index: Int[Array, ""] | int = 0
    num_live: Int[Array, ""] | None = None
    last: Int[Array, " R"] | None = None
    adapters: TokenAdapters | None = None
    axes: Int[Array, "T 3"] | None = None
    images: TokenImages | None = None

    @property
    def rotary_position(self) -> Int[Array, " T"] | Int[Array, "T 3"]:
        """Positions by which queries and keys are rotated."""
        return self.position if self.axes is None else self.axes

    def attend(
        self,
        q: Float[Array, "T Q W"],
        k: Float[Array, "T K S"] | None,
        v: Float[Array, "T K H"] | HeadMatrices | None,
        layer: LayerContext,
        sinks: Float[Array, " Q"] | None = None,
        index: IndexInputs | None = None,
    ) -> tuple[Float[Array, "N Q V"], TokenContext]:
        """Return attention outputs and the context for the next layers; see `Attention.attend`.

        If `layer.last_only`, both are for the rows' last tokens.
        """
        if layer.rotation is not None and layer.rotation.query_factor is not None:
            q *= layer.rotation.query_factor[:, None, None].astype(q.dtype)
        if index is not None:
            index = index._replace(q=self.kept(index.q, layer), weights=self.kept(index.weights, layer))
        out, attention = self.attention.attend(self.kept(q, layer), k, v, layer, sinks, index)
        tokens = dataclasses.replace(self, attention=attention)
        return out, tokens.for_last() if layer.last_only else tokens

    def advance(self, inputs: Any, layer: LayerContext) -> tuple[Float[Array, "T heads size"], TokenContext]:
        """Return a recurrent layer's outputs and the context for the next layers."""
        out, attention = self.attention.advance(inputs, layer)
        return out, dataclasses.replace(self, attention=attention)

    @property
    def narrowing(self) -> NarrowingAttention:
        """The attention, which can continue with some of the tokens."""
        assert isinstance(self.attention, NarrowingAttention), f"{type(self.attention).__name__} keeps all tokens"
        return self.attention

    def kept(self, x: Float[Array, "T *D"], layer: LayerContext) -> Float[Array, "N *D"]:
        """Return x for the tokens that are left after the layer's attention."""
        return self.take_last(x) if layer.last_only else x

    def take_last(self, x: Shaped[Array, "T *D"]) -> Shaped[Array, "R *D"]:
        """Return x for the rows' last tokens; arbitrary rows after them."""
        assert self.last is not None, "the step needs only the rows' last tokens"
        return x.at[self.last].get(mode="clip")

    def spread_last(self, x: Float[Array, "R D"], num_tokens: int) -> Float[Array, "T D"]:
        """Return x, of the rows' last tokens, for all of `num_tokens` tokens: zeros for those that are not the last."""
        assert self.last is not None, "the step needs only the rows' last tokens"
        index = next_index(self.last, num_tokens)
        is_last = self.last.at[index].get(mode="clip") == jnp.arange(num_tokens)
        return jnp.where(is_last[:, None], x.at[index].get(mode="clip"), 0)

    def for_last(self) -> TokenContext:
        """Return the context for layers that compute only the rows' last tokens."""
        assert self.last is not None, "the step needs only the rows' last tokens"
        live = None if self.live is None else self.live.at[self.last].get(mode="fill", fill_value=False)
        num_live = None if live is None else jnp.sum(live, dtype=jnp.int32)
        attention, adapters = self.narrowing.for_last(self.last), self.adapters
        if adapters is not None:  # rows without tokens must not count as adapted
            adapters = adapters.select(lambda slot: slot.at[self.last].get(mode="fill", fill_value=0))
        return dataclasses.replace(
            self.select(self.take_last), live=live, num_live=num_live, attention=attention, adapters=adapters, last=None
        )

    def part(self, start: Int[Array, ""], num_tokens: int) -> TokenContext:
        """Return the context for some of the tokens; see `Attention.part`."""

        def take(x: Shaped[Array, "T *D"]) -> Shaped[Array, "part *D"]:
            return lax.dynamic_slice_in_dim(x, start, num_tokens)

        live, attention = None if self.live is None else take(self.live), self.narrowing.part(start, num_tokens)
        num_live = None if self.num_live is None else jnp.clip(self.num_live - start, 0, num_tokens)
        return dataclasses.replace(self.select(take), live=live, num_live=num_live, attention=attention, last=None)

    def select(self, take: Callable[[Array], Array]) -> TokenContext:
        """Return the context for other activation rows, whose tokens `take` selects; only linear layers read it."""
        row, slot, axes = (None if each is None else take(each) for each in (self.row, self.slot, self.axes))
        adapters, position = self.adapters and self.adapters.select(take), take(self.position)
        return dataclasses.replace(
            self, position=position, row=row, slot=slot, num_live=None, adapters=adapters, axes=axes, images=None
        )

    def count_experts(self, ids: Int[Array, "all k"]) -> TokenContext:
        """Return the context after an MoE layer that chose these experts; ids outside the experts are not counted."""
        if self.expert_tokens is None:
            return self
        counts = self.expert_tokens.at[self.moe_index, ids.reshape(-1)].add(1, mode="drop")
        return dataclasses.replace(self, expert_tokens=counts, moe_index=jnp.int32(self.moe_index) + 1)
