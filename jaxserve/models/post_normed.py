"""Layers with norms behind attention and MLP, which OLMo and GLM-4 share; norms over all heads of queries and keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec


def post_norm_specs(arch: ArchConfig, attention: str, mlp: str, *, init: str = "ones") -> list[ParamSpec]:
    """Return the rows of the norms behind attention and MLP.

    Args:
        arch: sizes of the model.
        attention: name of the norm behind attention in a layer of a checkpoint.
        mlp: name of the norm behind the MLP.
        init: initial weights.
    """
    D, norms = arch.hidden_size, {"attention_post_norm": attention, "mlp_post_norm": mlp}
    return [
        ParamSpec(("layers", layer, name), (D,), (None,), (f"model.layers.{layer}.{hf_name}.weight",), (D,), init)
        for layer in range(arch.num_layers)
        for name, hf_name in norms.items()
    ]


def whole_norm_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return the rows of norms over all heads of queries and of keys."""
    H = arch.head_dim
    return [
        ParamSpec(
            ("layers", layer, f"{x}_norm"),
            (num_heads * H,),
            ("heads",),
            (f"model.layers.{layer}.self_attn.{x}_norm.weight",),
            (num_heads * H,),
            "ones",
            heads=(num_heads,),
        )
        for layer in range(arch.num_layers)
        for x, num_heads in (("q", arch.num_heads), ("k", arch.num_kv_heads))
    ]


def project_normed_whole(
    p: Params, x: Float[Array, "T inner"], tokens: TokenContext, arch: ArchConfig, norm: RmsNorm | None
) -> tuple[Float[Array, "T Q H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Return what `llama.project_qkv` returns, with queries and keys normed over all their heads at once."""

    def normed(x: Float[Array, "T heads H"], weight: Float[Array, " inner"]) -> Float[Array, "T heads H"]:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(x32), axis=(1, 2), keepdims=True)
        # Every head is on equally many devices, so that the mean over devices is that over heads.
        mean = mean if arch.tensor_axis is None else lax.pmean(mean, arch.tensor_axis)
        return (x32 * lax.rsqrt(mean + arch.norm_eps)).astype(x.dtype) * weight.reshape(1, *x.shape[1:])

    q, k, v = llama.project_qkv(p, x, tokens, arch, norm)
    return normed(q, p["q_norm"]), normed(k, p["k_norm"]), v


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    project: Callable[..., Any] = llama.project_qkv,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one decoder layer: x + norm of attention, then + norm of SwiGLU. See `llama.block`.

    Attention and SwiGLU read x behind a norm of their own where they have one.
    """
    eps = arch.norm_eps
    before = {name: RmsNorm(p[name], eps) for name in ("input_norm", "mlp_norm") if name in p}
    with jax.named_scope("attention"):
        q, k, v = project(p, x, tokens, arch, before.get("input_norm"))
        out, tokens = tokens.attend(q, k, v, layer)
        x += rms_norm(llama.project_out(p, out, tokens, arch), p["attention_post_norm"], eps)
    with jax.named_scope("mlp"):
        out = llama.swiglu_mlp(p, x, tokens, arch, before.get("mlp_norm"))
        return x + rms_norm(out, p["mlp_post_norm"], eps), tokens
