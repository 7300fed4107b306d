"""gpt-oss: Llama's attention with sinks, sliding windows in every other layer, experts with biases, clamped SwiGLU."""

from typing import Any

from jaxserve.layers.mlp import ClampedSwiglu
from jaxserve.models import llama, moe
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import POSITIVE, HfConfig, read_fields
from jaxserve.models.layer_kinds import full_every, read_windows
from jaxserve.models.layer_spec import LayerSpec
from jaxserve.models.layer_tensors import Rows, TensorNames
from jaxserve.models.params import ParamSpec

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "num_experts": 128,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_FIELDS = {"swiglu_alpha": POSITIVE, "swiglu_limit": POSITIVE}


def arch(config: HfConfig) -> ArchConfig:
    """Parse a gpt-oss config.json."""
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_parameters": _ROPE}
    values = read_fields(config, _FIELDS)
    activation = ClampedSwiglu(float(values["swiglu_limit"]), float(values["swiglu_alpha"]))
    experts = moe.read_experts(config, softmax_of_chosen=True, activation=activation)
    return llama.arch(config, experts=experts, windows=read_windows(config, full_every(2)), mlp_bias=False)


def _moe_specs(rows: Rows, layer: LayerSpec, arch: ArchConfig) -> list[ParamSpec]:
    """Return ParamSpecs for a layer's router and experts; a tensor has all experts, [E, in, out] unless quantised.

    Gate and up projection rows alternate, on devices too.
    """
    experts = layer.experts
    assert experts is not None, "every model of this family has experts"
    E, D, F = experts.num_experts, arch.hidden_size, experts.ffn_size

    def matrices(name: str, axes: tuple[str, str], size: int, inner: int) -> ParamSpec:
        """Return the ParamSpec for all experts' matrices [size, inner]."""
        hf_name, count = f"mlp.experts.{name.removeprefix('experts_')}_proj", experts.num_held
        is_plain = arch.schemes is None or arch.schemes.for_tensor(f"{rows.prefix}{hf_name}") is None
        fields: dict[str, Any] = {"transposed": is_plain, "stacked": is_plain, "experts": experts}
        return rows.tensor(name, axes, [hf_name] * count, [size] * count, inner, **fields)

    def biases(name: str, axis: str, size: int) -> ParamSpec:
        """Return the ParamSpec for all experts' biases [E, size]."""
        hf_name = f"mlp.experts.{name.removeprefix('experts_')}_proj_bias"
        return rows.tensor(f"{name}_bias", (None, axis), [hf_name], [E], size, init="zeros", experts=experts)

    return [
        rows.tensor("router", (None, "embed"), ["mlp.router.weight"], [E], D, exact=True),
        rows.vector("logit_bias", None, ["mlp.router.bias"], [E], "zeros", exact=True),
        matrices("experts_gate_up", ("expert_rows", "embed"), 2 * F, D),
        biases("experts_gate_up", "expert_ffn", 2 * F),
        matrices("experts_down", ("expert", "expert_ffn"), D, F),
        biases("experts_down", "embed", D),
    ]


_NAMES = TensorNames(sinks="self_attn.sinks", moe=_moe_specs)
FAMILIES = {"GptOssForCausalLM": ModelFamily(arch, _NAMES, _DEFAULTS, folds=())}
