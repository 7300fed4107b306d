"""Runs of one engine over many processes."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jaxserve.distributed.processes import initialize

__all__ = ["initialize"]


def __getattr__(name: str) -> object:
    """Import `initialize` on first use: it imports jax, and the command line must start fast."""
    if name != "initialize":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return import_module("jaxserve.distributed.processes").initialize
