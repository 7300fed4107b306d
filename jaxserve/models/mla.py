"""MLA sublayer (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434): tensors and computation.

Attention gets the matrices that expand latents to keys and values. It absorbs them into queries and outputs, so that
all heads attend to the latents directly; it expands the latents if a step has so many new tokens that this is cheaper.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.adapters import AdaptedMatrix
from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.linear import Weight, as_matrix, linear
from jaxserve.layers.norm import Norm, layer_norm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import project_out
from jaxserve.models.layer_spec import LayerSpec
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec
from jaxserve.pallas_kernels.ragged_paged_attention import HeadMatrices, IndexInputs

_INNER_EPS = 1e-6  # for norms between two matrices, whatever the model's epsilon


def attention_specs(rows: Rows, layer: LayerSpec, arch: ArchConfig) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in MLA, without the norm before it; some models have `q_a_proj` too."""
    attention, D, down = layer.attention, arch.hidden_size, (None, "embed")
    mla, rank, rope_dim = attention.mla_sizes
    Q, q_rank = attention.num_heads, mla.q_rank
    q_rows, kv_rows = Q * (mla.nope_dim + rope_dim), Q * (mla.nope_dim + mla.value_dim)

    def matrix(
        name: str, hf_name: str, axes: tuple[str | None, str], size: int, inner: int, **fields: Any
    ) -> ParamSpec:
        """Return the ParamSpec for a matrix [size, inner] in the attention module."""
        return rows.matrix(name, axes, [f"self_attn.{hf_name}"], [size], inner, **fields)

    heads: dict[str, Any] = {"axes": ("heads", "embed"), "heads": (Q,)}
    specs = [
        matrix("kv_a_proj", "kv_a_proj_with_mqa", down, rank + rope_dim, D),
        *rows.norm("kv_a_norm", "self_attn.kv_a_layernorm", rank),
        matrix("kv_b_proj", "kv_b_proj", size=kv_rows, inner=rank, exact=True, is_array=True, **heads),
        matrix("o_proj", "o_proj", ("embed", "heads"), D, Q * mla.value_dim),
    ]
    biases = {"kv_a_bias": ("kv_a_proj_with_mqa", rank + rope_dim), "o_bias": ("o_proj", D)}
    if q_rank is None:
        specs.append(matrix("q_proj", "q_proj", size=q_rows, inner=D, **heads))
    else:
        specs.append(matrix("q_a_proj", "q_a_proj", down, q_rank, D))
        specs += rows.norm("q_a_norm", "self_attn.q_a_layernorm", q_rank)
        specs.append(matrix("q_proj", "q_b_proj", size=q_rows, inner=q_rank, **heads))
        biases["q_a_bias"] = ("q_a_proj", q_rank)
    if attention.qkv_bias:
        specs += [
            rows.vector(name, None, [f"self_attn.{hf_name}.bias"], [size], "zeros")
            for name, (hf_name, size) in biases.items()
        ]
    if isinstance(kv := attention.kv, IndexedLatents) and not attention.shares_choice:
        assert q_rank is not None, "an indexer's queries are projected from low-rank ones"
        index_rows = kv.num_index_heads * kv.index_dim
        specs += [
            matrix("index_q_proj", "indexer.wq_b", down, index_rows, q_rank),
            matrix("index_k_proj", "indexer.wk", down, kv.index_dim, D),
            *rows.norm("index_k_norm", "self_attn.indexer.k_norm", kv.index_dim, ("weight", "bias")),
            matrix("index_weights", "indexer.weights_proj", down, kv.num_index_heads, D, exact=True),
        ]
    return specs


