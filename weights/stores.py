"""Selection of the store that reads a checkpoint."""

import os
from pathlib import Path as FilePath
from typing import Any, Protocol, runtime_checkable

from jaxserve.weights import gguf_store, orbax_store, safetensors_store
from jaxserve.weights.stored_head import with_stored_switch
from jaxserve.weights.stored_sizes import check_sizes
from jaxserve.weights.stored_tensor import Tensors


@runtime_checkable
class Store(Protocol):
    """Reader for one checkpoint format."""

    def has_weights(self, directory: FilePath, /) -> bool:
        """Return whether there are weights that `open_tensors` can read."""

    def open_tensors(self, directory: FilePath, /) -> Tensors:
        """Return every tensor by name, still unread."""


def find_store(path: FilePath) -> Store:
    """Return the store that finds weights at a path, safetensors first; the safetensors store if none does."""
    stores: tuple[Store, ...] = (safetensors_store, orbax_store, gguf_store)
    return next((store for store in stores if store.has_weights(path)), safetensors_store)


def is_orbax(directory: FilePath) -> bool:
    """Return whether a directory's weights are in Orbax's format."""
    return find_store(directory) is orbax_store


def is_gguf(path: FilePath) -> bool:
    """Return whether weights and config come from a GGUF file."""
    return find_store(path) is gguf_store


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's parsed config.json, or the equivalent from a GGUF file.

    If there are weights, they decide `tie_word_embeddings`: see `with_stored_switch`.

    Raises:
        CheckpointError: it is missing or malformed, or claims larger sizes than the weights have.
    """
    store = find_store(FilePath(path))
    config = (gguf_store if store is gguf_store else safetensors_store).read_config(path)
    if not store.has_weights(FilePath(path)):
        return config
    tensors = store.open_tensors(FilePath(path))
    check_sizes(config, tensors, path)
    return with_stored_switch(config, tensors, path)


def has_config(path: str | os.PathLike[str]) -> bool:
    """Return whether `read_config` finds something."""
    return is_gguf(FilePath(path)) or safetensors_store.has_config(FilePath(path))
