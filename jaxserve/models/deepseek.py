"""DeepSeek V2, V3 and V3.2, Kimi K2, GLM-4.7-Flash and GLM-5: MLA, and MoE with shared experts.

V3.2 and GLM-5 have indexers, which choose the tokens that a query attends to. In GLM-5 layers may share the latest
indexer's choice.
"""

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from jaxserve.api.schema import FieldType, integer
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.kv_forms import Latents
from jaxserve.models import llama, mla, moe
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import (
    COUNT,
    POSITIVE,
    SIZE,
    STRINGS,
    SWITCH,
    HfConfig,
    one_of,
    read_field,
    read_fields,
    read_num_layers,
    read_rope,
)
from jaxserve.models.layer_kinds import read_kinds
from jaxserve.models.layer_spec import MlaSizes
from jaxserve.models.layer_tensors import MoeNames, TensorNames

_V2_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "first_k_dense_replace": 0,
    "mlp_bias": False,
    "moe_layer_freq": 1,
}
_V3_DEFAULTS = {
    **_V2_DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 3,
    "rope_interleave": True,
    "max_position_embeddings": 4096,
}
_GLM_DEFAULTS = {
    **_V3_DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
}
_V32_DEFAULTS = {
    **_V3_DEFAULTS,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "indexer_rope_interleave": False,
    "layer_types": None,
    "mlp_layer_types": None,
}
_GLM_DSA_DEFAULTS = {
    **_V32_DEFAULTS,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "indexer_types": None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
_SIZES = (
    *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
)
_FIELDS = {
    **dict.fromkeys(_SIZES, SIZE),
    **dict.fromkeys(("num_key_value_heads", "q_lora_rank", "n_group", "topk_group"), SIZE.or_null()),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave"), SWITCH),
    "routed_scaling_factor": POSITIVE,
    "first_k_dense_replace": COUNT,
    "mlp_bias": FieldType("false: biases of experts are not supported", lambda value: value is False),
    "moe_layer_freq": FieldType("1: only the first layers may lack experts", lambda value: value == 1),
}
_INDEX_FIELDS = {
    **dict.fromkeys(("index_topk", "index_head_dim", "index_n_heads", "q_lora_rank", "qk_rope_head_dim"), SIZE),
    "indexer_rope_interleave": SWITCH,
}
_INDEXER_TYPES = {"F": "full", "S": "shared"}  # letter in `index_topk_pattern` -> type
_SHARED_INDEX_FIELDS = {
    "index_topk_pattern": FieldType(
        'null, a string of "F" and "S", or a list of "full" and "shared"',
        lambda value: (
            (isinstance(value, str) and _INDEXER_TYPES.keys() >= set(value))
            or (STRINGS.holds(value) and set(_INDEXER_TYPES.values()) >= set(value))
        ),
    ).or_null(),
    "index_topk_freq": COUNT,
    "index_skip_topk_offset": integer(0),
}
_V2_FIELDS = {
    "scoring_func": one_of(["softmax"]),
    "topk_method": one_of(["greedy", "group_limited_greedy"]),
    "norm_topk_prob": FieldType(
        "false: transformers does not scale these weights to a sum of one", lambda value: value is False
    ),
}
_DENSE, _SPARSE, _INDEXED = "dense", "sparse", "indexed_attention"


def v2_arch(config: HfConfig) -> ArchConfig:
    """Parse a DeepSeek-V2 config.json."""
    is_greedy = read_fields(config, _V2_FIELDS)["topk_method"] == "greedy"
    groups = {"n_group": 1, "topk_group": 1} if is_greedy else {}
    return _arch({**config, **groups, "rope_interleave": True})  # transformers does not read rope_interleave here


def v3_arch(config: HfConfig, dense_layers: Collection[int] | None = None) -> ArchConfig:
    """Parse a config.json with DeepSeek-V3's fields."""
    read_fields(config, {"scoring_func": one_of(["sigmoid"]), "topk_method": one_of(["noaux_tc"])})
    return _arch(config, dense_layers, sigmoid=True, group_scores=2)


def glm_arch(config: HfConfig) -> ArchConfig:
    """Parse a GLM-4.7-Flash config.json: without `mlp_layer_types` the first layers are dense."""
    num_dense = read_field(config, "first_k_dense_replace", COUNT)

    def default(layer: int) -> str:
        """Return a layer's type, "dense" or "sparse", by its index."""
        return _DENSE if layer < num_dense else _SPARSE

    kinds = read_kinds(config, default, (_DENSE, _SPARSE), "mlp_layer_types")
    return v3_arch(config, dense_layers=[layer for layer, kind in enumerate(kinds) if kind == _DENSE])


def v32_arch(config: HfConfig) -> ArchConfig:
    """Parse a DeepSeek-V3.2 config.json: V3's fields, and an indexer's."""
    read_kinds(config, lambda _: _INDEXED, (_INDEXED,))
    arch = glm_arch({**config, "rope_interleave": True})  # transformers does not read rope_interleave here
    values = read_fields(config, _INDEX_FIELDS)
    if values["index_head_dim"] < values["qk_rope_head_dim"]:
        raise ConfigError(
            f"index_head_dim must be at least qk_rope_head_dim, the elements that are rotated, got "
            f"{values['index_head_dim']} and {values['qk_rope_head_dim']}"
        )
    mla, rank, rope_dim = arch.attention.mla_sizes
    kv = IndexedLatents(rank, rope_dim, values["index_n_heads"], values["index_head_dim"], values["index_topk"])
    mla = mla._replace(index_interleaved=values["indexer_rope_interleave"])
    return arch.with_attention(kv=[kv] * arch.num_layers, mla=[mla] * arch.num_layers)


def glm_dsa_arch(config: HfConfig) -> ArchConfig:
    """Parse a GLM-5 config.json: V3.2's fields, and the layers that share the latest indexer's choice."""
    values, num_layers = read_fields(config, _SHARED_INDEX_FIELDS), read_num_layers(config)
    pattern, freq, offset = (values[name] for name in _SHARED_INDEX_FIELDS)

    def default(layer: int) -> str:
        """Return a layer's type without `indexer_types`, as transformers does."""
        if pattern is not None:
            return _INDEXER_TYPES.get(pattern[layer], pattern[layer])
        return "shared" if max(layer - offset + 1, 0) % max(freq, 1) else "full"

    if pattern is not None and len(pattern) < num_layers:
        raise ConfigError(f"config.json: index_topk_pattern must have {num_layers} layers, got {pattern!r}")
    kinds = read_kinds(config, default, [*_INDEXER_TYPES.values()], "indexer_types")
    if kinds[0] != "full":
        raise ConfigError(f"config.json: the first layer's indexer must be 'full', got {kinds}")
    return v32_arch(config).with_attention(shares_choice=[kind == "shared" for kind in kinds])


def _arch(config: HfConfig, dense_layers: Collection[int] | None = None, **routing: Any) -> ArchConfig:
    """Parse the fields that all these models have.

    Args:
        config: content of config.json.
        dense_layers: layers with an MLP; None for the first `first_k_dense_replace` layers.
        routing: further fields in `Experts`.
    """
    values = read_fields(config, _FIELDS)
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads must be num_attention_heads, as all heads read the same latents, "
            f"got {kv_heads} and {heads}"
        )
    sizes = MlaSizes(
        nope_dim=values["qk_nope_head_dim"],
        value_dim=values["v_head_dim"],
        q_rank=values["q_lora_rank"],
        interleaved=values["rope_interleave"],
    )
    rope_dim, rope = values["qk_rope_head_dim"], read_rope(config)
    stretch = dict(rope.options)
    scale = (sizes.nope_dim + rope_dim) ** -0.5
    if (mscale := stretch.get("mscale_all_dim")) and stretch["factor"] > 1:
        scale *= (0.1 * mscale * math.log(stretch["factor"]) + 1.0) ** 2
    return llama.arch(
        {**config, "head_dim": rope_dim, "num_key_value_heads": 1},
        kv=Latents(values["kv_lora_rank"], rope_dim),
        mla=sizes,
        scale=scale,
        experts=_experts(config, values, routing),
        dense_layers=range(values["first_k_dense_replace"]) if dense_layers is None else dense_layers,
        mlp_bias=False,
    )


