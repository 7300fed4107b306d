"""vLLM's `kv_transfer_config`: tiers of one engine, or a store of pages that several engines share.

An OffloadingConnector means `kv_offloading_size` and `kv_offloading_path`; an ExampleConnector `kv_store` and
`kv_role`. A NixlConnector copies pages from producers to consumers, which share a store here: it means `kv_role`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.kv_store_config import CONSUMER, PRODUCER, ROLES
from jaxserve.api.option_values import read_object
from jaxserve.api.schema import number
from jaxserve.errors import ConfigError

_NAME = "kv_transfer_config"
_EXTRA = f"kv_connector_extra_config of {_NAME}"
_TIER = f"a secondary tier of {_NAME}"
_BYTES = number(0, excludes_low=True)
_OFFLOADING = "OffloadingConnector"
_DIRECTORIES = ("ExampleConnector", "SharedStorageConnector")  # its names in newer and older versions
_NIXL = "NixlConnector"


def read_kv_transfer(value: object) -> dict[str, Any]:
    """Return the EngineConfig options that a `kv_transfer_config` means, from a dict or JSON; empty for None.

    Raises:
        ConfigError: it asks for anything else, or for requests that fail if pages are lost, which are computed again.
    """
    given = read_object(_NAME, value)
    if not given:
        return {}
    extra = read_object("kv_connector_extra_config", given.pop("kv_connector_extra_config", None))
    connectors = (_OFFLOADING, *_DIRECTORIES, _NIXL)
    connector, role = given.get("kv_connector"), given.get("kv_role")
    roles = (PRODUCER, CONSUMER) if connector == _NIXL else ROLES[:1] if connector == _OFFLOADING else ROLES
    policies = ("recompute", None)
    _check(
        _NAME,
        given,
        kv_connector=connectors,
        kv_role=roles if connector == _NIXL else (*roles, None),
        kv_load_failure_policy=policies,
        engine_id=None,
    )
    if connector is None:
        raise ConfigError(f"{_NAME} must have a kv_connector, {' or '.join(map(repr, connectors))}, got {value!r}")
    if connector == _OFFLOADING:
        return _read_tiers(extra)
    if connector == _NIXL:
        _check(_EXTRA, extra)
        if role is None:
            raise ConfigError(f"{_NAME} must have a kv_role, {PRODUCER!r} or {CONSUMER!r}, got {value!r}")
        return {"kv_role": role}
    _check(_EXTRA, extra, shared_storage_path=None)
    path = extra.get("shared_storage_path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"shared_storage_path in {_EXTRA} must be a directory, got {path!r}")
    return {"kv_store": path} | ({} if role is None else {"kv_role": role})


def _read_tiers(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the EngineConfig options that an OffloadingConnector's `extra` means; ConfigError if it means others."""
    tiers = extra.pop("secondary_tiers", None) or []
    num_bytes = _BYTES.read(f"cpu_bytes_to_use in {_EXTRA}", extra.pop("cpu_bytes_to_use", None), ConfigError)
    policies = ("lru", "arc", None)  # a tier learns from deleted pages that come back, as ARC does
    specs = ("CPUOffloadingSpec", "TieringOffloadingSpec", None)
    _check(_EXTRA, extra, eviction_policy=policies, spec_name=specs)
    if not isinstance(tiers, Sequence) or not all(isinstance(tier, Mapping) for tier in tiers) or len(tiers) > 1:
        raise ConfigError(f"secondary_tiers in {_EXTRA} must be a list with at most one dict, got {tiers!r}")
    options: dict[str, Any] = {"kv_offloading_size": num_bytes / 2**30}
    for tier in tiers:
        _check(_TIER, tier, type=("fs",), root_dir=None)
        if not tier.get("root_dir") or "type" not in tier:
            raise ConfigError(f"{_TIER} must have type 'fs' and a root_dir, got {dict(tier)!r}")
        options["kv_offloading_path"] = tier["root_dir"]
    return options


def _check(name: str, given: Mapping[str, Any], **accepted: Sequence[Any] | None) -> None:
    """Raise ConfigError for an unknown key, or a value that is not accepted.

    Args:
        name: name for messages.
        given: values by key.
        accepted: accepted values by key; None if all are.
    """
    for key, value in given.items():
        if key not in accepted:
            raise ConfigError(f"{name} has the unsupported key {key!r}; supported keys are {sorted(accepted)}")
        values = accepted[key]
        if values is not None and value not in values:
            wanted = " or ".join(repr(each) for each in values if each is not None)
            raise ConfigError(f"{key} in {name} must be {wanted}, got {value!r}")
