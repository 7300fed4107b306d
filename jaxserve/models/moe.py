"""Mixtral, Qwen3-MoE and OLMoE: Llama's attention, and a mixture of experts in place of its MLP."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts, ExpertWeights, mixture
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig, LayerOptions
from jaxserve.models.family import Block, ModelFamily
from jaxserve.models.hf_config import SIZE, SWITCH, Kind, read_fields
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.post_normed import project_normed_whole, whole_norm_specs

_MIXTRAL_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
_QWEN3_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN3_FIELDS = {
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": SWITCH,
    "use_sliding_window": SWITCH,
    "decoder_sparse_step": Kind("1: layers without experts are not supported", lambda value: value == 1),
    "mlp_only_layers": Kind("empty: layers without experts are not supported", lambda value: value in (None, [])),
}
_OLMOE_DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
    "clip_qkv": None,
}
_OLMOE_FIELDS = {
    "norm_topk_prob": SWITCH,
    "clip_qkv": Kind("null: bounds of q, k and v are not supported", lambda value: value is None),
}


def _experts(config: Mapping[str, Any], *, normalized: bool) -> Experts:
    """Read the number of experts, which transformers writes under either of two names."""
    count = {"num_experts": config.get("num_local_experts", config.get("num_experts"))}
    fields = read_fields({**config, **count}, {"num_experts": SIZE, "num_experts_per_tok": SIZE})
    experts = Experts(fields["num_experts"], fields["num_experts_per_tok"], normalized)
    if experts.per_token > experts.num_experts:
        raise ConfigError(
            f"num_experts_per_tok must be at most num_experts, got {experts.per_token} and {experts.num_experts}"
        )
    return experts


def mixtral_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Mixtral config.json."""
    config = {**_MIXTRAL_DEFAULTS, **config}
    values = read_fields(config, {"num_hidden_layers": SIZE, "sliding_window": SIZE.or_null()})
    windows = (values["sliding_window"],) * values["num_hidden_layers"]
    experts = _experts(config, normalized=True)
    return llama.arch(config, experts=experts, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


def qwen3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen3-MoE config.json."""
    config = {**_QWEN3_DEFAULTS, **config}
    values = read_fields(config, {"num_hidden_layers": SIZE, **_QWEN3_FIELDS})
    window = None
    if values["use_sliding_window"]:
        window = read_fields(config, {"sliding_window": SIZE.or_null()})["sliding_window"]
    return llama.arch(
        config,
        experts=_experts(config, normalized=values["norm_topk_prob"]),
        ffn_size=values["moe_intermediate_size"],
        windows=(window,) * values["num_hidden_layers"],
        qk_norm=True,
        mlp_bias=False,
    )


def olmoe_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMoE config.json."""
    config = {**_OLMOE_DEFAULTS, **config}
    values = read_fields(config, _OLMOE_FIELDS)
    return llama.arch(config, experts=_experts(config, normalized=values["norm_topk_prob"]), mlp_bias=False)


def param_specs(
    arch: ArchConfig, *, module: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[ParamSpec]:
    """Return Llama's rows with a router and experts in place of the MLP.

    Args:
        arch: sizes of the model.
        module: name of the mixture in checkpoints.
        parts: names of an expert's gate, up and down projections.
    """
    specs = [spec for spec in llama.param_specs(arch) if spec.path[-1] not in ("gate_up_proj", "down_proj")]
    for layer in range(arch.num_layers):
        specs += _mixture_specs(arch, layer, f"model.layers.{layer}.{module}", parts)
    return specs


def _mixture_specs(arch: ArchConfig, layer: int, module: str, parts: tuple[str, str, str]) -> list[ParamSpec]:
    experts, D, F = arch.experts, arch.hidden_size, arch.ffn_size
    assert experts is not None, "every model of these families has experts"
    E, (gate, up, down) = experts.num_experts, parts

    def matrices(name: str, axes: tuple[str, str], parts: list[str], size: int, inner: int, gated: bool) -> ParamSpec:
        names = tuple(f"{module}.experts.{expert}.{part}.weight" for expert in range(E) for part in parts)
        shape, rows = (len(names) * size, inner), (size,) * len(names)
        return ParamSpec(("layers", layer, name), shape, axes, names, rows, gated=gated, experts=experts)

    router = (f"{module}.gate.weight",)
    return [
        ParamSpec(("layers", layer, "router"), (E, D), (None, "embed"), router, (E,), exact=True),
        matrices("experts_gate_up", ("ffn", "embed"), [gate, up], F, D, gated=True),
        matrices("experts_down", ("embed", "ffn"), [down], D, F, gated=False),
    ]


def olmoe_param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return the rows of `param_specs`, and norms over all heads of queries and of keys."""
    return param_specs(arch) + whole_norm_specs(arch)


def block(
    p: Params,
    x: Float[Array, "T D"],
    rope: Float[Array, "2 T half"] | None,
    carry: Any,
    layer: Any,
    *,
    arch: ArchConfig,
    options: LayerOptions,
    attend: Any,
    project: Callable[..., Any] = llama.project_qkv,
) -> tuple[Float[Array, "T D"], Any]:
    """Apply one pre-norm decoder layer: x + attention, then + its mixture of experts. See `llama.block`."""
    assert arch.experts is not None, "every model of these families has experts"
    with jax.named_scope("attention"):
        q, k, v = project(p, x, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, carry = attend(q, k, v, rope, carry, layer, options)
        x = llama.project_out(p, out, x, arch)
    with jax.named_scope("mlp"):
        normed = rms_norm(x, p["mlp_norm"], arch.norm_eps)
        matrices = ExpertWeights(p["router"], p["experts_gate_up"], p["experts_down"])
        return x + mixture(normed, matrices, arch.experts, arch.tensor_axis), carry


_FOLDS = llama.FOLDS[:2]  # the norm before the experts feeds the router too
_olmoe_block: Block = partial(block, project=project_normed_whole)
_mixtral_specs = partial(param_specs, module="block_sparse_moe", parts=("w1", "w3", "w2"))
MIXTRAL = ModelFamily(mixtral_arch, _mixtral_specs, block, rms_norm, _FOLDS)
QWEN3_MOE = ModelFamily(qwen3_arch, param_specs, block, rms_norm, _FOLDS)
OLMOE = ModelFamily(olmoe_arch, olmoe_param_specs, _olmoe_block, rms_norm, _FOLDS)
