"""Decoder around the blocks: embedding, unrolled or scanned layers, final norm, logits.

On CPU and GPU the layers are a list, unrolled, with the block as an inner jit; on TPU they are stacked and scanned over
the period after which their specs repeat. The KV pool is part of the `TokenContext`, so both ways update one stacked
pool in place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.linear import Matrix, at_layer, embed, linear
from jaxserve.layers.token_context import TokenAdapters, TokenContext, TokenImages
from jaxserve.layers.token_exchange import all_tokens, local_tokens
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.last_layers import LastLayers, inner_block, layer_context, layer_rotations, split_last
from jaxserve.models.params import EXPERT_MATRICES, POSITION_EMBED, Params, ScannedLayers
from jaxserve.pallas_kernels.grouped_matmul import default_matmul_backend


def forward(
    params: Params,
    arch: ArchConfig,
    token_ids: Int[Array, " T"],
    tokens: TokenContext,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return all tokens' hidden states after the final norm, and the context after the last layer.

    If the model is split over devices, the arguments are one device's; the hidden states are whole.
    """
    hidden, _, tokens = forward_with_features(params, arch, token_ids, tokens, ())
    return hidden, tokens


def forward_with_features(
    params: Params,
    arch: ArchConfig,
    token_ids: Int[Array, " T"],
    tokens: TokenContext,
    feature_layers: Sequence[int],
    needs_all: Bool[Array, ""] | None = None,
    before: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T FD"], TokenContext]:
    """Return the results of `forward` and, between them, the concatenated inputs of F layers.

    A pipeline stage takes the hidden states `before` its layers, unless it is the first one, and returns those after
    them, after the final norm if it is the last one.

    If `tokens.last` is given, layers from `arch.last_kv_layer` on compute only these tokens, and the hidden states of
    all others are zero, unless `needs_all`. Layer `arch.num_layers` means the last layer's output before the final
    norm; layers after `last_kv_layer` may be among `feature_layers` only without `tokens.last`.
    """
    family = registry.family(arch)
    with jax.named_scope("embed"):
        x = (
            embed_tokens(params, arch, token_ids, tokens.position, tokens.adapters, tokens.images)
            if before is None
            else before
        )
        rotations = layer_rotations(arch, tokens.rotary_position)
        inputs = family.layer_inputs(params, arch, _text_ids(arch, token_ids, tokens.images), x)
        tokens = dataclasses.replace(tokens, moe_index=jnp.int32(0))
    layers = params["layers"]
    if not isinstance(layers, ScannedLayers):
        layers = ScannedLayers((), layers, [])
    scanned, start, end = layers.periodic, len(layers.first), arch.num_layers - len(layers.rest)
    in_place = [_stacks_in_place(p) for p in scanned]
    sliced = tuple(
        {name: p[name] for name in p if name not in stacks} for p, stacks in zip(scanned, in_place, strict=True)
    )

    layer_kv = arch.kv_layout.layers

    num_features = len(feature_layers)
    features = jnp.zeros((num_features, *x.shape), x.dtype)
    wanted = {layer: index for index, layer in enumerate(feature_layers)}
    # Other layers get an index out of range, so that their updates are dropped.
    index_in_features = [wanted.get(layer, num_features) for layer in range(start, end)]

    def keep(features: Array, layer: int, x: Array) -> Array:
        return features.at[wanted[layer]].set(x) if layer in wanted else features

    def run_period(
        state: tuple[Array, Array, TokenContext], xs: tuple[tuple[Params, ...], Array, Array, Array, Array | None]
    ) -> tuple[tuple[Array, Array, TokenContext], None]:
        x, features, tokens = state
        period, feature_indices, kv_positions, index, period_inputs = xs
        for kind, matrices in enumerate(period):
            p = {**matrices, **{name: at_layer(stack, index) for name, stack in in_place[kind].items()}}
            if num_features:
                features = features.at[feature_indices[kind]].set(x, mode="drop")
            own = None if period_inputs is None else period_inputs[kind]
            layer = layer_context(arch, start + kind, kv_positions[kind], rotations, own)
            x, tokens = family.block(p, x, tokens, layer, arch=arch)
        return (x, features, tokens), None

    def run_unrolled(
        state: tuple[Array, Array, TokenContext], period: Sequence[Params], start: int
    ) -> tuple[Array, Array, TokenContext]:
        x, features, tokens = state
        block = inner_block(family.block, default_matmul_backend())
        for layer, p in enumerate(period, start):
            features = keep(features, layer, x)
            own = None if inputs is None else inputs[layer]
            context = layer_context(arch, layer, jnp.int32(layer_kv[layer].position), rotations, own)
            x, tokens = block(p, x, tokens, context, arch=arch)
            x = with_deep_features(x, arch, layer, tokens)
        return x, features, tokens

    rest, last_layers = split_last(arch, layers.rest, tokens)
    state = run_unrolled((x, features, tokens), layers.first, 0)
    if scanned:
        kv_positions = [layer_kv[layer].position for layer in range(start, end)]
        scanned_features, scanned_positions = (
            jnp.array(each).reshape(-1, len(scanned)) for each in (index_in_features, kv_positions)
        )
        scanned_inputs = None if inputs is None else inputs[start:end].reshape(-1, len(scanned), *inputs.shape[1:])
        xs = (sliced, scanned_features, scanned_positions, jnp.arange(len(scanned_positions)), scanned_inputs)
        state, _ = lax.scan(run_period, state, xs)
    x, features, tokens = run_unrolled(state, rest, end)
    features = keep(features, end + len(rest), x)
    side_by_side = jnp.moveaxis(features, 0, 1).reshape(x.shape[0], -1)
    if not last_layers:
        return (
            family.norm(x, params["final_norm"], arch.norm_eps) if arch.stage.is_last else x,
            side_by_side,
            tokens,
        )
    hidden, tokens = LastLayers(arch, last_layers, params["final_norm"], inputs).compute(x, tokens, needs_all)
    return hidden, side_by_side, tokens


def _stacks_in_place(p: Params) -> Params:
    """Return the stacked matrices that kernels index themselves, because slicing in the scan would copy them.

    These are expert matrices, since kernels read only the experts that the step's tokens choose, and quantised ones.
    """

    def is_in_place(name: str, weight: Any) -> bool:
        return isinstance(weight, Matrix) or (name in EXPERT_MATRICES and isinstance(weight, jax.Array))

    return {name: weight for name, weight in p.items() if is_in_place(name, weight)}


def embed_tokens(
    params: Params,
    arch: ArchConfig,
    token_ids: Int[Array, " T"],
    positions: Int[Array, " T"],
    adapters: TokenAdapters | None = None,
    images: TokenImages | None = None,
) -> Float[Array, "T D"]:
    """Return the first layer's inputs: scaled token embeddings, plus learned position embeddings if there are some.

    Tokens of images take their embeddings from `images`, which are not scaled.
    """
    # Norms determine the dtype because they are never quantised.
    dtype, ids = jax.tree.leaves(params["final_norm"])[0].dtype, all_tokens(token_ids, arch.token_axis)
    adapters = adapters and adapters.select(lambda slot: all_tokens(slot, arch.token_axis))
    rows = embed(ids, params["embed"], dtype=dtype, axis=arch.vocab_axis, adapters=adapters)
    x = local_tokens(rows, arch.token_axis)
    if arch.embed_scale != 1.0:
        x *= jnp.asarray(arch.embed_scale, x.dtype)
    if images is not None:
        x = jnp.where(images.is_image[:, None], images.features(0, arch.hidden_size).astype(x.dtype), x)
    if POSITION_EMBED in params:
        x += embed(positions, params[POSITION_EMBED], dtype=dtype)
    return x


def _text_ids(arch: ArchConfig, token_ids: Int[Array, " T"], images: TokenImages | None) -> Int[Array, " T"]:
    """Return the ids by which layers look up further inputs: tokens with an image's embedding have the padding's."""
    if images is None or arch.images is None:
        return token_ids
    return jnp.where(images.is_image, arch.images.pad_id, token_ids)


def with_deep_features(
    x: Float[Array, "T D"], arch: ArchConfig, layer: int, tokens: TokenContext
) -> Float[Array, "T D"]:
    """Return a layer's outputs, to which tokens of images add the layer's features if it has some (DeepStack)."""
    if layer >= arch.num_deep_layers or (images := tokens.images) is None:
        return x
    return x + jnp.where(images.is_image[:, None], images.features(1 + layer, x.shape[1]).astype(x.dtype), 0)


def can_scan(arch: ArchConfig) -> bool:
    """Return whether layer specs repeat, so that layers can be stacked and scanned."""
    return 2 * arch.period <= arch.num_layers - arch.num_first_layers


def num_layer_copies(arch: ArchConfig) -> int:
    """Return how many layers a scanned model's program contains: one period and the unrolled layers."""
    return arch.num_first_layers + arch.period + (arch.num_layers - arch.num_first_layers) % arch.period


def compute_logits(
    params: Params,
    arch: ArchConfig,
    hidden: Float[Array, "R D"],
    num_live: Int[Array, ""] | None = None,
    adapters: TokenAdapters | None = None,
) -> Float[Array, "R V"]:
    """Return float32 next-token logits, for the device's shard if the vocabulary is split.

    Args:
        params: the model's parameters.
        arch: sizes of the device's shard.
        hidden: hidden states after the final norm.
        num_live: number of them that are not padding, which follows them.
        adapters: adapters by hidden state; None without adapters.
    """
    with jax.named_scope("logits"):
        head = params["lm_head"] if "lm_head" in params else params["embed"]
        logits = linear(
            hidden, head, bias=params.get("lm_head_bias"), dtype=jnp.float32, num_live=num_live, adapters=adapters
        )
        if arch.logit_scale != 1.0:
            logits *= arch.logit_scale
        return logits if (cap := arch.logit_soft_cap) is None else cap * jnp.tanh(logits / cap)