def attention(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm,
    residual: Float[Array, "N D"] | None,
) -> tuple[Float[Array, "N D"], TokenContext]:
    """Apply MLA to T tokens; a sublayer for `models.block`."""
    (latent, rank, _), Q = layer.attention.mla_sizes, layer.attention.num_heads
    matrices = _head_matrices(p["kv_b_proj"], tokens, layer)
    normed = norm(x)
    low_rank = None
    if "q_a_proj" in p:
        low_rank = linear(normed, p["q_a_proj"], tokens, bias=p.get("q_a_bias"))
    queries = _project_queries(p, "q_proj", normed, low_rank, tokens, Q)
    own, shared = jnp.split(queries, [latent.nope_dim], axis=-1)
    q = jnp.concatenate([own, _halves(shared, is_interleaved=latent.interleaved)], axis=-1)
    value, key = jnp.split(linear(normed, p["kv_a_proj"], tokens, bias=p.get("kv_a_bias")), [rank], axis=-1)
    value = rms_norm(value, p["kv_a_norm"], _INNER_EPS)
    latents = jnp.concatenate([value, _halves(key, is_interleaved=latent.interleaved)], axis=-1)[:, None]
    index = None
    if isinstance(kv := layer.attention.kv, IndexedLatents) and not layer.attention.shares_choice:
        index = _index(p, normed, low_rank, tokens, kv, is_interleaved=latent.index_interleaved)
    out, tokens = tokens.attend(q, latents, matrices, layer, index=index)
    return project_out(p, out, tokens, arch, residual), tokens


def _head_matrices(kv_b: Weight, tokens: TokenContext, layer: LayerContext) -> HeadMatrices:
    """Return the matrices that expand latents, with the terms of the queries' adapters."""
    (latent, rank, _), Q = layer.attention.mla_sizes, layer.attention.num_heads
    matrix, terms = kv_b, None
    if isinstance(kv_b, AdaptedMatrix):
        adapters = (tokens.for_last() if layer.last_only else tokens).adapters
        assert adapters is not None, "tokens have adapters if matrices do"
        matrix, terms = kv_b.matrix, kv_b.factors.by_head(adapters, Q)
    by_head = as_matrix(matrix).dense().reshape(Q, -1, rank)
    to_keys, to_values = jnp.split(by_head, [latent.nope_dim], axis=1)
    return HeadMatrices(to_keys, to_values, terms)


def _project_queries(
    p: Params,
    name: str,
    normed: Float[Array, "T D"],
    low_rank: Float[Array, "T rank"] | None,
    tokens: TokenContext,
    num_heads: int,
) -> Float[Array, "T Q H"]:
    """Return all heads' queries, projected by the matrix `name`.

    Args:
        p: the layer's parameters.
        name: the matrix's key in `p`.
        normed: inputs after the layer's norm.
        low_rank: low-rank queries before their norm, which the matrix reads; None if it reads the inputs.
        tokens: the step's tokens.
        num_heads: number of heads.
    """
    if low_rank is None:
        q = linear(normed, p[name], tokens)
    else:
        q = linear(low_rank, p[name], tokens, norm=Norm(p["q_a_norm"], _INNER_EPS))
    return q.reshape(q.shape[0], num_heads, -1)


def _index(
    p: Params,
    normed: Float[Array, "T D"],
    low_rank: Float[Array, "T rank"] | None,
    tokens: TokenContext,
    kv: IndexedLatents,
    *,
    is_interleaved: bool,
) -> IndexInputs:
    """Return the indexer's queries, weights and keys.

    In checkpoints the rotated elements come first; `attend` rotates the last ones. Scores have no constant factors.

    Args:
        p: the layer's parameters.
        normed: inputs after the layer's norm.
        low_rank: low-rank queries before their norm.
        tokens: the step's tokens.
        kv: sizes.
        is_interleaved: True if elements 2i and 2i + 1 are rotated together.
    """

    def rotated_last(x: Float[Array, "*B size"]) -> Float[Array, "*B size"]:
        rotated, kept = jnp.split(x, [kv.rope_dim], axis=-1)
        return jnp.concatenate([kept, _halves(rotated, is_interleaved=is_interleaved)], axis=-1)

    q = _project_queries(p, "index_q_proj", normed, low_rank, tokens, kv.num_index_heads)
    k = layer_norm(linear(normed, p["index_k_proj"], tokens), p["index_k_norm"], _INNER_EPS)
    weights = linear(normed, p["index_weights"], tokens, dtype=jnp.float32)
    return IndexInputs(rotated_last(q), weights, rotated_last(k))


def _halves(x: Float[Array, "*B d"], *, is_interleaved: bool) -> Float[Array, "*B d"]:
    """Reorder interleaved pairs to halves: `attend` rotates element i with i + d / 2."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) if is_interleaved else x
