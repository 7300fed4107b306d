"""How far reading and writing of weights is."""

from typing import Any

from tqdm import tqdm

_DELAY_S = 1.0  # nobody needs a bar for less


def progress_bar(total_bytes: int, desc: str, use_tqdm: bool) -> Any:
    """A bar in bytes and bytes per second, gone when it is full; None but where stderr is a terminal."""
    disable = None if use_tqdm else True  # None leaves it to whether stderr is a terminal
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc=desc, leave=False, delay=_DELAY_S, disable=disable)
