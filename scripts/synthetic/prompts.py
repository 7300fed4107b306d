"""Random token id prompts."""

from collections.abc import Iterator

import numpy as np


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    """Yield random prompts endlessly; no two have a common page."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.integers(0, 32_000, (64, length)).tolist()
