"""Layers with full attention whose KV heads have sizes of their own, as of Gemma 4."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.models.hf_config import SIZE, TABLE, read_fields
from jaxserve.models.layer_facts import GlobalAttention
from jaxserve.models.layer_kinds import FULL


def read_global_attention(values: Mapping[str, Any], kinds: list[str]) -> GlobalAttention:
    """Read the heads of layers with full attention, by fields of their own or, in newer files, by layer."""
    own = {"head_dim": values["head_dim"], "num_key_value_heads": values["num_key_value_heads"]}
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    heads, tables = {**own, "head_dim": values["global_head_dim"]}, values["per_layer_config"]
    if values["attention_k_eq_v"] and values["num_global_key_value_heads"]:
        heads["num_key_value_heads"] = values["num_global_key_value_heads"]
    if tables is not None:
        named = [str(layer) for layer in range(len(kinds))]
        if unknown := sorted(map(str, tables.keys() - {*named})):
            raise ConfigError(f"per_layer_config must have numbers of layers, below {len(kinds)}, got {unknown}")
        given = read_fields({name: {} for name in named} | tables, dict.fromkeys(named, TABLE))
        heads = {**own, **given[str(max(layers))]}
        is_same = ({**own, **given[name]} == (heads if layer in layers else own) for layer, name in enumerate(named))
        if heads.keys() != own.keys() or not all(is_same):
            raise ConfigError(
                f"per_layer_config must give all layers of full_attention the same {sorted(own)}, and nothing else, "
                f"got {tables}"
            )
        read_fields(heads, dict.fromkeys(own, SIZE))
    wide = HeadVectors(heads["num_key_value_heads"], heads["head_dim"])
    return GlobalAttention(layers, wide, values["attention_k_eq_v"])
