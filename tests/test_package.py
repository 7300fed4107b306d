"""Modules loaded by importing: slow ones only on use."""

import json
import subprocess
import sys

IMPORT = """
import json, sys, time
started = time.perf_counter()
import jaxserve
seconds = time.perf_counter() - started
loaded = sorted({"jax", "torch", "transformers"} & sys.modules.keys())
print(json.dumps({"seconds": seconds, "loaded": loaded}))
"""


def test_import_is_light() -> None:
    """Modules loaded by serving: `tests/server/test_operations.py`."""
    run = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    result = json.loads(run.stdout)
    assert result["loaded"] == []
    assert result["seconds"] < 1
