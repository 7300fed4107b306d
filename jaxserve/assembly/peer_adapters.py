"""LoRA adapters in a run of several processes: each has the same ones, and requests wait until all agree.

The leading process asks the others to read an adapter, and gets their answers, before any request has it. A process
whose directory differs, or cannot be read, thus fails the load and nothing else. Adapters without a directory are sent
as tensors. The leading process decides which idle adapters leave host memory, and asks again before later requests.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.core.adapter_names import AdapterSource, LoadedAdapter
from jaxserve.core.event_log import event_to_json
from jaxserve.core.events import AdapterDropped, AdapterEvent, AdapterEvicted, AdapterPart, AdapterRead
from jaxserve.errors import ConfigError
from jaxserve.weights.torch_tensors import from_torch

if TYPE_CHECKING:
    from jaxserve.assembly.adapter_store import AdapterStore
    from jaxserve.distributed.peers import Follower, Leader

PART_BYTES = 2**20  # a step's events wait for at most one part


class OtherProcesses:
    """Adapters of the following processes, as the leading one controls them. Callable from any of its threads.

    Args:
        peers: connections to them.
    """

    def __init__(self, peers: Leader) -> None:
        self._peers = peers

    def load(self, store: AdapterStore, source: AdapterSource) -> LoadedAdapter:
        """Read an adapter in all processes.

        Args:
            store: adapters of the leading process.
            source: the adapter's content.

        Raises:
            ConfigError: a process cannot read it or has another one, or it does not fit the model. No process
                keeps it, unless it was loaded before.
        """
        before, loaded = store.loaded, store.load(source)
        if source.tensors is not None:
            for part in _parts(source):
                self._tell(AdapterPart(loaded.digest, part))
        if problem := self._ask(AdapterRead(source.path, loaded.digest)):
            store.forget_load(loaded.digest, before)
            raise ConfigError(problem)
        return loaded

    def hold(self, store: AdapterStore, digest: str) -> None:
        """Make an adapter ready in all processes, before a request with it is queued.

        Args:
            store: adapters of the leading process.
            digest: hash over the adapter's content.

        Raises:
            ConfigError: it was unloaded, or a process cannot read it again.
        """
        path = store.path_to_read(digest)
        store.arrays(digest)
        if path and (problem := self._ask(AdapterRead(path, digest))):
            store.evict(digest)
            raise ConfigError(problem)

    def drop(self, digest: str) -> None:
        """Notify the processes that no request has an adapter any more."""
        self._tell(AdapterDropped(digest))

    def evict(self, digest: str) -> None:
        """Notify the processes that an idle adapter leaves host memory."""
        self._tell(AdapterEvicted(digest))

    def _tell(self, event: AdapterEvent) -> None:
        self._peers.tell(event_to_json(event))

    def _ask(self, event: AdapterRead) -> str:
        """Ask all processes to read an adapter; return the first error message, empty if there is none."""
        return next(filter(None, self._peers.ask(event_to_json(event))), "")


class FollowerAdapters:
    """Adapters of a following process.

    Args:
        store: the adapters in its memory.
        peers: connection to the leading process.
    """

    def __init__(self, store: AdapterStore, peers: Follower) -> None:
        self._store, self._peers = store, peers
        self._sent: dict[str, bytearray] = {}  # bytes of adapters that are not complete yet, by digest

    def take(self, event: AdapterEvent) -> None:
        """Start to read an adapter, while steps continue, or forget one."""
        match event:
            case AdapterPart(digest, content):
                self._sent.setdefault(digest, bytearray()).extend(base64.b64decode(content))
            case AdapterEvicted(digest):
                self._store.evict(digest)
            case AdapterDropped(digest):
                self._store.unload(digest)
            case AdapterRead(_, digest):
                threading.Thread(target=self._read, args=[event, self._sent.pop(digest, None)], daemon=True).start()

    def _read(self, event: AdapterRead, sent: bytearray | None) -> None:
        """Read an adapter, and answer with an error message; empty if there is none."""
        try:
            self._store.load(AdapterSource(event.path) if sent is None else _source(sent), event.digest)
        except Exception as error:  # the leading process waits for an answer
            name = event.path or "that was given as tensors"
            self._peers.answer(f"all processes must have the adapter {name}; {self._peers.name}: {error}")
        else:
            self._peers.answer("")


def _parts(source: AdapterSource) -> Iterator[str]:
    """Yield an adapter given as tensors in parts, in base64, for `_source`: a line of JSON, then all elements."""
    arrays = {name: np.asarray(from_torch(tensor)) for name, tensor in (source.tensors or {}).items()}
    shapes = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    yield from _encoded(json.dumps([source.config or {}, shapes], default=_plain).encode() + b"\n")
    for array in arrays.values():
        yield from _encoded(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _encoded(content: bytes | memoryview) -> Iterator[str]:
    """Yield bytes in base64, in parts."""
    for start in range(0, len(content), PART_BYTES):
        yield base64.b64encode(content[start : start + PART_BYTES]).decode()


def _plain(value: Any) -> Any:
    """Return a value of a PEFT configuration for JSON, such as a set of names."""
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _source(sent: bytearray) -> AdapterSource:
    """Return the adapter whose parts these bytes are."""
    start = sent.index(b"\n") + 1
    config, shapes = json.loads(sent[:start])
    tensors = {}
    for name, dtype, shape in shapes:
        stop = start + prod(shape) * np.dtype(dtype).itemsize
        tensors[name] = np.frombuffer(sent[start:stop], dtype).reshape(shape)
        start = stop
    return AdapterSource("", config, tensors)
