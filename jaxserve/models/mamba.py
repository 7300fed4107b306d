"""Mamba-2 sublayer (arXiv 2405.21060): tensors, and the computation around `layers/mamba.py`."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.mamba import Mamba, MambaInputs
from jaxserve.layers.norm import Norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import SIZE, SWITCH, read_fields
from jaxserve.models.layer_spec import LayerSpec
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec

_INFINITY = {"__float__": "Infinity"}  # infinity as transformers writes it


def _is_limit(value: object) -> bool:
    """Return whether a value has a minimum and a maximum time step, in which infinity may be an object."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    low, high = map(_number, value)
    return all(isinstance(x, int | float) for x in (low, high)) and 0 <= low <= high


def _number(value: Any) -> Any:
    """Convert infinity as transformers writes it to a float; return any other value unchanged."""
    return math.inf if value == _INFINITY else value


_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, _INFINITY],
}
_SIZES = (
    *("hidden_size", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    "mamba_chunk_size",  # has no influence on results
)
_FIELDS = {
    **dict.fromkeys(_SIZES, SIZE),
    "mamba_d_head": FieldType("a positive integer or 'auto'", lambda value: value == "auto" or SIZE.holds(value)),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), SWITCH),
    "time_step_limit": FieldType("two numbers, 0 <= least <= greatest", _is_limit),
}


def read_mamba(config: Mapping[str, Any]) -> Mamba:
    """Read Mamba-2 sizes from a config.json."""
    values = read_fields({**_DEFAULTS, **config}, _FIELDS)
    inner, heads = values["mamba_expand"] * values["hidden_size"], values["mamba_n_heads"]
    head_dim = inner // heads if values["mamba_d_head"] == "auto" else values["mamba_d_head"]
    if heads * head_dim != inner:
        raise ConfigError(
            f"mamba_n_heads x mamba_d_head must be mamba_expand x hidden_size, "
            f"got {heads} x {values['mamba_d_head']} and {values['mamba_expand']} x {values['hidden_size']}"
        )
    if heads % values["mamba_n_groups"]:
        raise ConfigError(
            f"mamba_n_heads must be a multiple of mamba_n_groups, got {heads} and {values['mamba_n_groups']}"
        )
    least, greatest = map(_number, values["time_step_limit"])
    return Mamba(
        num_groups=values["mamba_n_groups"],
        num_heads=heads,
        state_dim=values["mamba_d_state"],
        head_dim=head_dim,
        width=values["mamba_d_conv"],
        time_step_limit=(float(least), float(greatest)),
        conv_bias=values["mamba_conv_bias"],
        proj_bias=values["mamba_proj_bias"],
    )


def mamba_specs(rows: Rows, layer: LayerSpec, arch: ArchConfig) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in a layer's Mamba-2, without the norm before it."""
    sizes, D = layer.state, arch.hidden_size
    assert isinstance(sizes, Mamba), "recurrent layers are Mamba-2 here"
    H, G, inner, shared = sizes.num_heads, sizes.num_groups, sizes.inner_size, sizes.group_size

    def by_head(
        name: str, hf_name: str, sizes: tuple[int, ...], heads: tuple[int, ...], *inner: int, **fields: Any
    ) -> ParamSpec:
        """Return the ParamSpec for a tensor [sum(sizes), *inner], whose parts each have rows for some heads."""
        axes = ("heads", *("embed" if size == D else None for size in inner))
        return rows.tensor(name, axes, [f"mamba.{hf_name}"] * len(sizes), sizes, *inner, heads=heads, **fields)

    mixed, mixed_heads = (inner, shared, shared), (H, G, G)
    projected, projected_heads = (inner, *mixed, H), (H, *mixed_heads, H)
    specs = [
        by_head("in_proj", "in_proj.weight", projected, projected_heads, D),
        by_head("taps", "conv1d.weight", mixed, mixed_heads, 1, sizes.width, exact=True, is_array=True),
        by_head("decay", "A_log", (H,), (H,), init="zeros", exact=True),
        by_head("time_bias", "dt_bias", (H,), (H,), init="ones", exact=True),
        by_head("skip", "D", (H,), (H,), init="ones", exact=True),
        by_head("mamba_norm", "norm.weight", (inner,), (H,), init="ones"),
        rows.matrix("mamba_out", ("embed", "heads"), ["mamba.out_proj"], [D], inner),
    ]
    if sizes.conv_bias:
        specs.append(by_head("conv_bias", "conv1d.bias", mixed, mixed_heads, init="zeros"))
    if sizes.proj_bias:
        specs.append(by_head("in_bias", "in_proj.bias", projected, projected_heads, init="zeros"))
        specs.append(rows.vector("mamba_out_bias", "embed", ["mamba.out_proj.bias"], [D], "zeros"))
    return specs


def mamba(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm,
    residual: Float[Array, "T D"] | None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply Mamba-2 to T tokens; a sublayer for `models.block`."""
    sizes = layer.state
    assert isinstance(sizes, Mamba), "recurrent layers are Mamba-2 here"
    projected = linear(norm(x), p["in_proj"], tokens, bias=p.get("in_bias"))
    z, mixed, step = jnp.split(projected, [sizes.inner_size, projected.shape[1] - sizes.num_heads], axis=1)
    step = jax.nn.softplus(step.astype(jnp.float32) + p["time_bias"][None, :])
    step = jnp.clip(step, *sizes.time_step_limit)
    decay = -jnp.exp(p["decay"])[None, :] * step
    inputs = MambaInputs(mixed, p["taps"], p.get("conv_bias"), step, decay, p["skip"])
    out, tokens = tokens.advance(inputs, layer)
    gated = out.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
    out = (_group_norm(gated, sizes, arch) * p["mamba_norm"].astype(jnp.float32)[None, :]).astype(x.dtype)
    bias = p.get("mamba_out_bias")
    return linear(out, p["mamba_out"], tokens, bias=bias, residual=residual, axis=arch.tensor_axis), tokens


def _group_norm(x: Float32[Array, "T inner"], sizes: Mamba, arch: ArchConfig) -> Float32[Array, "T inner"]:
    """Divide each head group by its root mean square, over all its heads, including the heads on other devices."""
    T, G, shards = len(x), sizes.num_groups, sizes.num_group_shards
    groups = x.reshape(T, G, -1)
    squares = jnp.sum(jnp.square(groups), axis=2)
    if shards > 1:
        assert arch.tensor_axis is not None, "devices that divide groups have a mesh"
        everywhere = lax.all_gather(squares, arch.tensor_axis, axis=1, tiled=True)
        whole = jnp.repeat(jnp.sum(everywhere.reshape(T, -1, shards), axis=2), shards, axis=1)
        squares = lax.dynamic_slice_in_dim(whole, lax.axis_index(arch.tensor_axis) * G, G, axis=1)
    mean = squares / (groups.shape[2] * shards)
    return (groups * lax.rsqrt(mean + arch.norm_eps)[:, :, None]).reshape(x.shape)
