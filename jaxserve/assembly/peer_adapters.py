"""LoRA adapters in a run of several processes: each reads the same directory, and requests wait until all agree.

The leading process asks the others to read an adapter, and gets their answers, before any request has it. A process
whose directory differs, or cannot be read, thus fails the load and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.core.adapter_names import AdapterSource, LoadedAdapter
from jaxserve.core.event_log import event_to_json
from jaxserve.core.events import AdapterDropped, AdapterRead
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.assembly.adapter_store import AdapterStore
    from jaxserve.distributed.peers import Follower, Leader


def load_everywhere(store: AdapterStore, peers: Leader, source: AdapterSource) -> LoadedAdapter:
    """Read an adapter in all processes; callable from any thread of the leading one.

    Raises:
        ConfigError: a process cannot read it or has another one, or it does not fit the model. No process
            keeps it, unless it has another name.
    """
    if source.tensors is not None:
        raise ConfigError("an adapter must be a directory that all processes can read, got tensors of one; save them")
    before, loaded = store.loaded, store.load(source)
    problems = list(filter(None, peers.ask(event_to_json(AdapterRead(source.path, loaded.digest)))))
    if problems:
        if loaded.digest not in before:
            store.unload(loaded.digest)
        raise ConfigError(problems[0])
    return loaded


def drop_everywhere(peers: Leader) -> Callable[[str], None]:
    """Return a function that notifies the other processes that no request has an adapter any more."""
    return lambda digest: peers.tell(event_to_json(AdapterDropped(digest)))


class FollowerAdapters:
    """Adapters of a following process.

    Args:
        store: the adapters in its memory.
        peers: connection to the leading process.
    """

    def __init__(self, store: AdapterStore, peers: Follower) -> None:
        self._store, self._peers = store, peers

    def take(self, event: AdapterRead | AdapterDropped) -> None:
        """Start to read an adapter, while steps continue, or drop one."""
        if isinstance(event, AdapterDropped):
            self._store.unload(event.digest)
        else:
            threading.Thread(target=self._read, args=[event], daemon=True).start()

    def _read(self, event: AdapterRead) -> None:
        """Read an adapter, and answer with an error message; empty if there is none."""
        try:
            self._store.load(AdapterSource(event.path), event.digest)
        except Exception as error:  # the leading process waits for an answer
            self._peers.answer(f"all processes must have the adapter {event.path}; {self._peers.name}: {error}")
        else:
            self._peers.answer("")
