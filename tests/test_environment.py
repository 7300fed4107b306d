"""The process's environment is read and set only in system/environment.py."""

import ast
from pathlib import Path

from jaxserve import pallas_kernels, system, weights

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
