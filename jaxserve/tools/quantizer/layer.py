"""A decoder layer on calibration sequences: statistics of its matrices' inputs, and its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import ObservedMatrix
from jaxserve.layers.rope import rotation
from jaxserve.layers.token_context import Attention, LayerContext, TokenContext
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.ragged_paged_attention import apply_rope
from jaxserve.tools.quantizer.smoothing import InputStats

Stats = dict[str, InputStats]


def layer_outputs(p: Params, arch: ArchConfig, layer: int, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Return the hidden states after a layer with the parameters `p`, given those before it, `x`."""
    return _run(p, x, {}, arch=arch, kind=_kind(arch, layer))[0]


def layer_stats(p: Params, arch: ArchConfig, layer: int, x: Float[Array, "B S D"], stats: Stats) -> Stats:
    """Return `stats`, which are donated, with the inputs added that a layer's matrices get for hidden states `x`."""
    return _add_stats(p, x, stats, arch=arch, kind=_kind(arch, layer))


def empty_stats(p: Params, names: Sequence[str]) -> Stats:
    """Return the statistics for some matrices before any sequence."""
    return {name: InputStats.empty(p[name].shape[1]) for name in names}


def _kind(arch: ArchConfig, layer: int) -> int:
    """Return the first layer with the same spec, which shares its program with this one."""
    return arch.layers.index(arch.layers[layer])


@partial(jax.jit, static_argnames=("arch", "kind"), donate_argnames="stats")
def _add_stats(p: Params, x: Array, stats: Stats, *, arch: ArchConfig, kind: int) -> Stats:
    """Call `_apply` as one compiled program, and return only its statistics; `stats` are donated."""
    return _apply(p, x, stats, arch, kind)[1]


@partial(jax.jit, static_argnames=("arch", "kind"))
def _run(p: Params, x: Array, stats: Stats, *, arch: ArchConfig, kind: int) -> tuple[Array, Stats]:
    """Call `_apply` as one compiled program."""
    return _apply(p, x, stats, arch, kind)


def _apply(p: Params, x: Array, stats: Stats, arch: ArchConfig, kind: int) -> tuple[Array, Stats]:
    """Return a layer's outputs, and `stats` with the inputs of the matrices that they name added.

    Args:
        p: parameters of the layer.
        x: hidden states [batch, sequence, D] before the layer.
        stats: statistics by matrix.
        arch: the model.
        kind: index of a layer with the same spec.
    """
    B, S, D = x.shape
    tokens = TokenContext(jnp.tile(jnp.arange(S), B), _SequenceAttention(S))
    rotated = rotation(tokens.position, arch.ropes[kind], arch.attention.head_dim)
    stats = dict(stats)

    def observe(name: str, inputs: Array) -> None:
        stats[name] = stats[name].add(inputs)

    observed = {name: ObservedMatrix(p[name], partial(observe, name)) for name in stats}
    family = registry.family(arch)
    context = LayerContext(arch.layer_options(kind), family.norm, jnp.int32(0), rotated)
    outputs, _ = family.block({**p, **observed}, x.reshape(B * S, D), tokens, context, arch=arch)
    return outputs.reshape(B, S, D), stats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SequenceAttention(Attention):
    """Attention within each run of `seq_len` tokens, one sequence at a time: its scores are the largest array."""

    seq_len: int = field(metadata={"static": True})

    def attend(
        self, q: Array, k: Array | None, v: Any, layer: LayerContext, sinks: Array | None, index: Any = None
    ) -> tuple[Array, "_SequenceAttention"]:
        """Return each query head's attention output [T, Q, H], and this object unchanged; keys are not stored."""
        assert k is not None, "no layer shares another one's keys"
        if layer.rope is not None:
            q, k = apply_rope(q, layer.rope), apply_rope(k, layer.rope)
        (T, Q, H), K, attention = q.shape, k.shape[1], layer.attention.options
        distance = jnp.arange(self.seq_len)[:, None] - jnp.arange(self.seq_len)[None, :]
        seen = (distance >= 0) & (distance < (attention.window or self.seq_len))

        def one(sequence: tuple[Array, Array, Array]) -> Array:
            """Return the attention output of one sequence's queries, keys and values."""
            q, k, v = sequence
            scores = jnp.einsum("skgh,tkh->kgst", q.reshape(-1, K, Q // K, H), k) * attention.scale
            if attention.soft_cap is not None:
                scores = attention.soft_cap * jnp.tanh(scores / attention.soft_cap)
            scores = jnp.where(seen[None, None], scores, -jnp.inf)
            if sinks is not None:
                column = jnp.broadcast_to(sinks.reshape(K, Q // K, 1, 1), (*scores.shape[:3], 1))
                scores = jnp.concatenate([scores, column], axis=-1)
            weights = jax.nn.softmax(scores)[..., : self.seq_len]
            return jnp.einsum("kgst,tkh->skgh", weights, v).reshape(-1, Q, H)

        sequences = [x.reshape(T // self.seq_len, self.seq_len, *x.shape[1:]) for x in (q, k, v)]
        return lax.map(one, tuple(sequences)).reshape(T, Q, H), self
