"""A small Llama's directory: what tests write, change, and expect to be refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxserve import weights
from jaxserve.models import registry
from tests.checkpoints import build_config

CONFIG = {**build_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"]}
SPECS = registry.param_specs(registry.from_hf_config(CONFIG))


def read_all(path: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the dict of tensors of a single-file checkpoint."""
    tensors = read_all(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def changed(params: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Return parameters of which each array is changed, in the host's memory."""
    return jax.tree.map(lambda x: jax.device_put(change(np.asarray(x))), params)


def assert_trees_equal(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def failure(path: Path, specs: Sequence[Any] = SPECS) -> str:
    """Return the words in which a directory is refused."""
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(path, specs)
    return str(error.value)
