"""Checkpoints that are shipped with the package."""

from importlib.util import find_spec
from pathlib import Path


def embedded_model(name: str) -> Path:
    """Return the directory of a checkpoint shipped with the package."""
    package = find_spec("jaxserve.weights")  # found, not imported: it loads jax
    assert package is not None
    assert package.submodule_search_locations
    return Path(package.submodule_search_locations[0]) / name
