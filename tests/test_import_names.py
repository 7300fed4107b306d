"""Module names: jaxserve claims one name on the import path, so a user's own modules never shadow its parts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["weights", "pallas_kernels"])
def test_a_module_of_the_user_beside_the_script_is_not_taken_for_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the module beside the script was imported')\n")
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom jaxserve import LLM, {name}\nprint({name}.__name__)\n"
    )
    run = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, f"jaxserve.{name}\n"), run.stderr
