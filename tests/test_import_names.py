"""Module names: jaxserve claims one name on the import path, so a user's own modules never shadow its parts."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_module_of_the_user_beside_the_script_is_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("weights", "pallas_kernels"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} beside the script was imported')\n")
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom jaxserve import LLM, pallas_kernels, weights\n"
        "print(pallas_kernels.__name__, weights.__name__)\n"
    )
    run = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "jaxserve.pallas_kernels jaxserve.weights\n"), run.stderr
