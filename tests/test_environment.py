"""The process's environment is read and set only in environment.py."""

import ast
from pathlib import Path

import jaxserve

ROOT = Path(jaxserve.__file__).parent
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
    files = [path for top in (ROOT, *(p for p in ROOT.iterdir() if p.is_symlink())) for path in top.rglob("*.py")]
    assert {path.name for path in files} >= {"environment.py", "deviceless.py", "load.py"}
    found = {str(path.relative_to(ROOT)): uses_of_environment(path.read_text()) for path in files}
    builds = "pallas_kernels/native/build.py"  # runs in setuptools' environment, which has no jaxserve
    assert {path for path, lines in found.items() if lines} == {"environment.py", builds}
