"""Hugging Face checkpoint directories: config.json and safetensors, in one file or in shards with an index."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.json_file import leaves_directory, read_object
from jaxserve.weights.safetensors_file import map_file, num_bytes, write_file
from jaxserve.weights.stored_tensor import Tensor, Tensors

_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_MODELOPT_CONFIG = "hf_quant_config.json"  # has ModelOpt's quantisation if config.json lacks it
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER, _PIPELINE = "adapter_config.json", "model_index.json"
MAX_SHARD_BYTES = 5_000_000_000


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint directory's parsed config.json; CheckpointError if it is missing or malformed."""
    directory = FilePath(path)
    _require_directory(directory)
    _require_model(directory)
    if not (directory / _CONFIG).is_file():
        raise CheckpointError(
            f"{directory} must contain {_CONFIG} or exactly one .gguf file, got {_listing(directory)}"
        )
    config = read_object(directory / _CONFIG)
    if (directory / _MODELOPT_CONFIG).is_file() and not config.get("quantization_config"):
        config["quantization_config"] = {"quant_method": "modelopt", **read_object(directory / _MODELOPT_CONFIG)}
    return config


def read_generation_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed generation_config.json, {} if it is absent; CheckpointError if it is malformed."""
    file = FilePath(path) / _GENERATION_CONFIG
    return read_object(file) if file.is_file() else {}


def has_config(directory: FilePath) -> bool:
    """Return whether a directory has a config.json."""
    return (directory / _CONFIG).is_file()


def has_weights(directory: FilePath) -> bool:
    """Return whether there are files that `open_tensors` can read."""
    return (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()


def write_tensors(
    directory: FilePath,
    tensors: Mapping[str, Tensor],
    wrote: Callable[[int], object] = lambda _: None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write every tensor unchanged, in one file or in shards with an index; `wrote` gets the size of each write."""

    def read(name: str) -> NDArray[Any]:
        """Return a tensor, counted as written."""
        wrote(tensors[name].nbytes)
        return np.asarray(tensors[name])

    structs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    shards = _shards(structs, max_shard_bytes)
    for file, shard in shards.items():
        write_file(directory / file, shard, read)
    if len(shards) > 1:
        _write_json(directory / _INDEX, _index(shards))


def write_config(directory: FilePath, hf_config: Mapping[str, Any]) -> None:
    """Write a directory's config.json."""
    _write_json(directory / _CONFIG, hf_config)


def replace(scratch: FilePath, directory: FilePath) -> None:
    """Move the files in `scratch` to `directory`, and remove weights with other names from there."""
    new = sorted(file.name for file in scratch.iterdir())
    for name in new:
        os.replace(scratch / name, directory / name)
    for file in {*directory.glob("model*.safetensors"), directory / _INDEX}:
        if file.name not in new:
            file.unlink(missing_ok=True)


# Reading


def open_tensors(directory: FilePath) -> Tensors:
    """Return every stored tensor by name, still unread; CheckpointError if files are absent or damaged."""
    _require_directory(directory)
    if (directory / _SINGLE).is_file():
        return map_file(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise CheckpointError(_no_weights(directory))
    weight_map = read_object(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{directory / _INDEX} must have a weight_map from tensor names to file names")
    files = sorted(set(weight_map.values()))
    if outside := [f for f in files if leaves_directory(f)]:
        raise CheckpointError(
            f"{directory / _INDEX} must name files inside its directory, got {outside[:8]}; download it again"
        )
    if absent := [f for f in files if not os.path.isfile(directory / f)]:
        raise CheckpointError(
            f"{directory / _INDEX} must name files beside it, got {absent[:8]} absent; download them too"
        )
    mapped = {f: map_file(directory / f) for f in files}
    if lost := [name for name, f in weight_map.items() if name not in mapped[f]]:
        raise CheckpointError(
            f"{directory / _INDEX} must name tensors that the files have, got {', '.join(lost[:8])} in none; download "
            f"them again"
        )
    return {name: mapped[f][name] for name, f in weight_map.items()}


def _require_directory(directory: FilePath) -> None:
    """Raise a CheckpointError unless a path is a directory."""
    if not directory.is_dir():
        raise CheckpointError(
            f"a checkpoint must be a local directory with {_CONFIG} and safetensors files, or a .gguf file, "
            f"got {directory} ({'a file' if directory.exists() else 'absent'}); "
            f"fetch a model of the Hugging Face hub with `hf download NAME --local-dir DIRECTORY`"
        )


def _require_model(directory: FilePath) -> None:
    """Raise a CheckpointError if the directory holds an adapter or a diffusion pipeline."""
    if (directory / _ADAPTER).is_file() and not has_weights(directory):
        base = read_object(directory / _ADAPTER).get("base_model_name_or_path") or "its base model"
        raise CheckpointError(
            f"{directory} must hold a whole model, got a PEFT adapter of {base}, which only changes its weights; merge "
            f"both with PEFT: AutoPeftModelForCausalLM.from_pretrained({str(directory)!r})"
            f".merge_and_unload().save_pretrained(NEW), save the tokenizer there too, and serve NEW"
        )
    if (directory / _PIPELINE).is_file():
        raise CheckpointError(
            f"{directory} must hold a language model, got a diffusers pipeline ({_PIPELINE}), which makes pictures; "
            f"take another model"
        )


def _no_weights(directory: FilePath) -> str:
    """Return the message for a directory without weights that can be read."""
    if torch_files := sorted(f.name for f in directory.iterdir() if f.suffix in {".bin", ".pt", ".pth"}):
        return _torch_weights(directory, torch_files)
    return (
        f"{directory} must contain {_SINGLE}, {_INDEX}, the folder `orbax` or exactly one .gguf file, "
        f"got {_listing(directory)}"
    )


def _torch_weights(directory: FilePath, names: list[str]) -> str:
    """Return the message for a directory that only has pickled torch weights, in the files `names`."""
    return (
        f"{directory} must contain weights as safetensors ({_SINGLE}), Orbax or GGUF, got pickled torch weights "
        f"({', '.join(names[:4])}), which may run code when they are read; convert them with transformers: "
        f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW)"
    )


def _listing(directory: FilePath) -> str:
    """Return the first 12 names in a directory."""
    names = sorted(f.name for f in directory.iterdir())
    return ", ".join([*names[:12], *(["..."] if len(names) > 12 else [])]) or "an empty directory"


# Writing

Shard = dict[str, jax.ShapeDtypeStruct]  # tensor name -> shape and dtype


def _shards(tensors: Shard, max_bytes: int) -> dict[str, Shard]:
    """Return tensors by file name; each file is as full as `max_bytes` allows.

    The order stays, in which `derive` computes tensors; huggingface_hub would move those larger than `max_bytes`.
    """
    shards: list[Shard] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + num_bytes(tensor) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes(tensor)
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _index(shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Return the content of the index of shards, given tensors by file name."""
    total_size = sum(num_bytes(tensor) for shard in shards.values() for tensor in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def _write_json(file: FilePath, value: Mapping[str, Any]) -> None:
    """Write a value as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
