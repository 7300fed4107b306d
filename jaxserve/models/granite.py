"""Granite 3 and 4: Llama's layers, with factors on embeddings, scores, residuals and logits.

Models are dense or have experts; some have sliding windows, or Mamba-2 in place of attention in most layers.
"""

import dataclasses
from functools import partial
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.models import llama, moe
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, POSITIVE, SIZE, HfConfig, one_of, read_field, read_fields
from jaxserve.models.layer_kinds import FULL, SLIDING, read_kinds, read_windows
from jaxserve.models.layer_tensors import MoeNames, TensorNames
from jaxserve.models.mamba import mamba, mamba_specs, read_mamba

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_SWA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}
_MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_SHARED_DEFAULTS = {
    **_MOE_DEFAULTS,
    "num_hidden_layers": 32,
    "shared_intermediate_size": 0,
    "position_embedding_type": None,
    "layer_types": None,
}
_SHARED_FIELDS = {"num_local_experts": COUNT, "shared_intermediate_size": COUNT}
_ATTENTION = ("attention", FULL)  # published name, name in transformers
_MAMBA = ("mamba", "linear_attention")  # published name, name in transformers
_MOE_NAMES = MoeNames(
    router="block_sparse_moe.router.layer",
    parts=(),
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
)
# Without experts, a layer only has the shared MLP.
_NAMES = TensorNames(
    gate_up=("shared_mlp.input_linear",) * 2, down="shared_mlp.output_linear", moe=_MOE_NAMES, mixer=mamba_specs
)


def granite_arch(config: HfConfig, **overrides: Any) -> ArchConfig:
    """Parse a Granite config.json; `overrides` as in `llama.arch`."""
    values = read_fields({**dict.fromkeys(_FACTORS, 1.0), **config}, dict.fromkeys(_FACTORS, POSITIVE))
    embed_scale, scale, residual_scale, logits_scaling = (float(values[name]) for name in _FACTORS)
    return llama.arch(
        config,
        **overrides,
        embed_scale=embed_scale,
        scale=scale,
        residual_scale=residual_scale,
        logit_scale=1.0 / logits_scaling,
    )


def granite_swa_arch(config: HfConfig) -> ArchConfig:
    """Parse a GraniteSWA config.json."""
    arch = granite_arch(config)

    def is_thetas(value: object) -> bool:
        """Return whether a value has a RoPE base, or 0 for NoPE, for each layer."""
        if not isinstance(value, list) or len(value) != arch.num_layers:
            return False
        return all(theta == 0 or POSITIVE.holds(theta) for theta in value)

    kind = FieldType(f"a list of {arch.num_layers} numbers, 0 for a layer without rotation", is_thetas)
    ropes, thetas = arch.ropes, read_field(config, "layer_rope_theta", kind.or_null())
    if thetas is not None:
        ropes = tuple(
            dataclasses.replace(rope, theta=float(theta)) if rope and theta else None
            for rope, theta in zip(ropes, thetas, strict=True)
        )
    windows = read_windows(config, lambda layer: SLIDING if layer % 4 else FULL)
    return arch.with_attention(window=windows, rope=ropes)


def moe_arch(config: HfConfig) -> ArchConfig:
    """Parse a GraniteMoe config.json: experts only, without shared experts."""
    return granite_arch(config, experts=moe.read_experts(config), mlp_bias=False)


def shared_moe_arch(config: HfConfig, **overrides: Any) -> ArchConfig:
    """Parse a GraniteMoeShared config.json: shared experts alongside experts, or an MLP if `num_local_experts` is 0."""
    values = read_fields(config, _SHARED_FIELDS)
    shared_size = values["shared_intermediate_size"]
    if not values["num_local_experts"]:
        read_field(config, "shared_intermediate_size", SIZE)
        return granite_arch({**config, "intermediate_size": shared_size}, mlp_bias=False, **overrides)
    experts = moe.read_experts(config, shared_ffn_size=shared_size)
    return granite_arch(config, experts=experts, mlp_bias=False, **overrides)


def hybrid_arch(config: HfConfig) -> ArchConfig:
    """Parse a GraniteMoeHybrid config.json: layers have attention or Mamba-2."""
    has_rope = read_field(config, "position_embedding_type", one_of(["rope", "nope"]).or_null()) == "rope"
    arch = shared_moe_arch(config, **({} if has_rope else {"rope": None}))
    kinds = read_kinds(config, lambda _: _MAMBA[0], (*_ATTENTION, *_MAMBA))
    return arch.with_states({layer: read_mamba(config) for layer, kind in enumerate(kinds) if kind in _MAMBA})


_MOE_FOLDS = FOLDS[:2]  # the norm before experts also feeds the router
FAMILIES = {
    "GraniteForCausalLM": ModelFamily(granite_arch),
    "GraniteMoeForCausalLM": ModelFamily(moe_arch, _NAMES, _MOE_DEFAULTS, folds=_MOE_FOLDS),
    "GraniteMoeSharedForCausalLM": ModelFamily(shared_moe_arch, _NAMES, _SHARED_DEFAULTS, folds=_MOE_FOLDS),
    "GraniteMoeHybridForCausalLM": ModelFamily(
        hybrid_arch,
        _NAMES,
        {**_SHARED_DEFAULTS, "shared_intermediate_size": 1024},
        partial(block, recurrent=mamba),
        folds=_MOE_FOLDS,
    ),
    "GraniteSWAForCausalLM": ModelFamily(granite_swa_arch, TensorNames(sinks="self_attn.sinks"), _SWA_DEFAULTS),
}
