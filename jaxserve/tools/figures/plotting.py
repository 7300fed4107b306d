"""Plots need matplotlib, the extra `bench`."""

from importlib.util import find_spec

from jaxserve.errors import install_extra


def reason_missing() -> str | None:
    """Return why plots cannot be drawn and how to change that; None if they can."""
    if find_spec("matplotlib") is not None:
        return None
    return f"there will be no plots, because they need matplotlib; {install_extra('bench')}"
