"""Modules loaded by importing and serving: slow ones only on use, and never torch."""

import json
import subprocess
import sys

SERVE = """
import json, sys, time
started = time.perf_counter()
import jaxserve
seconds = time.perf_counter() - started
before = sorted({"jax", "torch", "transformers"} & sys.modules.keys())
options = {"compile_ahead": "minimal", "max_num_seqs": 1, "max_num_batched_tokens": 1, "multi_step": 1}
options |= {"compilation_cache_dir": None}
jaxserve.LLM(**options).generate("def ", jaxserve.SamplingParams(max_tokens=2), use_tqdm=False)
after = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "nvidia", "triton"))
print(json.dumps({"seconds": seconds, "before": before, "after": after}))
"""


def test_import_is_light_and_serving_never_imports_torch() -> None:
    run = subprocess.run([sys.executable, "-c", SERVE], check=True, capture_output=True, text=True)
    result = json.loads(run.stdout)
    assert result["before"] == []
    assert result["after"] == []
    assert result["seconds"] < 1
