"""Progress bars for reading and writing weights."""

from typing import Any

from tqdm import tqdm

_DELAY_S = 1.0  # shorter transfers need no bar


def progress_bar(total_bytes: int, desc: str, use_tqdm: bool) -> Any:
    """Return a bar in bytes and bytes per second that vanishes when full; it shows only if stderr is a terminal."""
    disable = None if use_tqdm else True  # None makes tqdm check for a terminal
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc=desc, leave=False, delay=_DELAY_S, disable=disable)
