"""Files of draft heads, in the layouts in which they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike
from safetensors.flax import load_file  # numpy has no bfloat16

from jaxserve.errors import ConfigError, brief
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec
from jaxserve.weights import assemble
from jaxserve.weights.errors import CheckpointError

_MEDUSA_BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?weight")


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a head; ConfigError where there is none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"a draft head must be a directory with a config.json, got {directory}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the config.json of a draft head must be an object, got {brief(config)} in {directory}")
    return config


def read_tensors(directory: Path) -> dict[str, jax.Array]:
    """Read all tensors of a head; ConfigError where there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [path.name for path in (*directory.glob("*.pt"), *directory.glob("*.bin"))]
        hint = f", got only {pickled}: convert them, torch.load then safetensors.torch.save_file" if pickled else ""
        raise ConfigError(f"a draft head must have a .safetensors file in {directory}{hint}")
    return {name: tensor for path in files for name, tensor in load_file(str(path)).items()}


def load_medusa(directory: Path, arch: ArchConfig, dtype: DTypeLike) -> Params:
    """Load Medusa heads for the model `arch`: the parameters that `medusa.Medusa` describes.

    Layouts: the original one, `{head}.{layer}.linear.weight` and `.bias` with `{head}.{layers}.weight` for the logits,
    and vLLM's, `blocks.{head}.layers.{layer}.weight` with `lm_heads.{head}.weight`. Heads without matrices of their own
    for the logits share that of the model.

    Raises:
        ConfigError: there are no heads, or they do not fit the model.
    """
    tensors = read_tensors(directory)
    D, V = arch.hidden_size, arch.vocab_size
    if "token_map" in tensors:
        raise ConfigError(f"Medusa heads must cover the whole vocabulary, got a token_map in {directory}")
    places: dict[tuple[int, int], str] = {}
    for name, tensor in tensors.items():
        match = _MEDUSA_BLOCK.fullmatch(name)
        if match and tensor.shape == (D, D):
            places[int(match[1]), int(match[2])] = name
    specs = []
    for (head, layer), name in sorted(places.items()):
        path = ("blocks", head, layer)
        specs.append(ParamSpec((*path, "weight"), (D, D), (None, None), (name,), (D,)))
        bias = name.removesuffix("weight") + "bias"
        if bias in tensors:
            specs.append(ParamSpec((*path, "bias"), (D,), (None,), (bias,), (D,)))
    num_heads = len({head for head, _ in places})
    if not num_heads:
        raise ConfigError(f"Medusa heads for this model must have matrices of {(D, D)}, got {_shapes(tensors)}")
    blocks = {spec.hf_names[0] for spec in specs}
    rest = sorted(name for name in tensors if name not in blocks)
    if rest:
        names = _lm_heads(num_heads, rest)
        specs += [ParamSpec(("lm_heads", head), (V, D), (None, None), (name,), (V,)) for head, name in enumerate(names)]
    try:
        params = assemble(tensors, specs, dtype)
    except CheckpointError as error:
        raise ConfigError(f"Medusa heads in {directory} must fit the model: {error}") from error
    return {"lm_heads": []} | params


def _lm_heads(num_heads: int, names: Sequence[str]) -> list[str]:
    """Return the names of the matrices for the logits, by head."""
    by_head = {int(match[1]): name for name in names if (match := re.match(r"(?:lm_heads\.)?(\d+)\.", name))}
    if sorted(by_head) != list(range(num_heads)) or len(names) != num_heads:
        raise ConfigError(f"Medusa heads must have one matrix for the logits each, or none, got {list(names)}")
    return [by_head[head] for head in range(num_heads)]


def _shapes(tensors: dict[str, jax.Array]) -> str:
    return brief({name: tensor.shape for name, tensor in tensors.items()})
