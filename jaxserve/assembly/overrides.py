"""Overrides of a checkpoint's config.json, with vLLM's meaning, applied before anything reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.text.transformers_advice import without_torch_advice

logger = logging.getLogger(__name__)

_ROTATION = ("rope_parameters", "rope_scaling")  # one object under its new and old names
_IN_ROTATION = ("rope_theta", "partial_rotary_factor")  # fields that older files have outside it
_RENAMED = {"dtype": "torch_dtype", "torch_dtype": "dtype"} | dict(zip(_ROTATION, _ROTATION[::-1], strict=True))


def overridden(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw`, the content of config.json, with the values in `fields`; nested configurations change in part.

    A field with two names, or in two objects, is replaced everywhere.
    """
    merged = dict(raw)
    for name, value in fields.items():
        old = merged.get(name)
        if _is_part(name, old, value):
            merged[name] = overridden(old or {}, value)
            continue
        before = old or merged.get(_RENAMED.get(name, name)) or {}
        if name in _RENAMED:
            merged.pop(_RENAMED[name], None)
        merged[name] = value
        if name in _ROTATION and isinstance(value, Mapping | None):  # keep the base and the rotated fraction
            kept = {field: before[field] for field in _IN_ROTATION if field in before and field not in merged}
            merged[name] = kept | dict(value or {}) or None
        for rotation in _ROTATION if name in _IN_ROTATION else ():
            if isinstance(settings := merged.get(rotation), Mapping):
                merged[rotation] = _with_field(settings, name, value)
    return merged


def overridden_fields(overrides: Mapping[str, Any] | Callable[[Any], Any], path: Path) -> dict[str, Any]:
    """Return the fields to replace: the given ones, or those changed by a function of transformers' configuration.

    Args:
        overrides: fields, or a function.
        path: checkpoint directory.

    Raises:
        ConfigError: transformers cannot read the checkpoint, or the function returns another type.
    """
    if not callable(overrides):
        return dict(overrides)
    with without_torch_advice():
        from transformers import AutoConfig, PretrainedConfig  # noqa: PLC0415 - takes over two seconds

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"a function as hf_overrides needs a config.json that transformers reads, got {path}: "
            f"{str(error).splitlines()[0]}; give a dict instead"
        ) from error
    before, changed = config.to_dict(), overrides(config)
    if not isinstance(changed, PretrainedConfig):
        raise ConfigError(f"the function hf_overrides must return a configuration, got {type(changed).__name__}")
    return _changes(before, changed.to_dict())


def warn_of_idle(fields: Mapping[str, Any], raw: Mapping[str, Any], read: Callable[[dict[str, Any]], Any]) -> None:
    """Warn of overridden fields without effect.

    Args:
        fields: overridden fields.
        raw: content of config.json.
        read: function whose result must depend on each field.
    """
    whole = read(overridden(raw, fields))
    for name in fields:
        others = {other: value for other, value in fields.items() if other != name}
        try:
            is_idle = read(overridden(raw, others)) == whole
        except ConfigError:
            continue  # the others need this one
        if is_idle and raw.get(name) != fields[name]:
            logger.warning("hf_overrides: %s=%r changes nothing of what is served", name, fields[name])


def _is_part(name: str, old: Any, value: Any) -> bool:
    """Return whether the field `name` is a nested configuration: its override replaces only some fields."""
    return (
        name.endswith("_config") and name != "quantization_config" and isinstance(old, dict) and isinstance(value, dict)
    )


def _with_field(settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return RoPE settings with the field `name` replaced, in each layer type's settings if they are nested."""
    if any(isinstance(each, Mapping) for each in settings.values()):
        return {
            each: _with_field(own, name, value) if isinstance(own, Mapping) else own for each, own in settings.items()
        }
    return {**settings, name: value}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ between two configurations, with their values in `after`."""
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if _is_part(name, old, value):
            changes |= {name: inner} if (inner := _changes(before[name], value)) else {}
        elif name not in before or old != value:
            changes[name] = value
    return changes
