"""Adapters: LoRA adapters by name over HTTP, from the command line or loaded while serving."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.api.lora_request import LoRARequest
from jaxserve.errors import ConfigError, RequestError, brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.fields import ANY, SWITCH, TEXT, BodyReader, ObjectFields, needed
from jaxserve.server import http
from jaxserve.server.lora_modules import read_modules

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.server.call import Call
    from jaxserve.server.config import ServerConfig

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LOADED: ObjectFields = {
    "lora_name": needed(TEXT),
    "lora_path": needed(TEXT),
    "load_inplace": SWITCH,
    "base_model_name": TEXT,
    "is_3d_lora_weight": SWITCH,
}
_UNLOADED: ObjectFields = {"lora_name": needed(TEXT), "lora_int_id": ANY}


class Adapters:
    """Handlers for requests of the operator, and the adapters' names in requests of clients.

    Args:
        engine: the engine.
        config: options of the server.
        model_names: names of the base model.
    """

    def __init__(self, engine: Engine, config: ServerConfig, model_names: Sequence[str]) -> None:
        self._names, self._root, self._model_names = engine.adapters, config.lora_root, model_names
        for option in ("lora_modules", "lora_root"):
            if getattr(config, option) and not engine.config.enable_lora:
                raise ConfigError(f"{option} needs enable_lora; add --enable-lora")
        for request in read_modules(config.lora_modules):
            try:
                self._check_name(request.lora_name)
                self._names.load(request)
            except RequestError as error:
                raise ConfigError(f"lora_modules: {error}") from error

    def request(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a request names; None for the base model.

        Raises:
            BadRequestError: it was unloaded since the request was read.
        """
        if name is None:
            return None
        found = self._names.find(name)
        if found is None:
            raise BadRequestError(f"the adapter {name!r} was unloaded", "model", "model_not_found", 404)
        return LoRARequest(name)

    async def load(self, call: Call) -> None:
        """Load the adapter in the body, whose path is in the root directory."""
        body = await call.json()
        given = BodyReader().read(body, _LOADED)
        name = given["lora_name"]
        self._check_name(name)
        if self._names.find(name) is not None and not given.get("load_inplace"):
            message = f"the adapter {name!r} is loaded already; pass load_inplace: true to replace it"
            raise BadRequestError(message, "lora_name", "adapter_exists")
        path, base_model = str(self._path(given["lora_path"])), given.get("base_model_name") or None
        request = LoRARequest(name, 1, path, base_model, load_inplace=bool(given.get("load_inplace")))
        await call.in_workers(partial(self._names.load, request))
        await _send_text(call, f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, call: Call) -> None:
        """Forget the adapter in the body; unfinished requests keep it."""
        name = BodyReader().read(await call.json(), _UNLOADED)["lora_name"]
        if await call.in_workers(partial(self._names.remove, name)) is None:
            raise BadRequestError(f"there is no adapter {brief(name)}", "lora_name", "model_not_found", 404)
        await _send_text(call, f"Success: LoRA adapter '{name}' removed successfully.")

    def _check_name(self, name: str) -> None:
        """Raise BadRequestError for a name of the base model; LoRARequest checks others."""
        if name in self._model_names:
            message = f"an adapter's name must not be one of the model's, {list(self._model_names)}, got {brief(name)}"
            raise BadRequestError(message, "lora_name")

    def _path(self, given: str) -> Path:
        """Return the directory for a path in a body, inside the root.

        Raises:
            BadRequestError: it leads out of the root, or does not exist.
        """
        assert self._root is not None, "without a root there is no handler"
        root = self._root.resolve()
        try:
            path = (root / given).resolve()
            is_directory = path.is_relative_to(root) and path.is_dir()
        except (OSError, ValueError) as error:  # too long, or with a null character
            raise BadRequestError(f"lora_path must be a path, got {brief(given)}: {error}", "lora_path") from None
        if not path.is_relative_to(root):
            raise BadRequestError(f"lora_path must be inside --lora-root, got {brief(given)}", "lora_path")
        if not is_directory:
            message = f"lora_path must be a directory in --lora-root, got {brief(given)}"
            raise BadRequestError(message, "lora_path", "adapter_not_found", 404)
        return path


async def _send_text(call: Call, text: str) -> None:
    """Reply with a sentence, as vLLM does."""
    await http.send_bytes(call.send, 200, text.encode(), b"text/plain; charset=utf-8")
