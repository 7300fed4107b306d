"""Checkpoint directories made from others: converted between safetensors and Orbax, or with other tensors."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from jaxserve.weights import orbax_store, safetensors_store
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.load import check, stored_tensors
from jaxserve.weights.new_directory import new_directory, require_free
from jaxserve.weights.progress import progress_bar
from jaxserve.weights.quantized import Schemes
from jaxserve.weights.rows import TensorRow
from jaxserve.weights.sentence_transformers import module_folders
from jaxserve.weights.stored_tensor import Tensor
from jaxserve.weights.stores import is_gguf, is_orbax, read_config

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TEMPLATES = "additional_chat_templates"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    specs: Sequence[TensorRow],
    *,
    schemes: Schemes | None = None,
    use_tqdm: bool = False,
) -> None:
    """Write the checkpoint in `source` to `target`: as safetensors if it is Orbax, else as Orbax.

    Every tensor keeps its name, its dtype and its bits, except that GGUF blocks become elements and scales. All other
    files of the model are copied, so that `target` can be served by itself; only a GGUF file's tokenizer is missing.
    `target` appears once it is complete; the unfinished directory of a killed conversion is removed first.

    Args:
        source: checkpoint in any format.
        target: directory that is absent or empty.
        specs: one row per tensor in the model.
        schemes: schemes if the checkpoint is quantised.
        use_tqdm: show progress in bytes if stderr is a terminal.

    Raises:
        CheckpointError: see `load`; also if `target` is taken, inside `source`, or being written by another process.
        OSError: `target` cannot be written.
    """
    source, target = FilePath(source), FilePath(target)
    _check_directories(source, target)
    check(source, specs, schemes)
    tensors = stored_tensors(source)
    store = safetensors_store if is_orbax(source) else orbax_store
    with (
        new_directory(target) as scratch,
        progress_bar(sum(tensor.nbytes for tensor in tensors.values()), "Converting", use_tqdm) as bar,
    ):
        _copy_others(source, scratch)
        if is_gguf(source):
            safetensors_store.write_config(scratch, read_config(source))
        store.write_tensors(scratch, tensors, bar.update)


def derive(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    *,
    max_shard_bytes: int = safetensors_store.MAX_SHARD_BYTES,
) -> None:
    """Write other tensors and another config.json to `target` as safetensors, and copy the other files of `source`.

    Tensors are read in order, one at a time, while they are written. `target` appears as in `convert`.

    Args:
        source: checkpoint directory from which tokenizer, generation config and other files are copied.
        target: directory that is absent or empty.
        tensors: tensors by name.
        hf_config: contents of config.json.
        max_shard_bytes: maximum file size; a larger tensor gets its own file.

    Raises:
        CheckpointError: `target` is taken, inside `source`, or being written by another process.
        OSError: `target` cannot be written.
    """
    source, target = FilePath(source), FilePath(target)
    _check_directories(source, target)
    with new_directory(target) as scratch:
        _copy_others(source, scratch)
        safetensors_store.write_config(scratch, hf_config)
        safetensors_store.write_tensors(scratch, tensors, max_shard_bytes=max_shard_bytes)


def _check_directories(source: FilePath, target: FilePath) -> None:
    """Raise a CheckpointError if `target` is taken, or lies inside `source`."""
    require_free(target)
    if source.absolute().resolve() in target.absolute().resolve().parents:
        raise CheckpointError(f"{target} must not be inside {source}; choose another directory")


def _copy_others(source: FilePath, target: FilePath) -> None:
    """Copy the model's other files to `target`: not weights or hidden files; of folders only templates and modules."""
    for file in source.iterdir() if source.is_dir() else ():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)
    for folder in (_TEMPLATES, *module_folders(source)):
        if (source / folder).is_dir() and (source / folder).resolve().is_relative_to(source.resolve()):
            shutil.copytree(source / folder, target / folder, dirs_exist_ok=True)
