"""Timeouts of clients, which headers and bodies specify: how long they wait for a reply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError

_READ = b"x-stainless-read-timeout"  # seconds without a byte, from OpenAI's and Anthropic's clients
_FIRST = b"x-litellm-stream-timeout"
_UNITS_S = {b"x-litellm-timeout": 1.0, b"x-envoy-expected-rq-timeout-ms": 1e-3, _FIRST: 1.0, _READ: 1.0}


class Timeouts(NamedTuple):
    """Maximum times after a request's arrival; infinite if its client specifies none.

    Attributes:
        total_s: time until the end of the reply.
        first_token_s: time until its first token.
    """

    total_s: float = math.inf
    first_token_s: float = math.inf

    def since(self, came_s: int | float, now_s: int | float) -> Timeouts:
        """Return the times that are left at `now_s` for a request that came at `came_s`."""
        passed_s = now_s - came_s
        return Timeouts(max(self.total_s - passed_s, 0.0), max(self.first_token_s - passed_s, 0.0))


def read_timeouts(headers: Sequence[tuple[bytes, bytes]], body: dict[str, Any], *, streams: bool) -> Timeouts:
    """Return a request's timeouts; the shortest of each kind counts.

    Args:
        headers: request headers. One that cannot be read is left out: gateways write them, not clients.
        body: its body, which may have the field `timeout`, in seconds.
        streams: True if the client gets its reply in parts, so that its read timeout is over with the first.

    Raises:
        BadRequestError: `timeout` is no positive number.
    """
    total_s = first_s = math.inf
    given = body.get("timeout")
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
            raise BadRequestError(f"timeout must be a positive number of seconds, got {brief(given)}", "timeout")
        try:
            total_s = float(given)
        except OverflowError:  # an integer of hundreds of digits
            total_s = math.inf
    for name, value in headers:
        if name in _UNITS_S:
            limit_s = _positive(value) * _UNITS_S[name]
            if name == _FIRST or (name == _READ and streams):
                first_s = min(first_s, limit_s)
            else:
                total_s = min(total_s, limit_s)
    return Timeouts(total_s, min(first_s, total_s))


def _positive(value: bytes) -> int | float:
    """Return the positive number in a header; infinity if there is none."""
    try:
        number = float(value)
    except ValueError:
        return math.inf
    return number if number > 0 else math.inf
