"""Orbax checkpoints of a parameter tree: each process writes and reads its own shards (fast sharded restart)."""

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from weights.errors import CheckpointError, Mismatch
from weights.rows import Params


def save(path: str | os.PathLike[str], params: Params, metadata: Mapping[str, Any] | None = None) -> None:
    """Write `params`, and `metadata` (what JSON can hold) beside it, atomically; an older checkpoint is replaced."""
    ocp.save(FilePath(path).absolute(), params, overwrite=True, custom_metadata=dict(metadata or {}))


def restore(path: str | os.PathLike[str], abstract_params: Params) -> Params:
    """Read the tree that `save` wrote into the shapes, dtypes and shardings of `abstract_params`.

    Args:
        path: as given to `save`.
        abstract_params: tree of jax.ShapeDtypeStruct; leaves without a sharding go to the first device.

    Raises:
        CheckpointError: no Orbax checkpoint there, or a tree of other tensors (all named).
    """
    found = _shapes(_metadata(path).metadata)
    wanted = _shapes(abstract_params)
    Mismatch(
        missing=[name for name in wanted if name not in found],
        unexpected=[name for name in found if name not in wanted],
        misshapen=[
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ],
    ).raise_if_any(path, "check that the checkpoint is of this model, in the same form (layers stacked or not)")
    return ocp.load(FilePath(path).absolute(), jax.tree.map(_with_sharding, abstract_params))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata that `save` was given; CheckpointError if there is no Orbax checkpoint."""
    return dict(_metadata(path).custom_metadata)


def _metadata(path: str | os.PathLike[str]) -> ocp.CheckpointMetadata[Any]:
    try:
        return ocp.metadata(FilePath(path).absolute())
    except (OSError, ocp.errors.InvalidLayoutError, ValueError) as error:
        raise CheckpointError(f"{path} must be an Orbax checkpoint, got a fault: {error}") from error


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
