"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of a block: its tensors, and its computation.

Attention gets the matrices that expand latents to keys and values. It multiplies them with queries and outputs instead,
so that all heads attend over the latents themselves, unless so many tokens are new that expanding is cheaper.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.kv_forms import Latents
from jaxserve.layers.linear import as_matrix, linear
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_spec import MlaSizes
from jaxserve.models.params import Params, ParamSpec
from jaxserve.pallas_kernels.ragged_paged_attention import HeadMatrices

_INNER_EPS = 1e-6  # epsilon of the norms between two matrices, whatever that of the model


def attention_specs(arch: ArchConfig, layer: int) -> list[ParamSpec]:
    """Return one row per tensor of a layer's attention, without its norm; `q_proj` may have `q_a_proj` before it."""
    latent, D, Q, rope_dim = arch.latent, arch.hidden_size, arch.num_heads, arch.head_dim
    assert latent is not None, "every model of these families has latents"
    rank, q_rank = _rank(arch), latent.q_rank
    q_rows, kv_rows = Q * (latent.nope_dim + rope_dim), Q * (latent.nope_dim + latent.value_dim)

    def spec(name: str, hf_name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **facts: Any) -> ParamSpec:
        kind = "bias" if name.endswith("bias") else "weight"
        names = (f"model.layers.{layer}.self_attn.{hf_name}.{kind}",)
        return ParamSpec(("layers", layer, name), shape, axes, names, shape[:1], **facts)

    down, of_heads = (None, "embed"), ("heads", "embed")
    specs = [
        spec("kv_a_proj", "kv_a_proj_with_mqa", (rank + rope_dim, D), down),
        spec("kv_a_norm", "kv_a_layernorm", (rank,), (None,), init="ones"),
        spec("kv_b_proj", "kv_b_proj", (kv_rows, rank), of_heads, heads=(Q,), exact=True, is_array=True),
        spec("o_proj", "o_proj", (D, Q * latent.value_dim), ("embed", "heads")),
    ]
    if q_rank is None:
        specs.append(spec("q_proj", "q_proj", (q_rows, D), of_heads, heads=(Q,)))
    else:
        specs.append(spec("q_a_proj", "q_a_proj", (q_rank, D), down))
        specs.append(spec("q_a_norm", "q_a_layernorm", (q_rank,), (None,), init="ones"))
        specs.append(spec("q_proj", "q_b_proj", (q_rows, q_rank), of_heads, heads=(Q,)))
    if arch.qkv_bias:
        biases = {"kv_a_bias": ("kv_a_proj_with_mqa", rank + rope_dim), "o_bias": ("o_proj", D)}
        biases |= {"q_a_bias": ("q_a_proj", q_rank)} if q_rank is not None else {}
        specs += [spec(name, hf_name, (size,), (None,), init="zeros") for name, (hf_name, size) in biases.items()]
    return specs


def attention(
    p: Params, x: Float[Array, "T D"], tokens: TokenContext, layer: LayerContext, *, arch: ArchConfig
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return x + attention over the latents of its norm. See `llama.block`."""
    latent, Q = arch.latent, arch.num_heads
    assert latent is not None, "every model of these families has latents"
    rank = _rank(arch)
    by_head = as_matrix(p["kv_b_proj"]).dense().reshape(Q, -1, rank)
    to_keys, to_values = jnp.split(by_head, [latent.nope_dim], axis=1)
    normed = rms_norm(x, p["input_norm"], arch.norm_eps)
    own, shared = jnp.split(_queries(p, normed, tokens, arch), [latent.nope_dim], axis=-1)
    q = jnp.concatenate([own, _halves(shared, latent)], axis=-1)
    value, key = jnp.split(linear(normed, p["kv_a_proj"], tokens, bias=p.get("kv_a_bias")), [rank], axis=-1)
    value = rms_norm(value, p["kv_a_norm"], _INNER_EPS)
    latents = jnp.concatenate([value, _halves(key, latent)], axis=-1)[:, None]
    out, tokens = tokens.attend(q, latents, HeadMatrices(to_keys, to_values), layer)
    return llama.project_out(p, out, tokens, arch, x), tokens


def _rank(arch: ArchConfig) -> int:
    kv = arch.attention.kv
    assert isinstance(kv, Latents), "every model of these families has MLA"
    return kv.rank


def _queries(p: Params, normed: Float[Array, "T D"], tokens: TokenContext, arch: ArchConfig) -> Float[Array, "T Q H"]:
    if "q_a_proj" not in p:
        q = linear(normed, p["q_proj"], tokens)
    else:
        small = linear(normed, p["q_a_proj"], tokens, bias=p.get("q_a_bias"))
        q = linear(small, p["q_proj"], tokens, norm=RmsNorm(p["q_a_norm"], _INNER_EPS))
    return q.reshape(q.shape[0], arch.num_heads, -1)


def _halves(x: Float[Array, "*B d"], latent: MlaSizes) -> Float[Array, "*B d"]:
    """Return elements that are rotated together half the size apart, as `attend` rotates them."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) if latent.interleaved else x
