"""The registry finds each model family in its module."""

from importlib import import_module
from pathlib import Path

from jaxserve import models
from jaxserve.models.family import ModelFamily
from jaxserve.models.registry import FAMILIES


def test_every_family_is_found_in_its_module() -> None:
    modules = sorted(path.stem for path in Path(models.__path__[0]).glob("*.py") if path.stem != "registry")
    found: dict[str, ModelFamily] = {}
    for module in modules:
        found |= getattr(import_module(f"jaxserve.models.{module}"), "FAMILIES", {})
    assert dict(FAMILIES) == found
