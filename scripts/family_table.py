"""Write a table of model families with their passed tests, from the registry and test results.

    pytest -n 0 -m "full or not full" --junitxml parity.xml tests/models/test_parity.py -k random_configs
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest -n 0 -m "full or not full" \
        --junitxml split.xml tests/sharded/devices/check_logits.py -k test_logits_match
    JAX_PLATFORMS=cpu pytest -n 0 -m deviceless --junitxml compiled.xml tests/deviceless/test_whole_models.py
    python scripts/family_table.py parity.xml split.xml compiled.xml

Results are added to `--results`, replacing an architecture's old ones; skipped tests do not count. Without result files
the table is rewritten.
"""

import argparse
import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxserve.models.registry import FAMILIES, text_config

ROOT = Path(__file__).parent.parent
RESULTS, TABLE = ROOT / "scripts/results/families.json", ROOT / "jaxserve/models/README.md"
CONFIGS = ROOT / "jaxserve/tools/planner/configs"
NOT_TESTED = "not tested"
Outcomes = dict[str, int]  # numbers of passed and failed tests
Results = dict[str, dict[str, Outcomes]]  # outcomes by check and architecture
TEXT = """# Families

Each family is a `ModelFamily` in one of these files, which [`registry.py`](registry.py) lists.
[CONTRIBUTING.md](../../CONTRIBUTING.md#the-change-map) lists the steps to add one; the
[user guide](../README.md#models) lists each family's features.

[`scripts/family_table.py`](../../scripts/family_table.py) writes this table from the registry and from the test results
in [`families.json`](../../scripts/results/families.json), with the number of tests in parentheses:

- **parity**: random tiny models have float32 logits within 1e-4 of transformers, and the same greedy tokens;
- **tensor parallel**: the same over 2, 4 and 8 virtual devices;
- **compiled**: the chip's compiler, without the chip, compiles a published model's steps to machine code, with all
  layers or one per layer type, and updates the pool in place.

"""


@dataclass(frozen=True)
class Check:
    """Test category, a table column.

    Attributes:
        title: column title.
        module: last part of the test module's name.
        pattern: test name pattern, whose first group names the model.
        architecture: returns that model's architecture; None if it has none of its own.
    """

    title: str
    module: str
    pattern: str
    architecture: Callable[[str], str | None]


@cache
def family_architecture(name: str) -> str | None:
    """Return a test checkpoint family's architecture."""
    from tests import checkpoints  # noqa: PLC0415 - imports torch

    return str(checkpoints.hf_dict(name)["architectures"][0]) if name in checkpoints.FAMILIES else None


def config_architecture(name: str) -> str | None:
    """Return a planner config's architecture."""
    path = CONFIGS / f"{name}.json"
    return str(text_config(json.loads(path.read_text()))["architectures"][0]) if path.is_file() else None


COMPILED = r"test_(?:steps|first_layers)_work_in_place\[(.+?)-{}[^-\]]*[-\]]"
CHECKS = {
    "parity": Check(
        "parity", "test_parity", r"test_random_configs_match_transformers\[(.+)-\d+\]", family_architecture
    ),
    "split": Check(
        "tensor parallel", "check_logits", r"test_logits_match_transformers\[(.+?)(?: over \d+)?\]", family_architecture
    ),
    "h200": Check("compiled for H200", "test_whole_models", COMPILED.format("h200"), config_architecture),
    "v6e": Check("compiled for v6e", "test_whole_models", COMPILED.format("v6e"), config_architecture),
}


def read_results(paths: Sequence[Path]) -> Results:
    """Return the outcomes in pytest's result files."""
    found: Results = {name: defaultdict(lambda: {"passed": 0, "failed": 0}) for name in CHECKS}
    for case in (case for path in paths for case in ET.parse(path).getroot().iter("testcase")):
        children = {child.tag for child in case}
        if "skipped" in children:
            continue
        for name, check in CHECKS.items():
            is_own = case.get("classname", "").rpartition(".")[2] == check.module
            match = re.fullmatch(check.pattern + ".*", case.get("name", "")) if is_own else None
            if match is not None and (architecture := check.architecture(match[1])) is not None:
                found[name][architecture]["failed" if children & {"failure", "error"} else "passed"] += 1
    return found


def merged(old: Results, new: Results) -> Results:
    """Return the old results, with new ones for the same check and architecture."""
    return {name: dict(sorted({**old.get(name, {}), **new.get(name, {})}.items())) for name in CHECKS}


def cell(outcomes: Outcomes | None) -> str:
    """Return a check's table cell."""
    if outcomes is None or not sum(outcomes.values()):
        return NOT_TESTED
    passed, failed = outcomes["passed"], outcomes["failed"]
    return f"failed ({failed} of {passed + failed})" if failed else f"yes ({passed})"


def render(results: Results) -> str:
    """Return the table, a line per registered architecture."""
    titles = ["family", "architecture", *(check.title for check in CHECKS.values())]
    lines = [titles, ["---"] * len(titles)]
    families = {name: family.parse.__module__.rpartition(".")[2] for name, family in FAMILIES.items()}
    for name, module in sorted(families.items(), key=lambda pair: (pair[1], pair[0])):
        cells = [cell(results.get(check, {}).get(name)) for check in CHECKS]
        lines.append([f"[`{module}`]({module}.py)", f"`{name}`", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Add results and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", nargs="*", type=Path, help="pytest's results, as --junitxml writes them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON with the results of all runs")
    parser.add_argument("--table", type=Path, default=TABLE, help="file that the table is written to")
    args = parser.parse_args(argv)
    old: Results = json.loads(args.results.read_text()) if args.results.is_file() else {}
    results = merged(old, read_results(args.junit))
    args.results.write_text(json.dumps(results, indent=1) + "\n")
    args.table.write_text(TEXT + render(results))


if __name__ == "__main__":
    main()
