"""The package: what is installed, and which slow modules importing it loads."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

IMPORT = """
import json, sys, time
started = time.perf_counter()
import jaxserve
seconds = time.perf_counter() - started
loaded = sorted({"jax", "torch", "transformers"} & sys.modules.keys())
jaxserve.LLM
import gc
modules = [name for name in sys.modules if name.partition(".")[0] not in ("jax", "jaxlib")]
print(json.dumps({"seconds": seconds, "loaded": loaded, "modules": modules, "collects": gc.isenabled()}))
"""
# Modules that an engine of the embedded model does not need before its first token.
SLOW = ("flax", "orbax", "psutil", "rich", "tensorstore", "torch", "tqdm", "transformers", "yaml")
RARE = (
    *("assembly.client", "models.granite", "models.moe", "models.qwen_hybrid", "server", "spec_decode"),
    *("text.common_tokens", "text.structured_output", "tools"),
)


def test_import_is_light() -> None:
    """Modules loaded by serving: `tests/server/test_operations.py`."""
    run = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    result = json.loads(run.stdout)
    assert result["loaded"] == []
    assert result["seconds"] < 1
    unneeded = (*SLOW, *(f"jaxserve.{name}" for name in RARE))
    assert not [name for name in result["modules"] if f"{name}.".startswith(tuple(f"{each}." for each in unneeded))]
    assert result["collects"], "garbage is collected again after the imports"


def test_all_packages_are_installed() -> None:
    """setuptools finds no packages below names that `package-dir` maps to other folders."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"jaxserve": "jaxserve", **options["package-dir"]}
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in folders.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(options["packages"]) == sorted(found)
