"""AdapterStore: LoRA adapters in host memory, in the shapes in which the devices take them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.core.adapter_names import LoadedAdapter
from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.weights.adapter_files import AdapterFile, make_adapter, read_adapter

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.core.adapter_names import AdapterSource
    from jaxserve.models.adapter_layout import AdapterLayout
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params

logger = logging.getLogger(__name__)


class StoredAdapter(NamedTuple):
    """An adapter in host memory.

    Attributes:
        source: its directory or tensors, to read it again.
        arrays: arrays in the shapes of one slot, by pipeline stage; None if only the source is kept.
    """

    source: AdapterSource
    arrays: Sequence[Params] | None


class AdapterStore:
    """Adapters by digest; callable from any thread.

    Args:
        layout: layout of the devices' stacks.
        arch: sizes of the whole model.
        stages: sizes and mesh of each pipeline stage in a replica.
        max_kept: maximum adapters with arrays; None for any number.
        in_use: returns the digests that unfinished requests have.
        dropped: called with each digest that is forgotten; None if nobody waits for it.
        evicted: called with each digest whose arrays are forgotten, likewise.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        arch: ArchConfig,
        stages: Sequence[tuple[ArchConfig, Mesh | None]],
        max_kept: int | None,
        in_use: Callable[[], Collection[str]],
        dropped: Callable[[str], None] | None = None,
        evicted: Callable[[str], None] | None = None,
    ) -> None:
        self._layout, self._arch, self._stages = layout, arch, stages
        self._max_kept, self._in_use, self._dropped, self._evicted = max_kept, in_use, dropped, evicted
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredAdapter] = OrderedDict()  # the least recently used first
        self._unnamed: set[str] = set()

    def load(self, source: AdapterSource, digest: str | None = None) -> LoadedAdapter:
        """Read an adapter and make it available to the runners.

        Args:
            source: its content.
            digest: the digest that it must have; None if it may have any.

        Raises:
            ConfigError: it cannot be read, does not fit the model, or has another digest.
        """
        adapter = self._read(source)
        if digest not in (None, adapter.digest):
            raise ConfigError(f"its content must have digest {digest}, got {adapter.digest}; copy the directory again")
        arrays = self._place(adapter)
        if adapter.is_zero:
            logger.warning(
                "all lora_B of %s are zero: the adapter has no effect, as before its training", source.path or "tensors"
            )
        with self._lock:
            self._stored[adapter.digest] = StoredAdapter(source, arrays)
            self._stored.move_to_end(adapter.digest)
            self._unnamed.discard(adapter.digest)
            self._trim()
        return LoadedAdapter(adapter.digest, adapter.invocation)

    @property
    def loaded(self) -> dict[str, AdapterSource]:
        """Sources, by digest, of the adapters that have been loaded, and not unloaded since."""
        with self._lock:
            return {digest: each.source for digest, each in self._stored.items() if digest not in self._unnamed}

    def forget_load(self, digest: str, before: Mapping[str, AdapterSource]) -> None:
        """Undo a load.

        Args:
            digest: digest of what was loaded.
            before: value of `loaded` before it.
        """
        with self._lock:
            if digest in before:
                self._stored[digest] = self._stored[digest]._replace(source=before[digest])
            else:
                self._unnamed.add(digest)
                self._trim()

    def path_to_read(self, digest: str) -> str:
        """Return the directory that `arrays` would read; empty if an adapter is in memory or unloaded."""
        with self._lock:
            stored = self._stored.get(digest)
            return "" if stored is None or stored.arrays is not None else stored.source.path

    def evict(self, digest: str) -> None:
        """Forget an adapter's arrays, which can be read again."""
        with self._lock:
            if digest in self._stored:
                self._evict(digest)

    def unload(self, digest: str) -> None:
        """Free an adapter's memory as soon as no unfinished request has it."""
        with self._lock:
            self._unnamed.add(digest)
            self._trim()

    def _place(self, adapter: AdapterFile) -> list[Params]:
        """Return an adapter's arrays by pipeline stage; ConfigError if it does not fit the model."""
        return [self._layout.place(adapter, *stage, self._arch) for stage in self._stages]

    def arrays(self, digest: str, stage: int = 0) -> Params:
        """Return an adapter's arrays for a pipeline stage, read again if they are not in memory.

        Raises:
            ConfigError: it was unloaded, or its directory has changed since it was loaded.
        """
        with self._lock:
            if digest not in self._stored:
                raise ConfigError("the adapter was unloaded before the request with it arrived; load it again")
            source, arrays = self._stored[digest]
            self._stored.move_to_end(digest)
        if arrays is not None:
            return arrays[stage]
        adapter = self._read(source)
        if adapter.digest != digest:
            raise ConfigError(f"the adapter in {source.path} has changed since it was loaded; load it again")
        arrays = self._place(adapter)
        with self._lock:
            if digest in self._stored:  # a cancelled request's adapter may have been unloaded meanwhile
                self._stored[digest] = StoredAdapter(source, arrays)
                self._trim()
        return arrays[stage]

    @staticmethod
    def _read(source: AdapterSource) -> AdapterFile:
        """Read an adapter; ConfigError if that fails."""
        with registry.config_errors():
            if source.tensors is None:
                return read_adapter(source.path)
            return make_adapter(source.config or {}, source.tensors, "the adapter")

    def _trim(self) -> None:
        """Forget adapters without name and use, and the arrays of the least recently used ones beyond the maximum."""
        used = self._in_use()
        for digest in [digest for digest in self._unnamed if digest not in used]:
            self._stored.pop(digest, None)
            self._unnamed.remove(digest)
            if self._dropped is not None:
                self._dropped(digest)
        kept = [digest for digest, each in self._stored.items() if each.arrays is not None]
        num_extra = 0 if self._max_kept is None else len(kept) - self._max_kept
        for digest in kept[:-1]:
            if num_extra > 0 and self._stored[digest].source.path and digest not in used:
                self._evict(digest)
                num_extra -= 1

    def _evict(self, digest: str) -> None:
        """Forget an adapter's arrays; the caller holds the lock."""
        self._stored[digest] = self._stored[digest]._replace(arrays=None)
        if self._evicted is not None:
            self._evicted(digest)
