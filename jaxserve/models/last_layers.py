"""LastLayers: the layers after which only each row's last token needs a hidden state.

They begin with the last layer that makes keys and values. It makes these for all tokens, and queries too if they come
from the same matrix. Attention, MLP or experts and norms are computed only for the rows' last tokens; so are all layers
after it, which read an earlier layer's keys and values.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.rope import Positions, RopeConfig, Rotation, rotation
from jaxserve.layers.token_context import LayerContext, NarrowingAttention, TokenContext
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import Block
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.grouped_matmul import default_matmul_backend

BLOCK_TOKENS = 64  # tokens computed together if the hidden states of all are needed

Rotations = Mapping[tuple[RopeConfig | None, int], Rotation | None]  # keys: RoPE and head size


@dataclass(frozen=True)
class LastLayers:
    """Layers from `arch.last_kv_layer` on, which may compute only the rows' last tokens, and the final norm.

    Attributes:
        arch: sizes on this device.
        layers: parameters of these layers.
        final_norm: parameters of the norm.
        inputs: per-layer inputs of the whole model, or None; see `ModelFamily.layer_inputs`.
    """

    arch: ArchConfig
    layers: Sequence[Params]
    final_norm: Any
    inputs: Float[Array, "L T size"] | None

    def compute(
        self, x: Float[Array, "T D"], tokens: TokenContext, needs_all: Bool[Array, ""] | None
    ) -> tuple[Float[Array, "T D"], TokenContext]:
        """Return hidden states, which are zero except for `tokens.last`, unless `needs_all`; None is False."""
        inputs = None if self.inputs is None else jax.vmap(tokens.take_last)(self.inputs)
        last, after = self._run(x, tokens, inputs, last_only=True)
        hidden = tokens.spread_last(last, x.shape[0])
        attention = tokens.narrowing.with_pools(after.narrowing)
        tokens = dataclasses.replace(tokens, attention=attention)
        return (hidden, tokens) if needs_all is None else self._compute_all(x, hidden, tokens, needs_all)

    def _compute_all(
        self, x: Float[Array, "T D"], hidden: Float[Array, "T D"], tokens: TokenContext, needs_all: Bool[Array, ""]
    ) -> tuple[Float[Array, "T D"], TokenContext]:
        """Return all hidden states if `needs_all`, otherwise `hidden`.

        A loop over blocks of tokens, not a branch: XLA updates the pool in place in loops, and copies it in branches.
        """
        T = x.shape[0]
        block = min(T, BLOCK_TOKENS)
        num_tokens = T if tokens.live is None else jnp.sum(tokens.live, dtype=jnp.int32)

        def compute(
            index: Int[Array, ""], carry: tuple[Float[Array, "T D"], NarrowingAttention]
        ) -> tuple[Float[Array, "T D"], NarrowingAttention]:
            hidden, attention = carry
            start = jnp.minimum(index * block, T - block)  # the last block may repeat tokens of the previous one
            part = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
            inputs = None if self.inputs is None else part(self.inputs, axis=1)
            own = dataclasses.replace(tokens, attention=attention).part(start, block)
            new, after = self._run(part(x), own, inputs, last_only=False)
            return lax.dynamic_update_slice_in_dim(hidden, new, start, 0), attention.with_pools(after.narrowing)

        num_blocks = jnp.where(needs_all, -(-num_tokens // block), 0)
        hidden, attention = lax.fori_loop(0, num_blocks, compute, (hidden, tokens.narrowing))
        return hidden, dataclasses.replace(tokens, attention=attention)

    def _run(
        self, x: Float[Array, "T D"], tokens: TokenContext, inputs: Float[Array, "L N size"] | None, *, last_only: bool
    ) -> tuple[Float[Array, "N D"], TokenContext]:
        arch, family = self.arch, registry.family(self.arch)
        block, rotations = (
            inner_block(family.block, default_matmul_backend()),
            layer_rotations(arch, tokens.rotary_position),
        )
        for kind, p in enumerate(self.layers, arch.num_layers - len(self.layers)):
            index, own = jnp.int32(arch.kv_layout.layers[kind].position), None if inputs is None else inputs[kind]
            is_first = kind == arch.last_kv_layer
            layer = layer_context(arch, kind, index, rotations, own, last_only=last_only and is_first)
            x, tokens = block(p, x, tokens, layer, arch=arch)
            rotations = layer_rotations(arch, tokens.rotary_position) if is_first else rotations
        return family.norm(x, self.final_norm, arch.norm_eps), tokens


def split_last(arch: ArchConfig, layers: list[Params], tokens: TokenContext) -> tuple[list[Params], list[Params]]:
    """Split the model's last layers: return those that compute all tokens, and the others, for `LastLayers`."""
    layer = arch.last_kv_layer
    first = -1 if layer is None or tokens.last is None else layer - arch.num_layers + len(layers)
    return (layers, []) if first < 0 else (layers[:first], layers[first:])


def layer_rotations(arch: ArchConfig, position: Positions) -> Rotations:
    """Return the rotations of all layers."""
    heads = dict.fromkeys((attention.rope, attention.head_dim) for attention in arch.attention_layers)
    return {head: rotation(position, *head) for head in heads}


def layer_context(
    arch: ArchConfig,
    kind: int,
    index: Int[Array, ""],
    rotations: Rotations,
    inputs: Float[Array, "N size"] | None,
    *,
    last_only: bool = False,
) -> LayerContext:
    """Return the context of a layer whose spec equals layer `kind`'s."""
    options = arch.layer_options(kind)
    mixer = None if options.spec.state else options.spec.attention
    rotated = None if mixer is None else rotations[mixer.rope, mixer.head_dim]
    return LayerContext(options, registry.family(arch).norm, index, rotated, inputs, last_only)


@cache
def inner_block(block: Block, matmul_backend: str) -> Block:
    """Return the block as an inner jit, which traces layers with equal options once.

    Args:
        block: a family's layer.
        matmul_backend: `default_matmul_backend()` when tracing; only a cache key, as jit does not see this dependency.
    """
    return jax.jit(partial(block), static_argnames="arch")
