"""Choice of the store that reads a checkpoint."""

import os
from pathlib import Path as FilePath
from typing import Any, Protocol, runtime_checkable

from jaxserve.weights import gguf_store, orbax_store, safetensors_store
from jaxserve.weights.stored_head import with_stored_switch
from jaxserve.weights.stored_sizes import check_sizes
from jaxserve.weights.stored_tensor import Tensors


@runtime_checkable
class Store(Protocol):
    """Reader of one form of checkpoints."""

    def has_weights(self, directory: FilePath, /) -> bool:
        """Return whether there are weights that `open_tensors` reads."""

    def open_tensors(self, directory: FilePath, /) -> Tensors:
        """Return every tensor by name, still unread."""


def store_of(path: FilePath) -> Store:
    """Return the store that has weights there, safetensors before others; that of safetensors if there are none."""
    stores: tuple[Store, ...] = (safetensors_store, orbax_store, gguf_store)
    return next((store for store in stores if store.has_weights(path)), safetensors_store)


def is_orbax(directory: FilePath) -> bool:
    """Return whether the weights of a directory are Orbax's."""
    return store_of(directory) is orbax_store


def is_gguf(path: FilePath) -> bool:
    """Return whether weights and config are those of a GGUF file."""
    return store_of(path) is gguf_store


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint, or what a GGUF file has in its place.

    If it has weights, `tie_word_embeddings` is as they have it: see `with_stored_switch`.

    Raises:
        CheckpointError: it is missing or malformed, or claims larger sizes than the weights have.
    """
    store = store_of(FilePath(path))
    config = (gguf_store if store is gguf_store else safetensors_store).read_config(path)
    if not store.has_weights(FilePath(path)):
        return config
    tensors = store.open_tensors(FilePath(path))
    check_sizes(config, tensors, path)
    return with_stored_switch(config, tensors, path)


def has_config(path: str | os.PathLike[str]) -> bool:
    """Return whether `read_config` finds something."""
    return is_gguf(FilePath(path)) or safetensors_store.has_config(FilePath(path))
