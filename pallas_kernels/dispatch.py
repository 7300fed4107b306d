"""Choice of a backend for an operation.

An operation keeps one mapping from backend name to backend, best first. "auto" takes the first that supports the call
and logs the choice once; it warns if that is the last, XLA itself, on an accelerator. A named backend runs, or the
caller is told why it cannot.

Products with matrices that ask for "auto" may be left to XLA all together, see `products_by`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TypeVar

import jax

AUTO = "auto"
XLA = "xla"

logger = logging.getLogger(__name__)

B = TypeVar("B")

_products: ContextVar[str] = ContextVar("products", default=AUTO)


class UnsupportedBackendError(ValueError):
    """Raised where the requested backend cannot run the call; names the reason and the backends that can."""


def select(op: str, backends: Mapping[str, B], requested: str, supports: Callable[[B], str | None]) -> str:
    """Return the name of the backend that runs this call.

    Args:
        op: name of the operation, for messages.
        backends: all backends of the operation by name, best first.
        requested: "auto" or the name of a backend.
        supports: function that returns the reason why a backend cannot run this call, or None if it can.

    Raises:
      UnsupportedBackendError: an unknown name, a named backend that cannot run the call, or "auto" when none can.
    """
    if requested == AUTO:
        return _select_best(op, backends, supports)
    if requested not in backends:
        raise UnsupportedBackendError(f"{op}: backend must be one of {[AUTO, *backends]}, got {requested!r}")
    reason = supports(backends[requested])
    if reason is not None:
        able = [name for name, backend in backends.items() if supports(backend) is None]
        raise UnsupportedBackendError(f"{op}: backend {requested!r} cannot run this call: {reason}; use one of {able}")
    return requested


@contextlib.contextmanager
def products_by(backend: str) -> Iterator[None]:
    """Make the products with matrices that are traced inside take a backend, unless they name one themselves.

    Args:
        backend: "auto", or "xla" for XLA instead of any kernel.
    """
    token = _products.set(backend)
    try:
        yield
    finally:
        _products.reset(token)


def products_choice() -> str:
    """Return the backend of `products_by` here, "auto" outside of it."""
    return _products.get()


def product_backend(requested: str, of_xla: str) -> str:
    """Return the backend that a product asks for: the requested one, or that of XLA inside of `products_by("xla")`.

    Args:
        requested: "auto" or the name of a backend.
        of_xla: name of the operation's backend that is XLA's own.
    """
    return of_xla if requested == AUTO and _products.get() == XLA else requested


def target_platform() -> str:
    """Return the platform to compile for, "cpu", "gpu" or "tpu": that of the current mesh's chip if it names one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind
    return "gpu" if "NVIDIA" in kind else "tpu" if kind.startswith("TPU") else kind.lower()


def import_failure(module: str, what: str) -> str | None:
    """Return the reason why a kernel cannot be imported, or None: names in Pallas differ between versions of jax."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        return f"{what} does not load in jax {jax.__version__}: {error}"
    return None


def _select_best(op: str, backends: Mapping[str, B], supports: Callable[[B], str | None]) -> str:
    refused: list[str] = []
    for name, backend in backends.items():
        reason = supports(backend)
        if reason is None:
            is_last_resort = len(refused) == len(backends) - 1 > 0 and target_platform() != "cpu"
            _log_choice(op, name, tuple(refused), logging.WARNING if is_last_resort else logging.INFO)
            return name
        refused.append(f"{name}: {reason}")
    raise UnsupportedBackendError(f"{op}: no backend supports this call ({'; '.join(refused)})")


@functools.cache  # cached so that the log shows a choice once, not on every trace
def _log_choice(op: str, name: str, refused: tuple[str, ...], level: int) -> None:
    passed_over = f" (passed over {'; '.join(refused)})" if refused else ""
    logger.log(level, "%s: using backend %r%s", op, name, passed_over)
