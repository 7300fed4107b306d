"""The decoder on batches of equally long sequences, without a KV pool: what training and scoring run."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.decoder import Attend
from jaxserve.models.layer_facts import LayerOptions
from jaxserve.models.params import Params, matrix_transform
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.pallas_kernels.ragged_paged_attention import apply_rope, int4
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import decode, encode
from jaxserve.quant import weight_format
from jaxserve.weights import load, read_config

_QUERY_BLOCK = 128  # queries of a block skip the keys behind it: half of the causal square is never computed


def load_model(directory: Path, *, quantization: str | None = None) -> tuple[Params, ArchConfig]:
    """Parameters in float32, or quantised, and sizes of a Hugging Face directory."""
    arch = from_hf_config(read_config(directory))
    specs = param_specs(arch)
    return load(directory, specs, jnp.float32, transform=matrix_transform(specs, weight_format(quantization))), arch


def logits(params: Params, arch: ArchConfig, tokens: Array, kv_dtype: str | None = None) -> Array:
    """Next-token logits f32[B, S, V] of `tokens` i32[B, S]; every sequence starts at position 0.

    Args:
        params: parameters of the model.
        arch: its sizes.
        tokens: ids.
        kv_dtype: dtype to which keys and values are rounded as a pool would; None to leave them as they are.
    """
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    hidden, _ = decoder.forward(params, arch, tokens.reshape(-1), positions, dense_attend(S, kv_dtype), None)
    return decoder.compute_logits(params, arch, hidden).reshape(B, S, -1)


def token_nats(logits: Array, targets: Array) -> Array:
    """Cross-entropy f32[B, S] of `targets` i32[B, S]."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def as_stored(x: Array, kv_dtype: str) -> Array:
    """Keys or values as a pool of this dtype gives them back."""
    found = decode(encode(x, jnp.dtype(kv_dtype)))
    return int4.rotate(found) / int4.block_size(x.shape[-1]) if kv_dtype == "int4" else found


@cache
def dense_attend(seq_len: int, kv_dtype: str | None = None) -> Attend:
    """Causal attention inside each run of `seq_len` tokens of the token axis, on keys and values as a pool stores them.

    The carry is None, or the keys and values of earlier calls. A query then sees those of the first call up to its own
    place, and of each call after that, its own among them, those in its place alone. If calls after the first have
    fewer tokens than it, these are in every second place, or third, and so on.
    """

    def attend(
        q: Array, k: Array, v: Array, rope: Array, carry: Any, layer: Any, options: LayerOptions, sinks: Any = None
    ) -> tuple[Array, Any]:
        if options.attention.window is not None or options.attention.soft_cap is not None or sinks is not None:
            raise NotImplementedError(
                "training needs a model of full attention, without soft cap and sinks, got "
                f"{options.attention}{'' if sinks is None else ' and sinks'}"
            )
        T, K, H = k.shape
        B, G = T // seq_len, q.shape[1] // K
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if kv_dtype is not None:
            k, v = as_stored(k, kv_dtype), as_stored(v, kv_dtype)
        q = q.reshape(B, seq_len, K, G, H).transpose(0, 2, 3, 1, 4) * options.attention.scale  # [B, K, G, S, H]
        k, v = (x.reshape(B, seq_len, K, H).transpose(0, 2, 1, 3) for x in (k, v))  # [B, K, S, H]
        entries = ((k, v),) if carry is None else (*carry, (k, v))
        out = [_attend_block(q, entries, start) for start in range(0, seq_len, _QUERY_BLOCK)]
        out = jnp.concatenate(out, axis=3).transpose(0, 3, 1, 2, 4).reshape(T, K * G, H)
        return out, None if carry is None else entries

    return attend


def _attend_block(q: Array, entries: Sequence[tuple[Array, Array]], start: int) -> Array:
    """Queries from `start` on, softmax normalised after the values are summed."""
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
