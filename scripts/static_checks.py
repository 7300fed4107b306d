"""Run mypy and import-linter on jaxserve as it is installed, with the two packages that lie beside it in a checkout.

    python scripts/static_checks.py               # both
    python scripts/static_checks.py mypy ARGS     # one of them, with arguments of its own

Both tools follow folders instead of the package mapping in `pyproject.toml`, so they get a folder of links.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = {"mypy": ["--config-file", "pyproject.toml", "--cache-dir", str(ROOT / ".mypy_cache")], "lint-imports": []}


def link_packages(directory: Path) -> None:
    """Make a folder with `pyproject.toml` and the packages below the names that they are imported by."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    (directory / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (directory / "jaxserve").mkdir()
    for path in (ROOT / "jaxserve").iterdir():
        (directory / "jaxserve" / path.name).symlink_to(path)
    for package, folder in mapping.items():
        (directory / package.replace(".", "/")).symlink_to(ROOT / folder)


def main(arguments: list[str]) -> int:
    """Return the first exit status that is not 0."""
    with tempfile.TemporaryDirectory() as directory:
        link_packages(Path(directory))
        for name in arguments[:1] or CHECKS:
            command = [Path(sys.executable).with_name(name), *CHECKS[name], *arguments[1:]]
            if status := subprocess.run(command, cwd=directory, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
