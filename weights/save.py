"""From a parameter tree to a checkpoint directory of either form."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from weights import orbax_store, safetensors_store
from weights.errors import Mismatch
from weights.new_directory import new_directory
from weights.rows import FLOATS, Params, Path, TensorRow, leaf_at
from weights.stored_tensor import Tensor, host_rows


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
    tensors = _split(specs, params)
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
    tensors = _split(specs, params)
    with new_directory(FilePath(path)) as scratch:
        orbax_store.write_tensors(scratch, tensors)
        safetensors_store.write_config(scratch, _with_dtype(hf_config, tensors))


@dataclass(frozen=True)
class _Part:
    """Rows `begin` to `end` of a parameter: one tensor of the checkpoint."""

    array: Any
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(host_rows(self.array, slice(self.begin, self.end)), dtype)


def _split(specs: Sequence[TensorRow], params: Params) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name; CheckpointError if `params` is not what `specs` describe."""
    found = Mismatch()
    tensors: dict[str, Tensor] = {}
    for row in specs:
        array, name = _leaf_or_none(params, row.path), "/".join(map(str, row.path))
        if array is None:
            found.missing.append(name)
        elif (dtype := getattr(array, "dtype", type(array).__name__)) not in FLOATS:
            found.mistyped.append(f"{name} {dtype}")
        elif array.shape != row.shape:
            found.misshapen.append(f"{name} {array.shape} instead of {row.shape}")
        else:
            ends = list(accumulate(row.hf_rows))
            parts = zip(row.hf_names, row.hf_rows, ends, strict=True)
            tensors |= {hf_name: _Part(array, end - rows, end) for hf_name, rows, end in parts}
    found.raise_if_any("params", "save the tree that load returned, layers unstacked, in a floating dtype")
    return tensors


def _leaf_or_none(params: Params, path: Path) -> Any:
    try:
        return leaf_at(params, path)
    except (KeyError, IndexError, TypeError):
        return None


def _with_dtype(hf_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with the dtype of the weights, under the name of today's transformers and that of older ones."""
    dtype = jnp.result_type(*{tensor.dtype for tensor in tensors.values()}).name
    return {**hf_config, "dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in hf_config else {})}
