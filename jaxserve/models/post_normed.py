"""Layers with norms behind attention and MLP, which OLMo and GLM-4 share; norms over all heads of queries and keys."""

import jax
from jaxtyping import Array, Float

from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one decoder layer: x + norm of attention, then + norm of SwiGLU. See `llama.block`.

    Attention and SwiGLU read x behind a norm of their own where they have one.
    """
    eps = arch.norm_eps
    before = {name: RmsNorm(p[name], eps) for name in ("input_norm", "mlp_norm") if name in p}
    with jax.named_scope("attention"):
        q, k, v = llama.project_qkv(p, x, tokens, layer, arch, before.get("input_norm"))
        out, tokens = tokens.attend(q, k, v, layer)
        x += rms_norm(llama.project_out(p, out, tokens, arch), p["attention_post_norm"], eps)
    with jax.named_scope("mlp"):
        out = llama.swiglu_mlp(p, x, tokens, arch, before.get("mlp_norm"))
        return x + rms_norm(out, p["mlp_post_norm"], eps), tokens
