"""Aligned text tables."""

from collections.abc import Iterable, Sequence
from typing import Any

Row = Sequence[str]


def number(value: Any) -> str:
    """Format with three significant digits, or all digits before the point if there are more; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def align(rows: Iterable[Row], *, header: bool = False) -> str:
    """Align columns; all but the first are right-aligned if there is a header, else left-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if header else str.ljust
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(pad(cell, width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
