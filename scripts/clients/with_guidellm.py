"""guidellm: a benchmark at a constant rate and one at a fixed concurrency; its token counts match the server's."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Target, check, run


def benchmark(target: Target, profile: str) -> dict[str, Any]:
    """Return a small benchmark's report."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run"),
            *("--backend", f"kind=openai_http,target={target.url},model={target.model}"),
            *("--tokenizer", f"kind=hf_auto,model={target.directory}"),
            *("--profile", profile, "--constraint", "kind=max_requests,count=8"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
            *("--output", f"kind=json,path={directory}/report.json", "--disable-console"),
        ]
        done = subprocess.run(command, timeout=240, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        (report,) = Path(directory).glob("*.json")
        return json.loads(report.read_text())


def check_counts(report: dict[str, Any]) -> None:
    """Raise AssertionError unless all requests were served with the requested number of tokens."""
    (found,) = report["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals
    output = found["metrics"]["output_token_count"]["successful"]
    assert output["mean"] == 8, output


@check
def constant_rate(target: Target) -> None:
    check_counts(benchmark(target, "kind=constant,rate=8"))


@check
def fixed_concurrency(target: Target) -> None:
    check_counts(benchmark(target, "kind=concurrent,streams=4"))


run("guidellm")
