"""The speculative report, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.api.token_tree import TokenTree

SCRIPT = Path(__file__).parents[2] / "scripts" / "speculative_report.py"
sys.path.insert(0, str(SCRIPT.parent))  # the script imports its modules from its own folder
from speculative.runs import expected_of_tree, theory  # noqa: E402


@pytest.mark.full
@pytest.mark.exhaustive
def test_report_shows_every_proposer_and_that_a_random_draft_fails(tmp_path: Path) -> None:
    """The script itself compares the greedy tokens of all cases."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n    return a + b\n\n\ndef add("}) + "\n")
    out = tmp_path / "report"
    options = ["--prompts", str(prompts), "--max-tokens", "40", "--rounds", "1", "--num-drafts", "2"]
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(out), *options], check=True, timeout=1500)
    cases = {case["name"]: case for case in json.loads((out / "metrics.json").read_text())["cases"]}
    assert cases["random draft, k = 2"]["acceptance"] < 0.2
    for name in ("draft model, k = 2", "Medusa heads, k = 2", "EAGLE-3 layer, k = 2"):
        assert 1 < cases[name]["tokens_per_pass"] <= 3
        assert 0.8 < cases[name]["theory"]["ratio"] < 1.25
    for name, num_ranks in (("tree of 3 levels", 3), ("Medusa heads, wide tree", 6)):
        assert 0.7 < cases[name]["theory"]["ratio"] < 1.4
        assert [len(level) for level in cases[name]["theory"]["node_acceptance"]] == [num_ranks] * 3
    assert all(case["pass_ms"] > 0 for case in cases.values())
    steps = [json.loads(line) for line in (out / "steps-draft-model--k---2.jsonl").read_text().splitlines()]
    assert sum(step["num_accepted_tokens"] for step in steps) > 0
    assert {"wall_ms", "kv_bytes", "kv_memory_bytes", "num_pages_used"} <= steps[0].keys()
    page = (out / "index.html").read_text()
    assert page.count("<img") == len(list(out.glob("*.png"))) == 5
    assert 'class="d"' in page


def test_expectation_of_a_tree_sums_the_products_of_its_paths() -> None:
    tree = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert expected_of_tree(tree, [[0.5, 0.2], [0.6, 0.1]]) == pytest.approx([1, 1.7, 1.7 + 0.5 * 0.7 + 0.2 * 0.6])


def test_chain_has_the_expectation_of_a_tree_with_one_child_each() -> None:
    """Two rounds of 2 and 3 tokens, of which 2 and 0 are accepted: 2 of the 3 tokens that were looked at."""
    drafts = [(2, 2, 3), (3, 0, 1)]
    chain = theory(drafts)
    tree = theory(drafts, TokenTree.from_paths([(0,), (0, 0), (0, 0, 0)]), [[chain["p"]]] * 3)
    assert chain["p"] == pytest.approx(2 / 3)
    assert chain["expected"] == pytest.approx(((1 - (2 / 3) ** 3) + (1 - (2 / 3) ** 4)) / (1 / 3) / 2)
    assert (tree["expected"], tree["ratio"]) == pytest.approx((chain["expected"], chain["ratio"]))
