"""Plots, which need matplotlib, the extra `bench`."""

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from jaxserve.errors import install_extra


def reason_missing() -> str | None:
    """Return why plots cannot be drawn and how to change that; None if they can."""
    if find_spec("matplotlib") is not None:
        return None
    return f"there will be no plots, because they need matplotlib; {install_extra('bench')}"


@contextlib.contextmanager
def plotted(path: str | os.PathLike[str], inches: tuple[float, float], title: str) -> Iterator[Any]:
    """Yield a matplotlib figure to draw on; write it to `path` as PNG at the end of the context."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot there is no global state

    figure = Figure(figsize=inches, layout="constrained")
    figure.suptitle(title, fontsize=10)
    yield figure
    figure.savefig(path, dpi=120, format="png")
