"""Timeouts of clients: until when somebody waits for a reply, as headers and bodies say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError

_TOTAL = {b"x-litellm-timeout": 1.0, b"x-envoy-expected-rq-timeout-ms": 1e-3}  # headers and their units in seconds
_FIRST = {b"x-litellm-stream-timeout": 1.0}
_READ = b"x-stainless-read-timeout"  # seconds without a byte, from OpenAI's and Anthropic's clients


class Timeouts(NamedTuple):
    """Times from the arrival of a request on; infinite where nothing is said.

    Attributes:
        total_s: time until the end of the reply.
        first_token_s: time until its first token.
    """

    total_s: float = math.inf
    first_token_s: float = math.inf

    def since(self, came_s: int | float, now_s: int | float) -> Timeouts:
        """Return what is left of the times."""
        passed_s = now_s - came_s
        return Timeouts(max(self.total_s - passed_s, 0.0), max(self.first_token_s - passed_s, 0.0))


def read_timeouts(headers: Sequence[tuple[bytes, bytes]], body: dict[str, Any], *, streams: bool) -> Timeouts:
    """Return the timeouts of a request; the shortest of each kind counts.

    Args:
        headers: headers of the request. One that cannot be read is left out: gateways write them, not clients.
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
        if name in _TOTAL:
            total_s = min(total_s, _number(value) * _TOTAL[name])
        elif name in _FIRST:
            first_s = min(first_s, _number(value) * _FIRST[name])
        elif name == _READ and streams:
            first_s = min(first_s, _number(value))
        elif name == _READ:
            total_s = min(total_s, _number(value))
    return Timeouts(total_s, min(first_s, total_s))


def _number(value: bytes) -> int | float:
    try:
        number = float(value)
    except ValueError:
        return math.inf
    return number if number > 0 else math.inf
