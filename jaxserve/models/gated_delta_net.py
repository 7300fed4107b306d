"""Gated DeltaNet sublayer (arXiv 2412.06464): tensors, and the computation around `layers/delta_net.py`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.delta_net import DeltaInputs, GatedDelta
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import Norm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_spec import LayerSpec
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec


def delta_specs(rows: Rows, layer: LayerSpec, arch: ArchConfig) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in a layer's Gated DeltaNet, without the norm before it."""
    sizes, D = layer.state, arch.hidden_size
    assert isinstance(sizes, GatedDelta), "recurrent layers are Gated DeltaNets here"
    K, V, keys, values = sizes.num_key_heads, sizes.num_value_heads, sizes.key_size, sizes.value_size

    def by_head(
        name: str, hf_names: tuple[str, ...], sizes: tuple[int, ...], heads: tuple[int, ...], *inner: int, **fields: Any
    ) -> ParamSpec:
        """Return the ParamSpec for a tensor [sum(sizes), *inner], whose parts each have rows for some heads."""
        axes = ("heads", *("embed" if size == D else None for size in inner))
        return rows.tensor(
            name, axes, [f"linear_attn.{each}" for each in hf_names], sizes, *inner, heads=heads, **fields
        )

    if sizes.is_grouped:
        projections = [
            by_head("in_proj", ("in_proj_qkvz.weight",), (2 * keys + 2 * values,), (K,), D),
            by_head("rate_proj", ("in_proj_ba.weight",), (2 * V,), (K,), D, exact=True),
        ]
    else:
        names = (*("in_proj_qkv.weight",) * 3, "in_proj_z.weight")
        rates = ("in_proj_b.weight", "in_proj_a.weight")
        projections = [
            by_head("in_proj", names, (keys, keys, values, values), (K, K, V, V), D),
            by_head("rate_proj", rates, (V, V), (V, V), D, exact=True),
        ]
    mixed, mixed_heads = (keys, keys, values), (K, K, V)
    return [
        *projections,
        by_head("taps", ("conv1d.weight",) * 3, mixed, mixed_heads, 1, sizes.width, exact=True, is_array=True),
        by_head("decay", ("A_log",), (V,), (V,), init="zeros", exact=True),
        by_head("time_bias", ("dt_bias",), (V,), (V,), init="ones", exact=True),
        rows.vector("delta_norm", None, ["linear_attn.norm.weight"], [sizes.value_dim], "ones"),
        rows.matrix("delta_out", ("embed", "heads"), ["linear_attn.out_proj"], [D], values),
    ]


def delta(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm,
    residual: Float[Array, "T D"] | None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply Gated DeltaNet to T tokens; a sublayer for `models.block`."""
    sizes, T, normed = layer.state, x.shape[0], norm(x)
    assert isinstance(sizes, GatedDelta), "recurrent layers are Gated DeltaNets here"
    K, keys, values = sizes.num_key_heads, sizes.key_size, sizes.value_size
    projected = linear(normed, p["in_proj"], tokens)
    rates = linear(normed, p["rate_proj"], tokens, dtype=jnp.float32)
    groups, parts = (K, (keys, keys, values, values)) if sizes.is_grouped else (1, (2 * keys + values, values))
    ends = [sum(parts[: n + 1]) // groups for n in range(len(parts) - 1)]
    *mixed, z = (y.reshape(T, -1) for y in jnp.split(projected.reshape(T, groups, -1), ends, axis=2))
    rate, step = (y.reshape(T, -1) for y in jnp.split(rates.reshape(T, groups, -1), 2, axis=2))
    inputs = DeltaInputs(
        mixed=jnp.concatenate(mixed, axis=1),
        taps=p["taps"],
        log_decay=-jnp.exp(p["decay"])[None, :] * jax.nn.softplus(step + p["time_bias"][None, :]),
        rate=jax.nn.sigmoid(rate),
    )
    out, tokens = tokens.advance(inputs, layer)
    out = rms_norm(out, p["delta_norm"].astype(jnp.float32), arch.norm_eps).reshape(T, -1)
    out = (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    return linear(out, p["delta_out"], tokens, residual=residual, axis=arch.tensor_axis), tokens
