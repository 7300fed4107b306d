"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: Llama's attention, and mixtures of experts in place of its MLP."""

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
from jaxserve.models.hf_config import COUNT, SIZE, SWITCH, Kind, read_fields
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
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and all(COUNT.holds(layer) for layer in value)


_QWEN3_FIELDS = {
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": SWITCH,
    "use_sliding_window": SWITCH,
    "decoder_sparse_step": SIZE,
    "mlp_only_layers": Kind("a list of layers", _is_layers).or_null(),
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


def read_experts(config: Mapping[str, Any], *, size: str = "intermediate_size", **facts: Any) -> Experts:
    """Read the number of experts, which transformers writes under either of two names, and their size.

    Args:
        config: content of config.json.
        size: name of the feed-forward size of an expert.
        facts: other fields of `Experts`.
    """
    count = {"num_experts": config.get("num_local_experts", config.get("num_experts"))}
    fields = read_fields({**config, **count}, {"num_experts": SIZE, "num_experts_per_tok": SIZE, size: SIZE})
    experts = Experts(fields["num_experts"], fields["num_experts_per_tok"], fields[size], **facts)
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
    experts = read_experts(config)
    return llama.arch(config, experts=experts, windows=windows, qkv_bias=False, o_bias=False, mlp_bias=False)


def qwen3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Qwen3-MoE config.json."""
    config = {**_QWEN3_DEFAULTS, **config}
    values = read_fields(config, {"num_hidden_layers": SIZE, **_QWEN3_FIELDS})
    window, layers = None, range(values["num_hidden_layers"])
    if values["use_sliding_window"]:
        window = read_fields(config, {"sliding_window": SIZE.or_null()})["sliding_window"]
    step, only = values["decoder_sparse_step"], values["mlp_only_layers"] or []
    return llama.arch(
        config,
        experts=read_experts(config, size="moe_intermediate_size", normalized=values["norm_topk_prob"]),
        dense_layers=frozenset(layer for layer in layers if layer in only or (layer + 1) % step),
        windows=(window,) * len(layers),
        qk_norm=True,
        mlp_bias=False,
    )


def olmoe_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMoE config.json."""
    config = {**_OLMOE_DEFAULTS, **config}
    values = read_fields(config, _OLMOE_FIELDS)
    return llama.arch(config, experts=read_experts(config, normalized=values["norm_topk_prob"]), mlp_bias=False)


def param_specs(
    arch: ArchConfig,
    *,
    module: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    router_bias: bool = False,
) -> list[ParamSpec]:
    """Return Llama's rows with a router and experts in place of the MLP of layers that have them.

    Args:
        arch: sizes of the model.
        module: name of the mixture in checkpoints.
        parts: names of an expert's gate, up and down projections.
        shared: name of the experts of every token, where there are any.
        router_bias: True if terms are added to scores where experts are chosen.
    """
    sparse = [layer for layer in range(arch.num_layers) if layer not in arch.dense_layers]
    of_mlp = {("layers", layer, name) for layer in sparse for name in ("gate_up_proj", "down_proj")}
    specs = [spec for spec in llama.param_specs(arch) if spec.path not in of_mlp]
    for layer in sparse:
        specs += _mixture_specs(arch, layer, f"model.layers.{layer}.{module}", parts)
        specs += _shared_specs(arch, layer, f"model.layers.{layer}.{module}.{shared}")
        if router_bias:
            path, name = ("layers", layer, "router_bias"), f"model.layers.{layer}.{module}.gate.e_score_correction_bias"
            specs.append(ParamSpec(path, (E := _of(arch).num_experts,), (None,), (name,), (E,), "zeros", exact=True))
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


def _mixture_specs(arch: ArchConfig, layer: int, module: str, parts: tuple[str, str, str]) -> list[ParamSpec]:
    experts, D, F = _of(arch), arch.hidden_size, _of(arch).ffn_size
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
    """Apply one pre-norm decoder layer: x + attention, then + its MLP or mixture of experts. See `llama.block`."""
    with jax.named_scope("attention"):
        q, k, v = project(p, x, arch, RmsNorm(p["input_norm"], arch.norm_eps))
        out, carry = attend(q, k, v, rope, carry, layer, options)
        x = llama.project_out(p, out, x, arch)
    with jax.named_scope("mlp"):
        return feed_forward(p, x, arch), carry


def feed_forward(p: Params, x: Float[Array, "T D"], arch: ArchConfig) -> Float[Array, "T D"]:
    """Return x + the mixture of experts of its norm, or + SwiGLU in a layer without experts."""
    if "router" not in p:
        return llama.mlp(p, x, arch)
    matrices = ExpertWeights(
        p["router"],
        p["experts_gate_up"],
        p["experts_down"],
        p.get("router_bias"),
        p.get("shared_gate_up"),
        p.get("shared_down"),
        p.get("shared_gate"),
    )
    return x + mixture(rms_norm(x, p["mlp_norm"], arch.norm_eps), matrices, _of(arch), arch.tensor_axis)


_FOLDS = llama.FOLDS[:2]  # the norm before the experts feeds the router too
_olmoe_block: Block = partial(block, project=project_normed_whole)
_mixtral_specs = partial(param_specs, module="block_sparse_moe", parts=("w1", "w3", "w2"))
MIXTRAL = ModelFamily(mixtral_arch, _mixtral_specs, block, rms_norm, _FOLDS)
QWEN3_MOE = ModelFamily(qwen3_arch, param_specs, block, rms_norm, _FOLDS)
OLMOE = ModelFamily(olmoe_arch, olmoe_param_specs, _olmoe_block, rms_norm, _FOLDS)
