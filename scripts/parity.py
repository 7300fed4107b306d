"""Command line shared by scripts that compare families of random tiny models with another implementation."""

import argparse
import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


def run(
    name: str,
    doc: str | None,
    families: Collection[str],
    compare: Callable[[str, Path], Results],
    table: Callable[[dict[str, Results]], str],
    tolerance: float,
) -> int:
    """Compare the families that the command line names; print a table and a line of JSON. Return 1 if any differs.

    Args:
        name: the script's name in its results.
        doc: the script's description.
        families: all families.
        compare: function from a family and an empty directory to results, each with `max_error` and perhaps `same_ids`.
        table: function from the results by family to text.
        tolerance: largest `max_error` of equal families.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    results = {}
    for family in args.families:
        with tempfile.TemporaryDirectory() as directory:
            results[family] = compare(family, Path(directory))
    found = [each for rows in results.values() for each in rows.values()]
    is_equal = all(each.get("same_ids", True) and each["max_error"] < tolerance for each in found)
    text = json.dumps({"bench": name, "tolerance": tolerance, "families": results})
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(table(results))
    print(text)
    return 0 if is_equal else 1


def cell(found: dict[str, Any] | None) -> str:
    """Return one result as text."""
    if found is None:
        return "-"
    return f"{found['max_error']:.0e}{'' if found.get('same_ids', True) else ', other ids'}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
