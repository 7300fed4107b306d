"""Gemma 4: two KV head sizes, KV sharing between layers, per-layer embeddings, experts alongside MLPs."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import geglu
from jaxserve.layers.norm import Norm, rms_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import block as blocks
from jaxserve.models import llama, per_layer_embeddings
from jaxserve.models.arch import ArchConfig, PerLayerEmbeddings
from jaxserve.models.block import Heads, attention, mlp, moe
from jaxserve.models.family import ModelFamily
from jaxserve.models.gemma import GEMMA_NAMES
from jaxserve.models.hf_config import COUNT, POSITIVE, SIZE, SWITCH, TABLE, HfConfig, one_of, read_fields, read_rope
from jaxserve.models.layer_kinds import FULL, SLIDING, full_every, layer_windows, read_kinds
from jaxserve.models.layer_spec import LayerSpec
from jaxserve.models.layer_tensors import MoeNames, Rows
from jaxserve.models.moe import read_experts
from jaxserve.models.params import Params, ParamSpec

_SIZES = ("num_hidden_layers", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
_SWITCHES = ("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp")
_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(_SWITCHES, False),
}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_FIELDS = {
    **dict.fromkeys((*_SIZES, "vocab_size_per_layer_input"), SIZE),
    **dict.fromkeys(_SWITCHES, SWITCH),
    "num_global_key_value_heads": SIZE.or_null(),
    "per_layer_config": TABLE.or_null(),
    "hidden_activation": one_of(["gelu_pytorch_tanh"]),
    "rope_parameters": TABLE.or_null(),
    "final_logit_softcapping": POSITIVE.or_null(),
    "use_bidirectional_attention": FieldType("vision or null: attention is causal", lambda v: v in ("vision", None)),
    "hidden_size_per_layer_input": COUNT.or_null(),
    "num_kv_shared_layers": COUNT,
}


def arch(config: HfConfig) -> ArchConfig:
    """Parse a Gemma 4 text config.json, which may omit fields with default values."""
    values = read_fields(config, _FIELDS)
    num_layers = values["num_hidden_layers"]
    kinds = [*read_kinds(config, full_every(6))[:-1], FULL]  # whatever the file specifies, as in transformers
    windows = layer_windows(kinds, values["sliding_window"])
    rope, both = values["rope_parameters"] or _ROPES, dict.fromkeys(_ROPES, TABLE)
    tables = read_fields(rope if {*_ROPES} & {*rope} else dict.fromkeys(_ROPES, rope), both)
    ropes = {kind: read_rope({**config, "rope_parameters": table}) for kind, table in tables.items()}
    if set(kinds[: max(0, num_layers - values["num_kv_shared_layers"])]) != set(kinds):
        raise ConfigError(
            f"num_kv_shared_layers must leave a layer of each of layer_types before the last ones, whose keys and "
            f"values these read, got {values['num_kv_shared_layers']} of {num_layers} layers, {kinds}"
        )
    size, num_own = values["hidden_size_per_layer_input"], num_layers - values["num_kv_shared_layers"]
    sources = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    experts = None
    if values["enable_moe_block"]:
        experts = read_experts(config, size="moe_intermediate_size", per_token="top_k_experts", activation=geglu)
    heads = {SLIDING: HeadVectors(values["num_key_value_heads"], values["head_dim"])}
    heads[FULL] = _read_global_heads(values, kinds)
    arch = llama.arch(
        # The activation has another name and value here, and the rotations are read above.
        {**config, "hidden_act": "silu", "rope_parameters": None},
        windows=windows,
        mlp_bias=False,
        activation="geglu",
        qk_norm="shared",
        scale=1.0,
        logit_soft_cap=values["final_logit_softcapping"],
        per_layer_embeddings=PerLayerEmbeddings(values["vocab_size_per_layer_input"], size) if size else None,
    )
    if size and values["vocab_size_per_layer_input"] < arch.vocab_size:
        raise ConfigError(
            "vocab_size_per_layer_input must be at least vocab_size, as each token has an input of each layer, got "
            f"{values['vocab_size_per_layer_input']} and {arch.vocab_size}"
        )
    arch = arch.with_attention(
        rope=[ropes[kind] for kind in kinds],
        kv=[heads[kind] for kind in kinds],
        k_eq_v=[kind == FULL and values["attention_k_eq_v"] for kind in kinds],
        kv_source=[sources[kind] if layer >= num_own else None for layer, kind in enumerate(kinds)],
    )
    [mlp] = {layer.mlp for layer in arch.layers}
    wide = mlp and mlp._replace(ffn_size=2 * mlp.ffn_size if values["use_double_wide_mlp"] else mlp.ffn_size)
    layers = (
        dataclasses.replace(layer, mlp=mlp if index < num_own else wide, experts=experts)
        for index, layer in enumerate(arch.layers)
    )
    return dataclasses.replace(arch, layers=tuple(layers), embed_scale=math.sqrt(arch.hidden_size))


def _read_global_heads(values: Mapping[str, Any], kinds: list[str]) -> HeadVectors:
    """Read the KV heads for full attention from the global fields or, in newer files, from `per_layer_config`."""
    own = {"head_dim": values["head_dim"], "num_key_value_heads": values["num_key_value_heads"]}
    heads, tables = {**own, "head_dim": values["global_head_dim"]}, values["per_layer_config"]
    if values["attention_k_eq_v"] and values["num_global_key_value_heads"]:
        heads["num_key_value_heads"] = values["num_global_key_value_heads"]
    if tables is not None:
        named = [str(layer) for layer in range(len(kinds))]
        if unknown := sorted(map(str, tables.keys() - {*named})):
            raise ConfigError(f"per_layer_config must have numbers of layers, below {len(kinds)}, got {unknown}")
        given = read_fields({name: {} for name in named} | tables, dict.fromkeys(named, TABLE))
        heads = {**own, **given[named[-1]]}
        is_same = (
            {**own, **given[name]} == (heads if kind == FULL else own) for name, kind in zip(named, kinds, strict=True)
        )
        if heads.keys() != own.keys() or not all(is_same):
            raise ConfigError(
                f"per_layer_config must give all layers of full_attention the same {sorted(own)}, and nothing else, "
                f"got {tables}"
            )
        read_fields(heads, dict.fromkeys(own, SIZE))
    return HeadVectors(heads["num_key_value_heads"], heads["head_dim"])


def _layer_specs(rows: Rows, layer: LayerSpec, arch: ArchConfig) -> list[ParamSpec]:
    """Return ParamSpecs for a layer's tensors that only Gemma 4 has: scalar, norms, per-layer input."""
    D, ones = arch.hidden_size, "ones"
    specs = [rows.vector("scalar", None, ["layer_scalar"], [1], ones), *per_layer_embeddings.layer_specs(rows, arch)]
    if layer.experts is not None:
        E = layer.experts.num_experts
        specs += [
            rows.vector("router_norm", None, ["router.scale"], [D], ones),
            rows.vector("expert_factors", None, ["router.per_expert_scale"], [E], ones, exact=True),
            *rows.norm("dense_post_norm", "post_feedforward_layernorm_1", D),
            *rows.norm("experts_norm", "pre_feedforward_layernorm_2", D),
            *rows.norm("experts_post_norm", "post_feedforward_layernorm_2", D),
        ]
    return specs


