"""From a parameter tree to a checkpoint directory of either form."""

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
from jaxserve.weights.tree import tensors_of

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

    All files are written in full before the first takes its place, and weights of an older checkpoint there are
    then removed.

    Args:
        path: directory, created if absent; files other than config.json and model*.safetensors stay as they are.
        specs: one row per tensor; those made of several checkpoint tensors are split again.
        params: tree of arrays, as `load` returns it, on however many devices: one tensor at a time comes to the host.
        hf_config: contents of config.json; its dtype is set to that of the parameters.
        max_shard_bytes: size above which weights go to several files; a larger tensor has one of its own.

    Raises:
        CheckpointError: `params` lacks tensors of `specs`, or has them in another shape or dtype (all named).
    """
    directory = FilePath(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(specs, params, _ADVICE)
    with TemporaryDirectory(prefix=".saving-", dir=directory) as temporary:
        scratch = FilePath(temporary)
        safetensors_store.write_tensors(scratch, tensors, max_shard_bytes=max_shard_bytes)
        safetensors_store.write_config(scratch, _with_dtype(hf_config, tensors))
        safetensors_store.replace(scratch, directory)


def save_orbax(
    path: str | os.PathLike[str], specs: Sequence[TensorRow], params: Params, hf_config: Mapping[str, Any]
) -> None:
    """Write `params` as an Orbax directory, as `convert` does: nothing in it tells of the devices they came from.

    Args:
        path: a directory that is absent or empty; it appears when it is whole.
        specs: as of `save`.
        params: as of `save`.
        hf_config: as of `save`.

    Raises:
        CheckpointError: as `save`; `path` is taken, or being written by another process.
        OSError: it cannot be written.
    """
    tensors = tensors_of(specs, params, _ADVICE)
    with new_directory(FilePath(path)) as scratch:
        orbax_store.write_tensors(scratch, tensors)
        safetensors_store.write_config(scratch, _with_dtype(hf_config, tensors))


def _with_dtype(hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with the dtype of the weights, under the name of today's transformers and that of older ones."""
    dtype = jnp.result_type(*{tensor.dtype for tensor in tensors.values()}).name
    return {**hf_config, "dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in hf_config else {})}
