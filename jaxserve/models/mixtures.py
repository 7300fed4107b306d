"""Mixtures of experts in the layers of a family: sizes, tensors and computation, whatever the attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts, ExpertWeights, mixture
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import SIZE, read_fields
from jaxserve.models.params import Params


def read_experts(
    config: Mapping[str, Any],
    *,
    size: str = "intermediate_size",
    per_token: str = "num_experts_per_tok",
    **facts: Any,
) -> Experts:
    """Read the number of experts, which transformers writes under either of two names, and their size.

    Args:
        config: content of config.json.
        size: name of the feed-forward size of an expert.
        per_token: name of the number of experts of a token.
        facts: other fields of `Experts`.
    """
    count = config.get("num_local_experts")
    count = config.get("num_experts") if count is None else count
    fields = read_fields({**config, "num_experts": count}, {"num_experts": SIZE, per_token: SIZE, size: SIZE})
    experts = Experts(fields["num_experts"], fields[per_token], fields[size], **facts)
    if experts.per_token > experts.num_experts:
        raise ConfigError(f"{per_token} must be at most num_experts, got {experts.per_token} and {experts.num_experts}")
    return experts


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one pre-norm decoder layer: x + attention, then + its MLP or mixture of experts. See `llama.block`."""
    with jax.named_scope("attention"):
        q, k, v = llama.project_qkv(p, x, tokens, layer, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, tokens = tokens.attend(q, k, v, layer, p.get("sinks"))
        x = llama.project_out(p, out, tokens, arch, x)
    with jax.named_scope("mlp"):
        return feed_forward(p, x, tokens, arch)


def feed_forward(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    arch: ArchConfig,
    norm: Callable[..., Array] = rms_norm,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return x + the MoE layer of its norm, or + SwiGLU of its `rms_norm` if the layer has no experts."""
    if "router" not in p:
        return llama.mlp(p, x, tokens, arch), tokens
    y, tokens = mix(p, norm(x, p["mlp_norm"], arch.norm_eps), tokens, arch)
    return x + y, tokens


def mix(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    arch: ArchConfig,
    routing: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Return the outputs of the MoE layer for normed x; the router reads `routing` if it is given."""
    matrices = ExpertWeights(
        p["router"],
        p["experts_gate_up"],
        p["experts_down"],
        p.get("router_bias"),
        p.get("shared_gate_up"),
        p.get("shared_down"),
        p.get("shared_gate"),
        p.get("logit_bias"),
        p.get("experts_gate_up_bias"),
        p.get("experts_down_bias"),
        p.get("expert_factors"),
    )
    assert arch.experts is not None, "a layer with a router has experts"
    return mixture(x, tokens, matrices, arch.experts, arch.tensor_axis, routing, arch.token_axis)
