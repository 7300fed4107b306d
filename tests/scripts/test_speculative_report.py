"""The speculative report, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "speculative_report.py"


@pytest.mark.full
def test_report_shows_every_proposer_and_that_a_random_draft_fails(tmp_path: Path) -> None:
    """The script itself compares the greedy tokens of all cases."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n    return a + b\n\n\ndef add("}) + "\n")
    out = tmp_path / "report"
    options = ["--prompts", str(prompts), "--max-tokens", "40", "--rounds", "1", "--num-drafts", "2"]
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(out), *options], check=True, timeout=400)
    cases = {case["name"]: case for case in json.loads((out / "metrics.json").read_text())["cases"]}
    assert cases["random draft, k = 2"]["acceptance"] < 0.2
    drafted = cases["draft model, k = 2"]
    assert 1 <= drafted["tokens_per_pass"] <= 3
    assert 0.8 < drafted["theory"]["ratio"] < 1.25
    steps = [json.loads(line) for line in (out / "steps-draft-model--k---2.jsonl").read_text().splitlines()]
    assert sum(step["num_accepted_tokens"] for step in steps) > 0
    assert {"wall_ms", "kv_bytes", "kv_memory_bytes", "num_pages_used"} <= steps[0].keys()
    page = (out / "index.html").read_text()
    assert page.count("<img") == len(list(out.glob("*.png"))) == 5
    assert 'class="d"' in page
