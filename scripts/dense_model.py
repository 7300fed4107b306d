"""The decoder on batches of equally long sequences, without a KV pool: what training and scoring run."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.decoder import Attend
from jaxserve.models.params import Params
from jaxserve.models.registry import from_hf_config, param_specs
from weights import load, read_config

_QUERY_BLOCK = 256  # queries of a block skip the keys behind it: half of the causal square is never computed


def load_model(directory: Path) -> tuple[Params, ArchConfig]:
    """Parameters in float32 and sizes of a Hugging Face directory."""
    arch = from_hf_config(read_config(directory))
    return load(directory, param_specs(arch), jnp.float32), arch


def logits(params: Params, arch: ArchConfig, tokens: Array) -> Array:
    """Next-token logits f32[B, S, V] of `tokens` i32[B, S]; every sequence starts at position 0."""
    B, S = tokens.shape
    positions = jnp.tile(jnp.arange(S), B)
    hidden, _ = decoder.forward(params, arch, tokens.reshape(-1), positions, dense_attend(S), None)
    return decoder.compute_logits(params, hidden).reshape(B, S, -1)


def token_nats(logits: Array, targets: Array) -> Array:
    """Cross-entropy f32[B, S] of `targets` i32[B, S]."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


@cache
def dense_attend(seq_len: int) -> Attend:
    """Causal attention inside each run of `seq_len` tokens of the token axis."""

    def attend(q: Array, k: Array, v: Array, carry: Any, layer: Any, window: int | None) -> tuple[Array, Any]:
        if window is not None:
            raise NotImplementedError(f"dense_attend has no sliding window, got window={window}")
        K, H = k.shape[1:]
        q = q.reshape(-1, seq_len, K, q.shape[1] // K, H)  # [B, S, K, G, H]
        k, v = (x.reshape(-1, seq_len, K, H) for x in (k, v))
        starts = range(0, seq_len, _QUERY_BLOCK)
        out = jnp.concatenate([_attend_block(q, k, v, start) for start in starts], axis=1)
        return out.reshape(-1, K * out.shape[3], H), carry

    return attend


def _attend_block(q: Array, k: Array, v: Array, start: int) -> Array:
    end = min(start + _QUERY_BLOCK, q.shape[1])
    q, k, v = q[:, start:end], k[:, :end], v[:, :end]
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * q.shape[-1] ** -0.5
    seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v)
