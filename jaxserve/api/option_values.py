"""Option values that are dicts in Python and JSON on a command line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from jaxserve.api.schema import integer, number
from jaxserve.errors import ConfigError, brief, did_you_mean

MAX_IMAGES = 999  # per prompt, vLLM's default
_COUNT = integer(0)
_POSITIVE = number(0, excludes_low=True)
_NO_NEUTRAL: Mapping[str, Collection[object]] = MappingProxyType({})

Options = TypeVar("Options")  # a dataclass


def read_object(name: str, value: object) -> dict[str, Any]:
    """Return the value of the option `name` as a dict: from a mapping, JSON text from a command line, or None (empty).

    Raises:
        ConfigError: it is nothing of these, or a key is not a string.
    """
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} must be a JSON object, got {brief(value)}: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{name} must be a dict with names as keys, got {value!r}")
    return dict(given)


def read_options(
    name: str, kind: type[Options], value: object, neutral: Mapping[str, Collection[object]] = _NO_NEUTRAL
) -> Options | None:
    """Return the value of the option `name` as a dataclass: from its fields as a dict or JSON, or the one given.

    Args:
        name: name of the option.
        kind: the dataclass.
        value: the option's value; None and "null" stand for None.
        neutral: values by key that mean the same as no key, of keys that are no fields.

    Raises:
        ConfigError: a key is not supported or is missing, or a value is invalid.
    """
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, str) and value.strip() == "null":
        return None
    fields = dataclasses.fields(cast(Any, kind))
    given, names = read_object(name, value), [field.name for field in fields]
    unknown = {key: each for key, each in given.items() if key not in names and each not in neutral.get(key, ())}
    if unknown:
        raise ConfigError(
            f"unsupported {name} {unknown}{did_you_mean(unknown, names)}; supported keys are {sorted(names)}"
        )
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if missing := [key for key in required if key not in given]:
        raise ConfigError(f"{name} must have a {' and a '.join(required)}, got no {' and no '.join(missing)}")
    return kind(**{key: given[key] for key in names if key in given})


def read_tenant_weights(value: Any) -> tuple[tuple[str, float], ...]:
    """Return (tenant, weight) pairs, sorted by name, from a dict or JSON; ConfigError if a weight is not positive."""
    weights = read_object("tenant_weights", value)
    if not all(map(_POSITIVE.holds, weights.values())):
        raise ConfigError(f"tenant_weights must be positive numbers by tenant, got {value!r}")
    return tuple((tenant, float(weight)) for tenant, weight in sorted(weights.items()))


def read_max_images(value: Any) -> int:
    """Return the maximum number of images from `limit_mm_per_prompt`; ConfigError if it allows other media."""
    limits = {name: _count_in(limit) for name, limit in read_object("limit_mm_per_prompt", value).items()}
    others = {name: limit for name, limit in limits.items() if name != "image" and limit != 0}
    number = limits.get("image", MAX_IMAGES)
    if others or not _COUNT.holds(number):
        raise ConfigError(
            'limit_mm_per_prompt must be {"image": N} with N of 0 or more, as no other media are supported, got '
            f"{brief(value)}"
        )
    return int(number)


def _count_in(limit: Any) -> Any:
    """Return the count in one of vLLM's limits with sizes, which only its memory profile needs; others unchanged."""
    is_sized = isinstance(limit, Mapping) and "count" in limit and limit.keys() <= {"count", "width", "height"}
    return limit["count"] if is_sized else limit


def read_targets(target_ttft_ms: Any, target_itl_ms: Any) -> tuple[tuple[int | None, float, float], ...]:
    """Read EngineConfig's latency targets; return one entry per priority class that has any.

    An entry has the class, None for all other classes, then the target times in seconds from arrival to first token,
    and from each token to the next.
    """
    first_s, next_s = _read_target("target_ttft_ms", target_ttft_ms), _read_target("target_itl_ms", target_itl_ms)
    lacking = set() if None in next_s else first_s.keys() - next_s.keys()
    if lacking:
        names = sorted(map(str, lacking))
        raise ConfigError(f"target_ttft_ms needs target_itl_ms of the same classes, got none for {names}")
    priorities = sorted(first_s.keys() | next_s.keys(), key=lambda priority: (priority is None, priority or 0))
    return tuple(
        (priority, first_s.get(priority, first_s.get(None, 0.0)), next_s.get(priority, next_s.get(None, 0.0)))
        for priority in priorities
    )


def _read_target(name: str, value: Any) -> dict[int | None, float]:
    """Return the value of a latency option as seconds by priority class, with None for all other classes."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
        times = {} if given is None else dict(given) if isinstance(given, Mapping) else {None: given}
        read = {
            None if priority is None else int(priority): float(time_ms) / 1e3 for priority, time_ms in times.items()
        }
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} must be milliseconds, or milliseconds by priority, got {brief(value)}: {error}"
        ) from None
    if not all(0 < time_s < math.inf for time_s in read.values()):
        raise ConfigError(f"{name} must be positive, got {value!r}")
    return read
