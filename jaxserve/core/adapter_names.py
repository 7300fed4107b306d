"""AdapterNames: the LoRA adapters that requests may name, and the digests of their contents."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import ConfigError, RequestError, brief


class LoadedAdapter(NamedTuple):
    """An adapter that the core has.

    Attributes:
        digest: hash over its content: its name in the core and the prefix cache.
        invocation: token ids from whose last occurrence in a prompt on it applies (aLoRA); empty if it always does.
    """

    digest: str
    invocation: tuple[int, ...] = ()


class NamedAdapter(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        request: its name and directory.
        loaded: its content.
    """

    request: LoRARequest
    loaded: LoadedAdapter


class AdapterSource(NamedTuple):
    """Content of an adapter: a directory, or its configuration and tensors.

    Attributes:
        path: directory; empty for given tensors.
        config: content of adapter_config.json.
        tensors: arrays by PEFT's names.
    """

    path: str
    config: Mapping[str, Any] | None = None
    tensors: Mapping[str, Any] | None = None


class AdapterNames:
    """Adapters by name; callable from any thread.

    Args:
        load: reads an adapter and makes it available to the core; ConfigError if it does not fit.
        unload: tells the core that no further request names an adapter.
        is_enabled: False if the engine serves no adapters.
    """

    def __init__(
        self, load: Callable[[AdapterSource], LoadedAdapter], unload: Callable[[str], None], *, is_enabled: bool
    ) -> None:
        self._load, self._unload, self._is_enabled = load, unload, is_enabled
        self._lock = threading.Lock()  # held while an adapter loads, so that it is read once
        self._named: dict[str, NamedAdapter] = {}
        self._holding = threading.Lock()  # held while names and holders change
        self._holders: dict[str, WeakSet[Any]] = {}  # requests read with an adapter, by digest, also unnamed ones

    def __contains__(self, name: object) -> bool:
        """Return whether an adapter has this name."""
        return isinstance(name, str) and name in self._named

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name; None if there is none."""
        return self._named.get(name)

    def request_for(self, digest: str) -> LoRARequest | None:
        """Return the adapter with a digest, for requests; None for the base model.

        Raises:
            RequestError: no name has it.
        """
        if not digest:
            return None
        names = self.names([digest])
        if not names:
            raise RequestError(
                f"the session needs the LoRA adapter with the content {digest}, got {brief(list(self))}; load it first"
            )
        return LoRARequest(names[0])

    def names(self, digests: Collection[str]) -> list[str]:
        """Return the names of the adapters with these digests."""
        return [name for name, each in list(self._named.items()) if each.loaded.digest in digests]

    def resolve(self, request: LoRARequest | None, token_ids: TokenIds) -> tuple[str, int]:
        """Return the digest of a request's adapter, which is loaded if its name is new, and the first token with it.

        The digest is empty for the base model.

        Args:
            request: the adapter; None for the base model.
            token_ids: prompt.

        Raises:
            RequestError: the adapter cannot be loaded.
        """
        if request is None:
            return "", 0
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest or None, got {brief(request)}")
        known = self._named.get(request.lora_name)
        if known is not None and not request.load_inplace:
            _check_same(known.request, request)
        else:
            known = self.load(request)
        start = _invoked_at(token_ids, known.loaded.invocation)
        return ("", 0) if start is None else (known.loaded.digest, start)

    def hold(self, digest: str, holder: object) -> None:
        """Keep an adapter for a request that was read with it, as long as its `holder` exists, before the core has it.

        Raises:
            RequestError: the adapter was unloaded since the request was read.
        """
        if not digest:
            return
        with self._holding:
            if digest not in self._holders and not self._is_named(digest):
                raise RequestError("the adapter of this request was unloaded meanwhile; load it again")
            self._holders.setdefault(digest, WeakSet()).add(holder)

    def load(self, request: LoRARequest) -> NamedAdapter:
        """Load an adapter from its directory; with `load_inplace`, replace the one with its name.

        Raises:
            RequestError: it cannot be read or does not fit the model, or the name belongs to another directory.
        """
        self._require_enabled()
        with self._lock:
            known = self._named.get(request.lora_name)
            if known is not None and not request.load_inplace:
                _check_same(known.request, request)
                return known
            if not request.lora_path:
                raise RequestError(f"lora_path must name the directory of adapter {request.lora_name!r}, got none")
            return self._put(request, AdapterSource(os.path.realpath(request.lora_path)))

    def put(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> NamedAdapter:
        """Load an adapter from its configuration and tensors, and replace the one with its name, if any.

        Raises:
            RequestError: it does not fit the model.
        """
        self._require_enabled()
        with self._lock:
            return self._put(LoRARequest(name, load_inplace=True), AdapterSource("", config, tensors))

    def remove(self, name: str) -> NamedAdapter | None:
        """Forget a name, and return its adapter; None if it is unknown. Unfinished requests keep it."""
        with self._lock:
            with self._holding:
                found = self._named.pop(name, None)
                released = self._released(found)
            for digest in released:
                self._unload(digest)
            return found

    def _put(self, request: LoRARequest, source: AdapterSource) -> NamedAdapter:
        """Load an adapter and give it a name; the caller holds the lock."""
        try:
            loaded = self._load(source)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        with self._holding:
            old = self._named.get(request.lora_name)
            found = self._named[request.lora_name] = NamedAdapter(request, loaded)
            released = self._released(old)
        for digest in released:
            self._unload(digest)
        return found

    def _released(self, old: NamedAdapter | None) -> list[str]:
        """Forget and return the digests that neither a name nor a request has, after `old` has lost its name."""
        digests = {*self._holders} if old is None else {*self._holders, old.loaded.digest}
        released = [each for each in digests if not (self._is_named(each) or len(self._holders.get(each, ())))]
        for digest in digests:
            if not len(self._holders.get(digest, ())):
                self._holders.pop(digest, None)
        return released

    def _is_named(self, digest: str) -> bool:
        """Return whether an adapter has a name."""
        return any(each.loaded.digest == digest for each in self._named.values())

    def _require_enabled(self) -> None:
        if not self._is_enabled:
            raise RequestError("lora_request needs an engine with enable_lora; start it with enable_lora=True")


def _invoked_at(token_ids: TokenIds, invocation: Sequence[int]) -> int | None:
    """Return the index of the last occurrence of the invocation tokens in a prompt; None if it has none."""
    size = len(invocation)
    starts = range(len(token_ids) - size, -1, -1) if size else range(1)
    return next((start for start in starts if list(token_ids[start : start + size]) == list(invocation)), None)


def _check_same(known: LoRARequest, request: LoRARequest) -> None:
    """Raise RequestError if a request names a loaded adapter with another directory."""
    if request.lora_path and os.path.realpath(request.lora_path) != os.path.realpath(known.lora_path or ""):
        raise RequestError(
            f"adapter {known.lora_name!r} was loaded from {known.lora_path or 'tensors'!r}, got the path "
            f"{request.lora_path!r}; choose another name, or pass load_inplace=True to replace it"
        )
