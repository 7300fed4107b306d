"""LoRA adapters that a server loads at its start, as its option `lora_modules` names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.api.lora_request import LoRARequest
from jaxserve.errors import ConfigError, RequestError, brief


def read_modules(modules: Sequence[str]) -> list[LoRARequest]:
    """Return the adapters of the option `lora_modules`: NAME=PATH, or JSON with name, path and base_model_name.

    Raises:
        ConfigError: an entry has another form, or a name is given twice.
    """
    found: dict[str, LoRARequest] = {}
    for entry in modules:
        request = _read_module(entry)
        if request.lora_name in found:
            raise ConfigError(f"lora_modules must have different names, got {request.lora_name!r} twice")
        found[request.lora_name] = request
    return list(found.values())


def _read_module(entry: str) -> LoRARequest:
    if entry.lstrip().startswith("{"):
        try:
            fields: Any = json.loads(entry)
        except ValueError as error:
            raise ConfigError(f"lora_modules must be NAME=PATH or JSON, got {brief(entry)}: {error}") from None
        if not isinstance(fields.pop("is_3d_lora_weight", False), bool):  # the file's tensors decide
            raise ConfigError(f"is_3d_lora_weight in lora_modules must be true or false, got {brief(entry)}")
        known = {"name", "path", "base_model_name"}
        if not {"name", "path"} <= fields.keys() <= known or not all(isinstance(v, str) for v in fields.values()):
            raise ConfigError(f"lora_modules in JSON must have the strings {sorted(known)}, got {brief(entry)}")
        try:
            return LoRARequest(fields["name"], 1, fields["path"], fields.get("base_model_name"))
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}, in {brief(entry)}") from None
    name, separator, path = entry.partition("=")
    if not (name and separator and path):
        raise ConfigError(f"lora_modules must be NAME=PATH or JSON, got {brief(entry)}")
    return LoRARequest(name, 1, path)
