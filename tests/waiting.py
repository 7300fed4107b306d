"""A wait that ends: a fault must fail a test, not hang it."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"it has not come true in {seconds} s"
        time.sleep(0.005)
