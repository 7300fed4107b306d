"""The table of families says of each what test results say, and of all others that they are not tested."""

import json

import pytest

import family_table
from jaxserve.models.registry import FAMILIES

CASES = """
<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[phi3-0]"/>
<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[phi3-1]"/>
<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[gpt_neox-0]">
  <failure message="far"/>
</testcase>
<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[gpt_neox-1]"/>
<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[glm-0]">
  <skipped/>
</testcase>
<testcase classname="tests.models.test_parity" name="test_one_token"/>
<testcase classname="tests.sharded.devices.check_logits" name="test_logits_match_transformers[olmo3]"/>
<testcase classname="tests.deviceless.test_whole_models" name="test_steps_work_in_place[phi-4-mini-h200-6-8-8]"/>
<testcase classname="tests.deviceless.test_whole_models" name="test_steps_work_in_place[command-r7b-v6e:1x1-None-8-8]"/>
<testcase classname="tests.deviceless.test_whole_models" name="test_first_layers_work_in_place[qwen3.5-9b-v6e:1x1]"/>
<testcase classname="tests.deviceless.test_whole_models" name="test_first_layers_work_in_place[phi-4-mini-h200]"/>
"""


def lines_of(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| [")]
    return {name.strip("`"): cells for _, name, *cells in rows}


@pytest.fixture
def run(tmp_path):
    def run(cases: str) -> dict[str, list[str]]:
        (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        results, table = tmp_path / "results.json", tmp_path / "table.md"
        family_table.main([str(tmp_path / "junit.xml"), "--results", str(results), "--table", str(table)])
        return lines_of(table.read_text())

    return run


def test_table_cells_equal_the_results(run):
    none = family_table.NOT_TESTED
    lines = run(CASES)
    assert lines.keys() == FAMILIES.keys()
    expected = {
        "Phi3ForCausalLM": ["yes (2)", none, "yes (2)", none],
        "GPTNeoXForCausalLM": ["failed (1 of 2)", none, none, none],
        "Olmo3ForCausalLM": [none, "yes (1)", none, none],
        "Cohere2ForCausalLM": [none, none, none, "yes (1)"],
        "Qwen3_5ForCausalLM": [none, none, none, "yes (1)"],
    }
    assert lines == {name: expected.get(name, [none] * 4) for name in FAMILIES}


def test_new_results_replace_old_ones_of_the_same_architecture(run):
    run(CASES)
    again = '<testcase classname="tests.models.test_parity" name="test_random_configs_match_transformers[{}-0]"/>'
    lines = run(again.format("gpt_neox"))
    assert lines["GPTNeoXForCausalLM"][0] == "yes (1)"
    assert lines["Phi3ForCausalLM"][:3] == ["yes (2)", family_table.NOT_TESTED, "yes (2)"]


def test_the_table_is_that_of_the_results_beside_it():
    results = json.loads(family_table.RESULTS.read_text())
    assert family_table.TABLE.read_text() == family_table.TEXT + family_table.render(results)
