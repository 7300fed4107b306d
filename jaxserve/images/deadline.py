"""Deadline: time limit for loading and decoding a prompt's images."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.errors import BusyError, RequestError


class Deadline:
    """Time limit for loading and decoding all images of a prompt.

    Args:
        limit_s: the time, from now on.
    """

    def __init__(self, limit_s: int | float) -> None:
        self._limit_s, self._until_s = limit_s, time.monotonic() + limit_s
        self._waited_s = 0.0

    def left_s(self, limit_s: int | float) -> float:
        """Return the time that is left for an image, at most `limit_s`.

        Raises:
            RequestError: none is left; a BusyError if most of it has been spent on waiting for others.
        """
        left_s = self._until_s - time.monotonic()
        if left_s > 0:
            return min(left_s, limit_s)
        if self._waited_s > self._limit_s / 2:
            raise BusyError("images of others are being decoded; try again")
        raise RequestError(
            f"the images of a prompt must be loaded and decoded in {self._limit_s:g} s, and the first ones took that "
            "long; send fewer or smaller ones"
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the context as spent on waiting for others."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began_s
