"""The process's environment is read and set only in system/environment.py."""

import ast
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve import pallas_kernels, system, weights
from jaxserve.system.environment import ray_address

PACKAGES = [Path(system.__file__).parents[1], Path(pallas_kernels.__file__).parent, Path(weights.__file__).parent]
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses_of_environment(source: str) -> list[int]:
    """Return lines that name it, as an attribute of `os` or imported from there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [node.lineno] if node.value.id == "os" and node.attr in NAMES else []
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno] if NAMES & {alias.name for alias in node.names} else []
    return found


def test_no_other_file_touches_the_environment() -> None:
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert {path.name for path in files} >= {"environment.py", "deviceless.py", "load.py"}
    found = {path.name for path in files if uses_of_environment(path.read_text())}
    builds = "build.py"  # runs in setuptools' environment, which has no jaxserve
    assert found == {"environment.py", builds}


@pytest.mark.parametrize("imported", [False, True])
def test_the_mode_of_ray_is_set_before_ray_reads_it_or_never(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert ray_address() == "local"
    assert ("RAY_AUTH_MODE" in os.environ) is not imported
