"""Checkpoint directories, safetensors or Orbax, written from parameter trees."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp

from jaxserve.weights import orbax_store, safetensors_store
from jaxserve.weights.new_directory import new_directory
from jaxserve.weights.rows import Params, TensorRow
from jaxserve.weights.stored_tensor import Tensor
from jaxserve.weights.tree import checkpoint_tensors

_ADVICE = "save the tree that load returned, layers unstacked, in a floating dtype"


def save(
    path: str | os.PathLike[str],
    specs: Sequence[TensorRow],
    params: Params,
    hf_config: Mapping[str, Any],
    *,
    max_shard_bytes: int = safetensors_store.MAX_SHARD_BYTES,
) -> None:
    """Write `params` as a Hugging Face directory, which transformers reads.

    All files are complete before the first one replaces an old file; old weights under other names are then removed.

    Args:
        path: directory, created if absent; files other than config.json and model*.safetensors stay as they are.
        specs: one row per tensor; fused tensors are split into their checkpoint tensors.
        params: array tree from `load`, on any number of devices; one tensor at a time is copied to the host.
        hf_config: contents of config.json; its dtype is replaced by the parameters' dtype.
        max_shard_bytes: maximum file size; a larger tensor gets its own file.

    Raises:
        CheckpointError: tensors are missing in `params`, or have another shape or dtype (all named).
    """
    directory = FilePath(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(specs, params, _ADVICE)
    with TemporaryDirectory(prefix=".saving-", dir=directory) as temporary:
        scratch = FilePath(temporary)
        safetensors_store.write_tensors(scratch, tensors, max_shard_bytes=max_shard_bytes)
        safetensors_store.write_config(scratch, _with_dtype(hf_config, tensors))
        safetensors_store.replace(scratch, directory)


def save_orbax(
    path: str | os.PathLike[str], specs: Sequence[TensorRow], params: Params, hf_config: Mapping[str, Any]
) -> None:
    """Write `params` as an Orbax checkpoint, in the layout that `convert` writes: it can be loaded on other devices.

    Args:
        path: directory that is absent or empty; it appears once it is complete.
        specs: see `save`.
        params: see `save`.
        hf_config: see `save`.

    Raises:
        CheckpointError: see `save`; also if `path` is taken or being written by another process.
        OSError: the directory cannot be written.
    """
    tensors = checkpoint_tensors(specs, params, _ADVICE)
    with new_directory(FilePath(path)) as scratch:
        orbax_store.write_tensors(scratch, tensors)
        safetensors_store.write_config(scratch, _with_dtype(hf_config, tensors))


def _with_dtype(hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the config with the weights' dtype, under the keys for both new and old versions of transformers.

    Vectors count only if there are no matrices: some stay in float32.
    """
    matrices = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    dtype = jnp.result_type(*(matrices or {tensor.dtype for tensor in tensors.values()})).name
    return {**hf_config, "dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in hf_config else {})}
