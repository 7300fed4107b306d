"""The decoder on batches of equally long sequences, without a KV pool, for training and scoring."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxserve.layers.token_context import Attention, LayerContext, TokenContext
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, matrix_transform
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.pallas_kernels.ragged_paged_attention import apply_rope, int4
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import decode, encode
from jaxserve.weights import load, read_config

_QUERY_BLOCK = 128  # a block of queries skips later keys: half of the causal square is never computed


def load_model(
    directory: Path, *, quantization: str | None = None, activation_quantization: str | None = None
) -> tuple[Params, ArchConfig]:
    """Return float32 or quantised parameters, and the sizes, of a Hugging Face directory.

    With quantised activations the native CPU kernels multiply.
    """
    arch = from_hf_config(read_config(directory))
    specs, form = param_specs(arch), weight_format(quantization, None, activation_quantization)
    transform = matrix_transform(specs, form, native=activation_quantization is not None)
    return load(directory, specs, jnp.float32, transform=transform), arch


def logits(params: Params, arch: ArchConfig, tokens: Array, kv_dtype: str | None = None) -> Array:
    """Return next-token logits f32[B, S, V] for `tokens` i32[B, S]; every sequence starts at position 0.

    Args:
        arch: model sizes.
        tokens: token ids.
        kv_dtype: dtype to which keys and values are rounded as in a pool; None to leave them unchanged.
    """
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    context = TokenContext(positions, DenseAttention(S, kv_dtype))
    hidden, _ = decoder.forward(params, arch, tokens.reshape(-1), context)
    return decoder.compute_logits(params, arch, hidden).reshape(B, S, -1)


def token_nats(logits: Array, targets: Array) -> Array:
    """Return cross-entropy f32[B, S] for `targets` i32[B, S]."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def as_stored(x: Array, kv_dtype: str) -> Array:
    """Return keys or values as read back from a pool with this dtype."""
    found = decode(encode(x, jnp.dtype(kv_dtype)))
    return int4.rotate(found) / int4.block_size(x.shape[-1]) if kv_dtype == "int4" else found


@struct.dataclass
class DenseAttention(Attention):
    """Causal attention within each run of `seq_len` tokens on the token axis, over keys and values as stored in a pool.

    With `entries` (keys and values from earlier calls), a query sees those from the first call up to its own position,
    and from each later call, including its own, only those at its position. If later calls have fewer tokens than the
    first, these are at every second position, or third, and so on.
    """

    seq_len: int = struct.field(pytree_node=False)
    kv_dtype: str | None = struct.field(pytree_node=False, default=None)
    entries: tuple[tuple[Array, Array], ...] | None = None

    def attend(
        self, q: Array, k: Array | None, v: Any, layer: LayerContext, sinks: Array | None, index: object = None
    ) -> tuple[Array, "DenseAttention"]:
        attention, rope = layer.attention.options, layer.rope
        if attention.window is not None or attention.soft_cap is not None or sinks is not None or index is not None:
            raise NotImplementedError(
                "training needs a model of full attention, without soft cap, sinks and indexer, got "
                f"{attention}{'' if sinks is None else ' and sinks'}"
            )
        assert k is not None, "every layer has its own keys"
        assert rope is not None, "every layer rotates its keys"
        T, K, H = k.shape
        B, G = T // self.seq_len, q.shape[1] // K
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if self.kv_dtype is not None:
            k, v = as_stored(k, self.kv_dtype), as_stored(v, self.kv_dtype)
        q = q.reshape(B, self.seq_len, K, G, H).transpose(0, 2, 3, 1, 4) * attention.scale  # [B, K, G, S, H]
        k, v = (x.reshape(B, self.seq_len, K, H).transpose(0, 2, 1, 3) for x in (k, v))  # [B, K, S, H]
        entries = (*(self.entries or ()), (k, v))
        out = [_attend_block(q, entries, start) for start in range(0, self.seq_len, _QUERY_BLOCK)]
        out = jnp.concatenate(out, axis=3).transpose(0, 3, 1, 2, 4).reshape(T, K * G, H)
        return out, self if self.entries is None else dataclasses.replace(self, entries=entries)


def _attend_block(q: Array, entries: Sequence[tuple[Array, Array]], start: int) -> Array:
    """Return outputs for queries from `start` on; softmax is normalised after summing values."""
    (k, v), *later = entries
    B, K, G, S, H = q.shape
    end, every = min(start + _QUERY_BLOCK, S), k.shape[2] // S
    num_keys = (end - 1) * every + 1
    block = q[:, :, :, start:end].reshape(B, K, -1, H)
    scores = jnp.einsum("bkqh,bksh->bkqs", block, k[:, :, :num_keys])
    hidden = jnp.tile(every * jnp.arange(start, end)[:, None] < jnp.arange(num_keys)[None, :], (G, 1))
    scores = jnp.where(hidden[None, None], -1e30, scores)
    own = [(jnp.tile(x[:, :, start:end], (1, 1, G, 1)), jnp.tile(y[:, :, start:end], (1, 1, G, 1))) for x, y in later]
    scores = jnp.concatenate([scores, *(jnp.sum(block * x, axis=-1, keepdims=True) for x, _ in own)], axis=-1)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = jnp.einsum("bkqs,bksh->bkqh", weights[..., :num_keys], v[:, :, :num_keys])
    out += sum(weights[..., num_keys + n, None] * y for n, (_, y) in enumerate(own))
    return (out / weights.sum(axis=-1, keepdims=True)).reshape(B, K, G, end - start, H)
