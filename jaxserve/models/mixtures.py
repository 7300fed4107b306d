"""Mixtures of experts in the layers of a family: sizes, tensors and computation, whatever the attention."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts, ExpertWeights, mixture
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import SIZE, read_fields
from jaxserve.models.params import Params, ParamSpec


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


def param_specs(
    arch: ArchConfig,
    *,
    module: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    shared_gate: bool = False,
    router_bias: bool = False,
) -> list[ParamSpec]:
    """Return Llama's rows with a router and experts in place of the MLP of layers that have them.

    Args:
        arch: sizes of the model.
        module: name of the mixture in checkpoints.
        parts: names of an expert's gate, up and down projections.
        shared: name of the experts of every token, where there are any.
        shared_gate: True if the weight of these experts depends on the token.
        router_bias: True if terms are added to scores where experts are chosen.
    """
    sparse = [layer for layer in range(arch.num_layers) if layer not in arch.dense_layers]
    of_mlp = {("layers", layer, name) for layer in sparse for name in ("gate_up_proj", "down_proj")}
    specs = [spec for spec in llama.param_specs(arch) if spec.path not in of_mlp]
    for layer in sparse:
        gate = f"model.layers.{layer}.{module}.gate"
        specs += mixture_specs(arch, layer, f"model.layers.{layer}.{module}", parts)
        specs += _shared_specs(arch, layer, f"model.layers.{layer}.{module}.{shared}")
        if shared_gate:
            path, names = ("layers", layer, "shared_gate"), (f"model.layers.{layer}.{module}.{shared}_gate.weight",)
            specs.append(ParamSpec(path, (1, arch.hidden_size), (None, "embed"), names, (1,), exact=True))
        if router_bias:
            path, names = ("layers", layer, "router_bias"), (f"{gate}.e_score_correction_bias",)
            num_experts = _of(arch).num_experts
            specs.append(ParamSpec(path, (num_experts,), (None,), names, (num_experts,), "zeros", exact=True))
    return specs


def _of(arch: ArchConfig) -> Experts:
    assert arch.experts is not None, "every model of these families has experts"
    return arch.experts


def _shared_specs(arch: ArchConfig, layer: int, module: str) -> list[ParamSpec]:
    D, F = arch.hidden_size, _of(arch).shared_ffn_size
    if not F:
        return []
    gate_up = tuple(f"{module}.{part}_proj.weight" for part in ("gate", "up"))
    path, down = ("layers", layer), (f"{module}.down_proj.weight",)
    return [
        ParamSpec((*path, "shared_gate_up"), (2 * F, D), ("ffn", "embed"), gate_up, (F, F), gated=True),
        ParamSpec((*path, "shared_down"), (D, F), ("embed", "ffn"), down, (D,)),
    ]


def mixture_specs(arch: ArchConfig, layer: int, module: str, parts: tuple[str, str, str]) -> list[ParamSpec]:
    """Return the rows of a layer's router and of its own experts; see `param_specs`."""
    experts = _of(arch)
    E, D, F = experts.num_experts, arch.hidden_size, experts.ffn_size
    (gate, up, down), num_held = parts, experts.num_held

    def matrices(name: str, axes: tuple[str, str], parts: list[str], size: int, inner: int, gated: bool) -> ParamSpec:
        names = tuple(f"{module}.experts.{expert}.{part}.weight" for expert in range(num_held) for part in parts)
        shape, rows = (len(names) * size, inner), (size,) * len(names)
        return ParamSpec(("layers", layer, name), shape, axes, names, rows, gated=gated, experts=experts)

    router = (f"{module}.gate.weight",)
    return [
        ParamSpec(("layers", layer, "router"), (E, D), (None, "embed"), router, (E,), exact=True),
        matrices("experts_gate_up", ("expert_rows", "embed"), [gate, up], F, D, gated=experts.activation is swiglu),
        matrices("experts_down", ("expert", "expert_ffn"), [down], D, F, gated=False),
    ]


def stacked(arch: ArchConfig, spec: ParamSpec, module: str) -> ParamSpec:
    """Return a row of experts whose matrices are those of one tensor [E, out, in], unless they are quantised."""
    name = f"{module}.{'gate_up_proj' if spec.path[2] == 'experts_gate_up' else 'down_proj'}"
    if arch.schemes is not None and arch.schemes.for_tensor(spec.hf_names[0]) is not None:
        return spec
    return dataclasses.replace(spec, hf_names=(name,) * len(spec.hf_names), stacked=True)


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    project: Callable[..., Any] = llama.project_qkv,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one pre-norm decoder layer: x + attention, then + its MLP or mixture of experts. See `llama.block`."""
    with jax.named_scope("attention"):
        q, k, v = project(p, x, tokens, arch, RmsNorm(p["input_norm"], arch.norm_eps))
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
    return mixture(x, tokens, matrices, _of(arch), arch.tensor_axis, routing, arch.token_axis)
