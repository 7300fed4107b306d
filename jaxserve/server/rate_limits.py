"""Rate limits: requests and tokens per tenant and minute, as token buckets. Time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.scheduling.request import Request

MINUTE_S = 60.0


class TokenBucket:
    """Bucket that fills at a constant rate, and whose content may be negative.

    In any time span it gives at most its size plus the inflow; `settle` corrects the content.

    Args:
        per_minute: its size, and the inflow per minute.
        now_s: the time; it is full.
    """

    def __init__(self, per_minute: int | float, now_s: int | float) -> None:
        self.size = float(per_minute)
        self._content, self._at_s = self.size, now_s

    def content(self, now_s: int | float) -> int | float:
        """Return the bucket's content at a time; negative for a debt."""
        if now_s > self._at_s:
            self._content = min(self._content + (now_s - self._at_s) * self.size / MINUTE_S, self.size)
            self._at_s = now_s
        return self._content

    def take(self, amount: int | float, now_s: int | float) -> int | float:
        """Take an amount and return 0; if the content is too small, return the seconds until it is enough."""
        wait_s = self.wait_s(amount, now_s)
        if not wait_s:
            self._content -= amount
        return wait_s

    def wait_s(self, amount: int | float, now_s: int | float) -> int | float:
        """Return the seconds from `now_s` until an amount can be taken; infinite if it exceeds the bucket's size."""
        content = self.content(now_s)
        if amount <= content + 1e-9:
            return 0.0
        return math.inf if amount > self.size else (amount - content) * MINUTE_S / self.size

    def settle(self, taken: int | float, used: int | float, now_s: int | float) -> None:
        """Put the unused part of a taken amount back, or take the excess."""
        self._content = min(self.content(now_s) + taken - used, self.size)

    def full_in_s(self, now_s: int | float) -> int | float:
        """Return the seconds from `now_s` until the bucket is full."""
        return (self.size - self.content(now_s)) * MINUTE_S / self.size


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant; None for no limit.

    Attributes:
        requests_per_minute: requests that may begin in a minute.
        tokens_per_minute: prompt and output tokens per minute.
        max_open_requests: unfinished requests.
        min_priority: minimum `priority`, which is the most urgent one.
        max_priority: maximum `priority`.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_open_requests: int | None = None
    min_priority: int = 0
    max_priority: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """Limit that a request would exceed.

    Attributes:
        kind: "requests" or "tokens".
        most: the limit.
        wait_s: time until the request may come again; infinite if it is too large for the limit.
    """

    kind: str
    most: int
    wait_s: int | float

    @property
    def message(self) -> str:
        """Error message for the client."""
        advice = "wait" if self.wait_s < math.inf else "send less at once"
        return f"a key must send at most {self.most} {self.kind} per minute; {advice}"


def tokens_to_take(requests: Sequence[Request]) -> int:
    """Return the tokens that samples take when they begin: their prompts and maximum outputs."""
    return sum(request.num_prompt_tokens + (request.params.max_tokens or 0) for request in requests)


def tokens_used(groups: Sequence[RequestGroup]) -> int:
    """Return the prompt tokens of all samples plus their output tokens so far."""
    outputs = [(len(group.output.prompt_token_ids), each.metrics) for group in groups for each in group.output.outputs]
    return sum(prompt_len + metrics.num_output_tokens for prompt_len, metrics in outputs)


class RateLimits:
    """Buckets by tenant, for any thread. Tenants not seen for some minutes have full buckets, which are dropped.

    Args:
        common: limits for tenants without their own.
        own: limits by tenant; None takes the value in `common`.
    """

    def __init__(self, common: Limits, own: Mapping[str, Limits] = {}) -> None:
        self._common, self._own = common, dict(own)
        self._buckets: dict[str, dict[str, TokenBucket]] = {}
        self._swept_s = 0.0
        self._lock = RLock()

    def tenant_limits(self, tenant: str) -> Limits:
        """Return a tenant's limits; a common limit replaces a missing one."""
        own, common = self._own.get(tenant, Limits()), self._common
        return Limits(
            own.requests_per_minute or common.requests_per_minute,
            own.tokens_per_minute or common.tokens_per_minute,
            own.max_open_requests or common.max_open_requests,
            own.min_priority,
            own.max_priority,
        )

    def excess(self, tenant: str, num_tokens: int, now_s: int | float) -> Excess | None:
        """Return the limit that a further request with `num_tokens` would exceed for longest; None without excess."""
        amounts = {"requests": 1, "tokens": num_tokens}
        with self._lock:
            buckets = self._tenant_buckets(tenant, now_s).items()
            waits = [Excess(kind, int(each.size), each.wait_s(amounts[kind], now_s)) for kind, each in buckets]
        return max((each for each in waits if each.wait_s), key=lambda each: each.wait_s, default=None)

    def take(self, tenant: str, num_tokens: int, now_s: int | float) -> Excess | None:
        """Take a request with `num_tokens` from the tenant's buckets and return None, or return the exceeded limit."""
        with self._lock:
            found = self.excess(tenant, num_tokens, now_s)
            if found is None:
                for kind, bucket in self._tenant_buckets(tenant, now_s).items():
                    bucket.take(1 if kind == "requests" else num_tokens, now_s)
        return found

    def settle(self, tenant: str, taken: int, used: int, now_s: int | float) -> None:
        """Put the tokens that a tenant's request has taken and not used back into its bucket."""
        with self._lock:
            if (bucket := self._tenant_buckets(tenant, now_s).get("tokens")) is not None:
                bucket.settle(taken, used, now_s)

    def headers(self, tenant: str, now_s: int | float) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers with a tenant's limits and remaining amounts."""
        headers = []
        with self._lock:
            for kind, bucket in self._tenant_buckets(tenant, now_s).items():
                left = max(int(bucket.content(now_s)), 0)
                values = {"limit": int(bucket.size), "remaining": left, "reset": _duration(bucket.full_in_s(now_s))}
                headers += [
                    (f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()) for name, value in values.items()
                ]
        return headers

    def _tenant_buckets(self, tenant: str, now_s: int | float) -> dict[str, TokenBucket]:
        """Return a tenant's buckets for limited "requests" and "tokens"; now and then, drop all full ones."""
        if now_s - self._swept_s > MINUTE_S:
            self._swept_s = now_s
            for name, buckets in list(self._buckets.items()):
                if all(bucket.content(now_s) >= bucket.size for bucket in buckets.values()):
                    del self._buckets[name]
        found = self._buckets.get(tenant)
        if found is None:
            limits = self.tenant_limits(tenant)
            sizes = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
            found = {kind: TokenBucket(size, now_s) for kind, size in sizes.items() if size}
            if found:
                self._buckets[tenant] = found
        return found


def _duration(seconds: int | float) -> str:
    """Return a time as OpenAI's headers have it, such as 6m0s, 1.5s or 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
