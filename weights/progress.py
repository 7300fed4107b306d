"""Progress bars for reading and writing weights."""

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

_DELAY_S = 1.0  # shorter transfers need no bar


def progress_bar(total_bytes: int, desc: str, use_tqdm: bool) -> Any:
    """Return a bar in bytes and bytes per second that vanishes when full; it shows only if stderr is a terminal."""
    if not use_tqdm or sys.stderr is None or not sys.stderr.isatty():
        return contextlib.nullcontext(SimpleNamespace(update=lambda num_bytes: None))
    from tqdm import tqdm  # noqa: PLC0415 - few engines start at a terminal

    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc=desc, leave=False, delay=_DELAY_S)