def _experts(config: HfConfig, values: Mapping[str, Any], routing: Mapping[str, Any]) -> Experts:
    """Read the experts' sizes and routing rules.

    Args:
        config: content of config.json.
        values: fields in `_FIELDS`, already read.
        routing: further fields in `Experts`.

    Raises:
        ConfigError: the experts cannot be divided into `n_group` groups, or the chosen groups have too few.
    """
    num_experts, num_groups = values["n_routed_experts"], values["n_group"] or 1
    top_groups = values["topk_group"] or 1
    experts = moe.read_experts(
        {**config, "num_local_experts": num_experts},
        size="moe_intermediate_size",
        normalized=values["norm_topk_prob"],
        num_groups=num_groups,
        top_groups=top_groups,
        scale=float(values["routed_scaling_factor"]),
        shared_ffn_size=values["n_shared_experts"] * values["moe_intermediate_size"],
        **routing,
    )
    group_size, rest = divmod(num_experts, num_groups)
    least = -(-experts.per_token // top_groups)
    if top_groups < num_groups:
        least = max(least, experts.group_scores)
    if rest or top_groups > num_groups or group_size < least:
        raise ConfigError(
            f"n_routed_experts must be n_group groups of at least {least}, and topk_group at most n_group, "
            f"got {num_experts}, {num_groups} and {top_groups}"
        )
    return experts


_block = partial(block, attention=mla.attention)
_V2_NAMES = TensorNames(mixer=mla.attention_specs)
_V3_NAMES = TensorNames(mixer=mla.attention_specs, moe=MoeNames(router_bias="mlp.gate.e_score_correction_bias"))
FAMILIES = {
    "DeepseekV2ForCausalLM": ModelFamily(v2_arch, _V2_NAMES, _V2_DEFAULTS, _block, folds=()),
    "DeepseekV3ForCausalLM": ModelFamily(v3_arch, _V3_NAMES, _V3_DEFAULTS, _block, folds=()),
    "DeepseekV32ForCausalLM": ModelFamily(v32_arch, _V3_NAMES, _V32_DEFAULTS, _block, folds=()),
    "Glm4MoeLiteForCausalLM": ModelFamily(glm_arch, _V3_NAMES, _GLM_DEFAULTS, _block, folds=()),
    "GlmMoeDsaForCausalLM": ModelFamily(glm_dsa_arch, _V3_NAMES, _GLM_DSA_DEFAULTS, _block, folds=()),
}
