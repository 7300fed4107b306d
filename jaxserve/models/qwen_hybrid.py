"""Qwen3-Next and Qwen3.5: Gated DeltaNets, with gated attention in every fourth layer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.delta_net import GatedDelta
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import Norm, offset_norm
from jaxserve.layers.rope import pair_halves
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import gated_delta_net, llama, moe
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block, project_out
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import SIZE, HfConfig, read_fields
from jaxserve.models.layer_kinds import FULL, read_kinds
from jaxserve.models.layer_tensors import GATED_SHARED, TensorNames
from jaxserve.models.params import Params

_LINEAR = "linear_attention"
_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "attn_output_gate": True,
}
_SIZES = (
    *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
_FIELDS = {
    **dict.fromkeys(_SIZES, SIZE),
    "attn_output_gate": FieldType("true: attention without a gate is not supported", lambda value: value is True),
}
_DENSE_DEFAULTS = {**_DEFAULTS, "num_key_value_heads": 4}
_NEXT_DEFAULTS = {
    **_DEFAULTS,
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_MOE_DEFAULTS = {**_NEXT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8}


def next_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen3-Next config.json."""
    experts = moe.read_qwen_experts(config, has_shared=True)
    return _arch(config, is_grouped=True, dense_layers=moe.dense_layers(config), experts=experts)


def dense_arch(config: HfConfig) -> ArchConfig:
    """Parse a dense Qwen3.5 text config.json."""
    return _arch(config)


def moe_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen3.5-MoE text config.json: all layers have experts, whose weights sum to one."""
    config = {**config, "norm_topk_prob": True, "intermediate_size": config["moe_intermediate_size"]}
    return _arch(config, experts=moe.read_qwen_experts(config, has_shared=True))


def _arch(config: HfConfig, *, is_grouped: bool = False, **overrides: Any) -> ArchConfig:
    """Parse the fields that all of these models have.

    Args:
        config: content of config.json.
        is_grouped: see `GatedDelta`.
        overrides: as in `llama.arch`.
    """
    values = read_fields(config, _FIELDS)
    interval = values["full_attention_interval"]
    kinds = read_kinds(config, lambda layer: _LINEAR if (layer + 1) % interval else FULL, (FULL, _LINEAR))
    sizes = GatedDelta(
        num_key_heads=values["linear_num_key_heads"],
        num_value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        width=values["linear_conv_kernel_dim"],
        is_grouped=is_grouped,
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise ConfigError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, "
            f"got {sizes.num_value_heads} and {sizes.num_key_heads}"
        )
    arch = llama.arch(config, rope_fraction=0.25, qk_norm="shared", has_gate=True, mlp_bias=False, **overrides)
    return arch.with_states({layer: sizes for layer, kind in enumerate(kinds) if kind == _LINEAR})


def _gated_attention(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    arch: ArchConfig,
    norm: Norm,
    residual: Float[Array, "N D"] | None,
) -> tuple[Float[Array, "N D"], TokenContext]:
    """Apply attention whose outputs are multiplied by gates from the query projection; a sublayer for `models.block`.

    The N results are for all T tokens, or for the rows' last ones if `layer.last_only`.
    """
    attention = layer.attention
    T, Q, K, H = x.shape[0], attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = linear(x, p["qkv_proj"], tokens, norm=norm, bias=p.get("qkv_bias"))
    gated, k, v = jnp.split(qkv, [2 * Q * H, (2 * Q + K) * H], axis=1)
    q, gate = jnp.split(gated.reshape(T, Q, 2 * H), 2, axis=2)
    q, k = offset_norm(q, p["q_norm"], arch.norm_eps), offset_norm(k.reshape(T, K, H), p["k_norm"], arch.norm_eps)
    q, k = pair_halves(q, attention.rope), pair_halves(k, attention.rope)
    gate = tokens.kept(gate, layer)
    out, tokens = tokens.attend(q, k, v.reshape(T, K, H), layer)
    return project_out(p, out * jax.nn.sigmoid(gate), tokens, arch, residual), tokens


_block = partial(block, attention=_gated_attention, recurrent=gated_delta_net.delta)
_NAMES = TensorNames(norm_init="zeros", moe=GATED_SHARED, mixer=gated_delta_net.delta_specs)
FAMILIES = {
    "Qwen3NextForCausalLM": ModelFamily(next_arch, _NAMES, _NEXT_DEFAULTS, _block, offset_norm, folds=()),
    "Qwen3_5ForCausalLM": ModelFamily(dense_arch, _NAMES, _DENSE_DEFAULTS, _block, offset_norm, folds=()),
    "Qwen3_5MoeForCausalLM": ModelFamily(moe_arch, _NAMES, _MOE_DEFAULTS, _block, offset_norm, folds=()),
}
