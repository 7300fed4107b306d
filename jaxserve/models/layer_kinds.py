"""Layer types: parsers for the fields that specify which layers have windows, RoPE, experts or recurrent states.

A family reads the fields that it supports. `check_unread` rejects all others unless they have no effect.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.models.hf_config import (
    SIZE,
    STRINGS,
    SWITCH,
    TABLE,
    HfConfig,
    read_field,
    read_fields,
    read_num_layers,
    read_rope,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def full_every(period: int) -> Callable[[int], str]:
    """Return a function from layer index to type: full attention in every `period`-th layer, otherwise a window."""
    return lambda layer: SLIDING if (layer + 1) % period else FULL


def read_kinds(
    config: HfConfig,
    default: Callable[[int], str],
    known: Collection[str] = (FULL, SLIDING),
    field: str = "layer_types",
) -> list[str]:
    """Return each layer's type.

    Args:
        config: content of config.json.
        default: function from layer index to type, used if the field is absent.
        known: types that the family supports.
        field: field name.

    Raises:
        ConfigError: the field does not name a known type for each layer.
    """
    kinds, num_layers = read_field(config, field, STRINGS.or_null()), read_num_layers(config)
    kinds = [default(layer) for layer in range(num_layers)] if kinds is None else kinds
    if len(kinds) != num_layers or not set(known).issuperset(kinds):
        names = ", ".join(map(repr, known))
        raise ConfigError(f"config.json: {field} must be {num_layers} of {names}, got {kinds}")
    return list(kinds)


def layer_windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention.

    Args:
        kinds: each layer's type.
        window: window in layers with sliding attention.
    """
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_windows(
    config: HfConfig, default: Callable[[int], str], *, has_switch: bool = False
) -> tuple[int | None, ...]:
    """Return each layer's window: `sliding_window` if its type, from `layer_types` or `default`, is sliding attention.

    Args:
        config: content of config.json.
        default: see `read_kinds`.
        has_switch: True if there are no windows unless `use_sliding_window` is true.
    """
    kinds = read_kinds(config, default)
    if has_switch and not read_field(config, "use_sliding_window", SWITCH):
        return (None,) * len(kinds)
    return layer_windows(kinds, read_field(config, "sliding_window", SIZE.or_null()))


def same_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return `sliding_window` as every layer's window."""
    values = read_fields(config, {"num_hidden_layers": SIZE, "sliding_window": SIZE.or_null()})
    return (values["sliding_window"],) * values["num_hidden_layers"]


def by_kind(config: HfConfig, local_theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split RoPE parameters by layer type: return a config.json for full attention and one for sliding attention.

    Newer files specify RoPE by layer type; in older files scaling only applies to layers without a window.

    Args:
        config: content of config.json, with `rope_theta`.
        local_theta: RoPE base in layers with a window, unless their parameters have one.
    """
    values = read_fields(config, {"rope_parameters": TABLE.or_null(), "rope_scaling": TABLE.or_null()})
    tables, scaling = values["rope_parameters"] or {}, values["rope_scaling"] or {}
    if tables and not {FULL, SLIDING} & tables.keys():
        read_rope({**config, "rope_scaling": None, "rope_parameters": tables})
        raise ConfigError(f"config.json: rope_parameters must be by kind, {FULL!r} and {SLIDING!r}, got {tables}")
    own = read_fields(tables, {FULL: TABLE.or_null(), SLIDING: TABLE.or_null()})
    full = {"rope_theta": config["rope_theta"], **(own[FULL] or {}), **scaling}
    local = {"rope_theta": local_theta, **(own[SLIDING] or {})}
    whole, windowed = ({**config, "rope_scaling": None, "rope_parameters": table} for table in (full, local))
    return whole, windowed


def _only(*values: Any) -> FieldType:
    """Return a field type with only these values: they have no effect, so a family need not read the field."""
    words = " or ".join("null" if value is None else str(value).lower() for value in values)
    return FieldType(words, lambda value: any(value == own and type(value) is type(own) for own in values))


_ALL_ROTATED = FieldType(
    "null or a list of 1", lambda value: not value or (isinstance(value, list) and set(value) == {1})
)
NOT_READ: dict[str, FieldType] = {
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval", "full_attention_interval"), _only(None, 1)),
    **dict.fromkeys(("attn_types", "attention_types", "layers_block_type", "layer_rope_theta"), _only(None)),
    **dict.fromkeys(("mlp_layer_types", "attention_chunk_size", "attn_type_list"), _only(None)),
    "no_rope_layers": _ALL_ROTATED,
    "use_sliding_window": _only(None, False),
    "first_k_dense_replace": _only(None, 0),
    "mlp_only_layers": _only(None, []),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"), _only(None, 1)),
    "is_causal": _only(None, True),
    "use_bidirectional_attention": _only(None, False),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "attn_temperature_tuning"), _only(None, False)),
    **dict.fromkeys(("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping"), _only(None)),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), _only(None, 1, 1.0)
    ),
}


def check_unread(config: HfConfig, read: Collection[str], windows: Sequence[int | None], architecture: str) -> None:
    """Raise a ConfigError if fields that the family has not read would change results.

    Args:
        config: content of config.json.
        read: fields that the family has read.
        windows: each layer's window.
        architecture: name for the message.
    """
    wrong = [
        f"{name} must be {kind.words}, got {config[name]!r}"
        for name, kind in NOT_READ.items()
        if name in config and name not in read and not kind.holds(config[name])
    ]
    kinds = config.get("layer_types")
    if "layer_types" not in read and isinstance(kinds, list) and config.get("sliding_window") is not None:
        own = [FULL if window is None else SLIDING for window in windows]
        if kinds != own:
            wrong.append(f"layer_types must be {own}, got {kinds}")
    if wrong:
        raise ConfigError(
            f"config.json: {architecture} does not support other values: {'; '.join(wrong)}; remove a field only if "
            f"the model was trained without it"
        )
