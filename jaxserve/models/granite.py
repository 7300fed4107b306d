"""Granite 3 and 4: Llama's layers, with factors on embeddings, scores, residuals and logits.

Models are dense or have experts; some have sliding windows, or Mamba-2 in place of attention in most layers.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama, moe
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import COUNT, POSITIVE, SIZE, one_of, read_fields
from jaxserve.models.layer_kinds import FULL, SLIDING, read_kinds, read_windows
from jaxserve.models.layer_tensors import MoeNames, Names, decoder_specs
from jaxserve.models.mamba import mamba, mamba_specs, read_mamba

_FACTORS = {
    "embedding_multiplier": POSITIVE,
    "attention_multiplier": POSITIVE,
    "residual_multiplier": POSITIVE,
    "logits_scaling": POSITIVE,
}
_SWA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}


def _is_thetas(value: object) -> bool:
    return isinstance(value, list) and all(theta == 0 or POSITIVE.holds(theta) for theta in value)


_SWA_FIELDS = {
    "num_hidden_layers": SIZE,
    "layer_rope_theta": FieldType("a list of numbers, 0 for a layer without rotation", _is_thetas).or_null(),
}

_SHARED_DEFAULTS = {
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
    "position_embedding_type": None,
    "layer_types": None,
}
_SHARED_FIELDS = {"num_hidden_layers": SIZE, "num_local_experts": COUNT, "shared_intermediate_size": COUNT}
_HYBRID_FIELDS = {"position_embedding_type": one_of(["rope", "nope"]).or_null()}
_ATTENTION = ("attention", FULL)  # published name, name in transformers
_MAMBA = ("mamba", "linear_attention")  # published name, name in transformers
_MOE_NAMES = MoeNames(
    router="block_sparse_moe.router.layer",
    parts=(),
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
)
# Without experts, a layer only has the shared MLP.
_MLP_NAMES = Names(gate_up=("shared_mlp.input_linear",) * 2, down="shared_mlp.output_linear")


def granite_arch(config: Mapping[str, Any], **overrides: Any) -> ArchConfig:
    """Parse a Granite config.json; `overrides` as in `llama.arch`."""
    values = read_fields({**dict.fromkeys(_FACTORS, 1.0), **config}, _FACTORS)
    return llama.arch(
        config,
        **overrides,
        embed_scale=float(values["embedding_multiplier"]),
        scale=float(values["attention_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=1.0 / float(values["logits_scaling"]),
    )


def granite_swa_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a GraniteSWA config.json."""
    config = {**_SWA_DEFAULTS, **config}
    arch, values = granite_arch(config), read_fields(config, _SWA_FIELDS)
    ropes, thetas = arch.ropes, values["layer_rope_theta"]
    if thetas is not None:
        read_fields(
            {"layer_rope_theta": thetas},
            {
                "layer_rope_theta": FieldType(
                    f"a list of {arch.num_layers}", lambda value: len(value) == arch.num_layers
                )
            },
        )
        ropes = tuple(
            dataclasses.replace(rope, theta=float(theta)) if rope and theta else None
            for rope, theta in zip(ropes, thetas, strict=True)
        )
    windows = read_windows(config, arch.num_layers, lambda layer: SLIDING if layer % 4 else FULL)
    return arch.with_attention(window=windows, rope=ropes)


def moe_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a GraniteMoe config.json: experts only, without shared experts."""
    return granite_arch(config, experts=moe.read_experts({**_SHARED_DEFAULTS, **config}), mlp_bias=False)


def shared_moe_arch(config: Mapping[str, Any], **overrides: Any) -> ArchConfig:
    """Parse a GraniteMoeShared config.json: shared experts alongside experts, or an MLP if `num_local_experts` is 0."""
    config = {**_SHARED_DEFAULTS, **config}
    values = read_fields(config, _SHARED_FIELDS)
    shared_size = values["shared_intermediate_size"]
    if not values["num_local_experts"]:
        read_fields(config, {"shared_intermediate_size": SIZE})
        return granite_arch({**config, "intermediate_size": shared_size}, mlp_bias=False, **overrides)
    experts = moe.read_experts(config, shared_ffn_size=shared_size)
    return granite_arch(config, experts=experts, mlp_bias=False, **overrides)


def hybrid_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a GraniteMoeHybrid config.json: layers have attention or Mamba-2."""
    config = {**_SHARED_DEFAULTS, "shared_intermediate_size": 1024, **config}
    has_rope = read_fields(config, _HYBRID_FIELDS)["position_embedding_type"] == "rope"
    arch = shared_moe_arch(config, **({} if has_rope else {"rope": None}))
    kinds = read_kinds(config, arch.num_layers, lambda _: _MAMBA[0], (*_ATTENTION, *_MAMBA))
    return arch.with_states({layer: read_mamba(config) for layer, kind in enumerate(kinds) if kind in _MAMBA})


_swa_specs = partial(decoder_specs, names=Names(sinks="self_attn.sinks"))
_moe_specs = partial(decoder_specs, names=_MLP_NAMES, moe=_MOE_NAMES, mixer_specs=mamba_specs)
GRANITE = ModelFamily(granite_arch, decoder_specs, block, rms_norm, FOLDS)
_FOLDS = FOLDS[:2]  # the norm before experts also feeds the router
GRANITE_MOE = ModelFamily(moe_arch, _moe_specs, block, rms_norm, _FOLDS)
GRANITE_MOE_SHARED = ModelFamily(shared_moe_arch, _moe_specs, block, rms_norm, _FOLDS)
GRANITE_MOE_HYBRID = ModelFamily(hybrid_arch, _moe_specs, partial(block, recurrent=mamba), rms_norm, _FOLDS)
GRANITE_SWA = ModelFamily(granite_swa_arch, _swa_specs, block, rms_norm, FOLDS)
