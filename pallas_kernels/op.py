"""Ops: an op is a value with several backends, and each call selects one backend.

An op package declares a `Problem` (the static parameters by which a backend decides if it can run a call), one
backend per way to compute it, and an `Op` that lists the backends, best first. A backend whose kernel is written in
Pallas extends `pallas_kernel.PallasKernel`, which checks the platform and the chip and chooses block sizes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxserve.pallas_kernels.target import target_platform

AUTO = "auto"
XLA = "xla"

logger = logging.getLogger(__name__)

B = TypeVar("B")
T = TypeVar("T")


class UnsupportedBackendError(ValueError):
    """Raised if no backend, or not the requested one, can run a call; the message has the reasons."""


@dataclass(frozen=True)
class Op(Generic[B]):
    """An operation, such as attention, and its implementations (backends).

    Attributes:
        name: name of the operation in messages and logs.
        backends: all backends by name, best first.
    """

    name: str
    backends: Mapping[str, B]

    def select(self, requested: str, unsupported_reason: Callable[[B], str | None]) -> str:
        """Return the name of the backend that runs a call.

        "auto" selects the first backend that supports the call and logs the choice once, as a warning if it is the last
        resort on an accelerator.

        Args:
            requested: "auto" or a backend name.
            unsupported_reason: function that returns the reason why a backend cannot run the call, or None if it can.

        Raises:
            UnsupportedBackendError: the name is unknown, the named backend cannot run the call, or no backend can.
        """
        if requested != AUTO and requested not in self.backends:
            known = [AUTO, *self.backends]
            raise UnsupportedBackendError(f"{self.name}: backend must be one of {known}, got {requested!r}")
        if requested == AUTO:
            return self._select_best(unsupported_reason)
        reason = unsupported_reason(self.backends[requested])
        if reason is not None:
            able = [name for name, backend in self.backends.items() if unsupported_reason(backend) is None]
            raise UnsupportedBackendError(
                f"{self.name}: backend {requested!r} cannot run this call: {reason}; use one of {able}"
            )
        return requested

    def _select_best(self, unsupported_reason: Callable[[B], str | None]) -> str:
        """Return the name of the first backend for which `unsupported_reason` returns None, and log the choice."""
        skipped: list[str] = []
        for name, backend in self.backends.items():
            reason = unsupported_reason(backend)
            if reason is None:
                is_last_resort = len(skipped) == len(self.backends) - 1 > 0 and target_platform() != "cpu"
                log_choice(self.name, name, tuple(skipped), logging.WARNING if is_last_resort else logging.INFO)
                return name
            skipped.append(f"{name}: {reason}")
        raise UnsupportedBackendError(f"{self.name}: no backend supports this call ({'; '.join(skipped)})")


@contextlib.contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable to a value inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@functools.cache  # cached so that the log shows a choice once, not on every trace
def log_choice(op: str, name: str, skipped: tuple[str, ...], level: int) -> None:
    """Log which backend an op uses.

    Args:
        op: name of the op.
        name: name of the backend.
        skipped: for each better backend, its name and the reason why it cannot run the call.
        level: `logging` level.
    """
    reasons = f" (skipped {'; '.join(skipped)})" if skipped else ""
    logger.log(level, "%s: using backend %r%s", op, name, reasons)
