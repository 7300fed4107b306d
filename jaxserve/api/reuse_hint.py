"""ReuseHint: when a client expects to use a request's cached pages again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxserve.api import schema
from jaxserve.errors import RequestError, brief

MAX_GROUP_LEN = 256  # names are kept after their requests
IN_MEMORY_S, EXTENDED_S = 300.0, 86_400.0  # how long OpenAI and Anthropic keep prompts, by default and at most
_TIME = schema.number(0)


class ReuseHint(NamedTuple):
    """Expected next use of a request's cached pages.

    It changes only the order in which a tenant's unused pages are evicted, never a token, and keeps no page from
    eviction. Without a hint the least recently used page goes first.

    Attributes:
        group: name of the conversation; a request that continues an earlier one of the group replaces it, so that
            pages used only by the earlier one go first. At most 256 characters; empty for none.
        after_s: expected seconds from the request's end to the next use: 0 if unknown, infinite if none is expected.
        within_s: seconds after the request's end for which the hint counts; then it is as if there was none.
    """

    group: str = ""
    after_s: float = 0.0
    within_s: float = IN_MEMORY_S

    @classmethod
    def check(cls, hint: object) -> ReuseHint | None:
        """Return a caller's hint; RequestError if it is none."""
        if hint is None:
            return None
        if not isinstance(hint, cls) or not isinstance(hint.group, str):
            raise RequestError(f"reuse must be a ReuseHint whose group is a string, got {brief(hint)}")
        if len(hint.group) > MAX_GROUP_LEN:
            raise RequestError(
                f"the group of reuse must have at most {MAX_GROUP_LEN} characters, got {len(hint.group)}"
            )
        for name in ("after_s", "within_s"):
            value: Any = getattr(hint, name)
            if value != math.inf:
                _TIME.read(f"reuse.{name}", value, RequestError)
        return hint


NOT_AGAIN = math.inf  # `after_s` of requests that end their conversation
