"""Kinds of layers: the one reader of fields that say which layers have windows, rotations, experts or states.

A family reads those that its layers can follow. `check_unread` refuses the others, unless they say nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.models.hf_config import SIZE, STRINGS, SWITCH, TABLE, read_fields, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


def full_every(period: int) -> Callable[[int], str]:
    """Return the function of a layer that gives the last of each period full attention, the others a window."""
    return lambda layer: SLIDING if (layer + 1) % period else FULL


def read_kinds(
    config: Mapping[str, Any],
    num_layers: int,
    default: Callable[[int], str],
    known: Collection[str] = (FULL, SLIDING),
    field: str = "layer_types",
) -> list[str]:
    """Return the kind of each layer.

    Args:
        config: content of config.json.
        num_layers: number of layers.
        default: function of a layer that returns its kind where the field is absent.
        known: kinds that the family has.
        field: name of the field.

    Raises:
        ConfigError: the field does not name a known kind for each layer.
    """
    kinds = read_fields(config, {field: STRINGS.or_null()})[field]
    kinds = [default(layer) for layer in range(num_layers)] if kinds is None else kinds
    if len(kinds) != num_layers or not set(known).issuperset(kinds):
        names = ", ".join(map(repr, known))
        raise ConfigError(f"config.json: {field} must be {num_layers} of {names}, got {kinds}")
    return list(kinds)


def layer_windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer by its kind."""
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_windows(
    config: Mapping[str, Any], num_layers: int, default: Callable[[int], str], *, has_switch: bool = False
) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`, or by default, and `sliding_window`.

    Args:
        config: content of config.json.
        num_layers: number of layers.
        default: see `read_kinds`.
        has_switch: True if `use_sliding_window` must be true for any window.
    """
    kinds = read_kinds(config, num_layers, default)
    if has_switch and not read_fields(config, {"use_sliding_window": SWITCH})["use_sliding_window"]:
        return (None,) * num_layers
    return layer_windows(kinds, read_fields(config, {"sliding_window": SIZE.or_null()})["sliding_window"])


def same_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return `sliding_window` as the window of every layer."""
    values = read_fields(config, {"num_hidden_layers": SIZE, "sliding_window": SIZE.or_null()})
    return (values["sliding_window"],) * values["num_hidden_layers"]


def by_kind(config: Mapping[str, Any], local_theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json of models all of whose layers rotate as those without a window, and as those with one.

    In the new spelling, rotations are given by kind; the old one scales those of layers without a window alone.

    Args:
        config: content of config.json, with `rope_theta`.
        local_theta: base of rotations in layers with a window, unless their own parameters have one.
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
    """Return the kind of fields that a family does not read, with the values that say what it does anyway."""
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


def check_unread(
    config: Mapping[str, Any], read: Collection[str], windows: Sequence[int | None], architecture: str
) -> None:
    """Raise a ConfigError if fields that change results say something, and the family has not read them.

    Args:
        config: content of config.json.
        read: names of the fields that the family has read.
        windows: window of each layer.
        architecture: name of the family, for the message.
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
