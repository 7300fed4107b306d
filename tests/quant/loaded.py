"""Parameters and tensors of checkpoints that tests write."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import weights
from jaxserve.layers.linear import Matrix
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform
from jaxserve.weights.safetensors_file import map_file, write_file
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED

ONE_LAYER = {"num_hidden_layers": 1}


def loaded(path: Path, dtype: Any = jnp.float32, *, native: bool = False) -> tuple[Any, list[Any], Any]:
    arch = registry.from_hf_config(weights.read_config(path))
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, weight_format(None, arch.schemes), native=native)
    return arch, specs, weights.load(path, specs, dtype, transform=transform, schemes=arch.schemes)


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def all_rows(matrix: Matrix) -> jax.Array:
    """Return the rows of a matrix in floats."""
    return matrix.rows(jnp.arange(matrix.shape[0]))


def torch_rows(model: torch.nn.Module, spec: Any) -> np.ndarray:
    parts = [model.get_parameter(name).detach().numpy() for name in dict.fromkeys(spec.hf_names)]
    return np.concatenate(parts)


def safetensors_of(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in map_file(path / "model.safetensors").items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    structs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    write_file(path / "model.safetensors", structs, tensors.__getitem__)