def block(
    p: Params, x: Float[Array, "T D"], tokens: TokenContext, layer: LayerContext, *, arch: ArchConfig
) -> tuple[Float[Array, "N D"], TokenContext]:
    """Apply one decoder layer, add the per-layer input, and scale the result."""
    x, tokens = _block(p, x, tokens, layer, arch=arch)
    if layer.inputs is not None:
        with jax.named_scope("layer_input"):
            x = per_layer_embeddings.add(p, x, tokens, layer.inputs, arch.norm_eps)
    return x * p["scalar"][None].astype(x.dtype), tokens


def _feed_forward(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm,
    residual: None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply the MLP and, if the layer has experts, these alongside it."""
    eps = arch.norm_eps
    out, tokens = mlp(p, x, tokens, layer, arch, norm, residual)
    if "router" in p:
        routing = rms_norm(x, p["router_norm"], eps) * jnp.asarray(arch.hidden_size**-0.5, x.dtype)
        mixed, tokens = moe(p, x, tokens, layer, arch, Norm(p["experts_norm"], eps), None, routing)
        out = rms_norm(out, p["dense_post_norm"], eps) + rms_norm(mixed, p["experts_post_norm"], eps)
    return out, tokens


def _project(
    p: Params, x: Float[Array, "T D"], tokens: TokenContext, layer: LayerContext, arch: ArchConfig, norm: Norm
) -> Heads:
    """Return queries, keys and values, normed by head; keys and values are None if the layer reads another's."""
    H, Q = layer.attention.head_dim, layer.attention.num_heads
    heads = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias")).reshape(x.shape[0], -1, H)
    q, others = rms_norm(heads[:, :Q], p["q_norm"], arch.norm_eps), heads[:, Q:]
    if "k_norm" not in p:
        return q, None, None
    K = layer.attention.num_kv_heads
    k, v = others[:, :K], others[:, -K:]  # the same if one projection makes both
    return q, rms_norm(k, p["k_norm"], arch.norm_eps), rms_norm(v, jnp.ones(H, x.dtype), arch.norm_eps)


_block = partial(blocks.block, attention=partial(attention, project=_project), feed_forward=_feed_forward)
_NAMES = dataclasses.replace(
    GEMMA_NAMES,
    norm_init="ones",
    moe=MoeNames(router="router.proj", experts="experts", stacked=("experts.gate_up_proj", "experts.down_proj")),
    more=_layer_specs,
    tables=per_layer_embeddings.table_specs,
)
FAMILIES = {
    "Gemma4ForCausalLM": ModelFamily(arch, _NAMES, _DEFAULTS, block, folds=(), layer_inputs=per_layer_embeddings.read)
}
