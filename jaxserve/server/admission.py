"""Admission of requests by load, and the features that they lose meanwhile.

A request passes three gates: before its body is read, by counts; before its prompt is tokenised, by the estimated wait
of its class and the prompt's minimum number of tokens; and after that, by its exact length. An admitted request is
never refused for load.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.core.events import DraftsAllowed
from jaxserve.openai.errors import BadRequestError
from jaxserve.server.degradation import Ladder
from jaxserve.server.rate_limits import Excess, Limits, RateLimits, tokens_to_take, tokens_used

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxserve.assembly.engine import Engine
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.server.config import ServerConfig
    from jaxserve.server.observer import Observer
    from jaxserve.server.streams import Streams

LOOK_S = 0.1  # time between two looks at the load
COALESCED_S = 0.05  # time between two events of a stream under load


@dataclass(eq=False)
class RefusedError(BadRequestError):
    """Refusal of a request because of load or a limit.

    Attributes:
        retry_after_s: seconds after which it may come again; infinite for never.
    """

    retry_after_s: int | float = 1.0


def exceeds_fair_share(num_open: Mapping[str, int], tenant: str) -> bool:
    """Return whether a tenant has more unfinished requests than the mean over all tenants with any."""
    total, own = sum(num_open.values()), num_open.get(tenant, 0)
    num_tenants = len(num_open) + (tenant not in num_open)
    return num_tenants > 1 and own * num_tenants > total


class Admission:
    """Admission of requests by load and by their tenants' limits, and the ladder of features that load disables.

    Args:
        engine: the engine.
        config: server options.
        observer: counts refusals, and estimates waits.
        limits: limits by tenant, for tenants with their own.

    Attributes:
        num_open: unfinished samples by tenant.
        ladder: features that requests do without.
    """

    def __init__(
        self, engine: Engine, config: ServerConfig, observer: Observer, limits: Mapping[str, Limits] | None = None
    ) -> None:
        self._engine, self._config, self._observer = engine, config, observer
        common = Limits(
            config.requests_per_minute_per_key, config.tokens_per_minute_per_key, config.max_open_requests_per_key
        )
        self.limits = RateLimits(common, limits or {})
        self.num_open: dict[str, int] = {}
        self.ladder = Ladder(config.enabled_degradation)
        self._targets_s = config.ttft_targets_s
        self._longest_token = math.inf  # characters
        self._held: deque[tuple[int, asyncio.Future[None]]] = deque()  # requests below class 0, in order of arrival
        self._is_draining = False
        self._may_draft: bool | None = None  # unknown until it is sent
        self._task: asyncio.Task[None] | None = None
        self._streams: Streams | None = None

    # The life of the server

    def start(self, streams: Streams) -> None:
        """Begin to look at the load every LOOK_S seconds; to be called on the event loop."""
        self._streams = streams
        self._task = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Stop looking at the load."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        """Update the features by the load every LOOK_S seconds, until cancelled."""
        with suppress(asyncio.CancelledError):
            self._longest_token = await asyncio.get_running_loop().run_in_executor(None, self._find_longest_token)
            while True:
                self.update(time.monotonic())
                await asyncio.sleep(LOOK_S)

    def _find_longest_token(self) -> int | float:
        """Return the number of characters in the tokenizer's longest token; infinite without a tokenizer."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return math.inf
        return max((len(tokenizer.token_text(index)) for index in range(tokenizer.vocab_size)), default=1) or 1

    def update(self, now_s: int | float) -> None:
        """Enable and disable features by the current load, and release or shed the requests that are held."""
        self.ladder.update(self.load(), now_s)
        if self._streams is not None:
            self._streams.interval_s = COALESCED_S if self.ladder.has("coalesce") else 0.0
            may_draft = not self.ladder.has("speculation")
            if may_draft != self._may_draft:
                self._may_draft = may_draft
                self._streams.send(DraftsAllowed(may_draft))
        if self.ladder.has("shed"):
            self._shed()
        elif not self.ladder.has("batch"):
            while self._held:
                _settle(self._held.popleft()[1], None)

    def load(self) -> int | float:
        """Return the load; at 1 requests are refused, for their number, their tokens or their wait."""
        config = self._config
        loads = [self._engine.host.num_waiting / config.max_queued_requests]
        loads.append(self._observer.wait_estimator.num_waiting_tokens() / config.max_queued_tokens)
        if (target_s := self.target_s(0)) is not None:
            wait = self._observer.wait(0)
            loads.append(0.0 if wait is None else wait.first_token_s / target_s)
        return max(loads)

    def _shed(self) -> None:
        """Refuse one of the held requests: the newest of the lowest class."""
        if self._held:
            lowest = max(priority for priority, _ in self._held)
            newest = max(index for index, (priority, _) in enumerate(self._held) if priority == lowest)
            future = self._held[newest][1]
            del self._held[newest]
            _settle(future, self._refused("shed", "the server sheds requests of low priority"))

    def drain(self) -> None:
        """Refuse the requests that are held, and hold none any more."""
        self._is_draining = True
        while self._held:
            error = BadRequestError("the server stops; try another one", None, "stopping", 503)
            _settle(self._held.popleft()[1], error)

    # The gates

    @property
    def is_full(self) -> bool:
        """True if no further request may wait."""
        return self._engine.host.num_waiting >= self._config.max_queued_requests

    def check_early(self, tenant: str) -> None:
        """Raise BadRequestError if the queue is full or the tenant has reached a limit, before the body is read."""
        if self.is_full:
            raise self._full(tenant, "queue_full", "the queue of the server is full")
        self._check_open(tenant, 1)
        self._check_rate(self.limits.excess(tenant, 0, time.monotonic()))

    def _check_open(self, tenant: str, num_more: int) -> None:
        """Raise RefusedError if `num_more` samples would exceed the tenant's limit of unfinished requests."""
        most = self.limits.tenant_limits(tenant).max_open_requests
        if most is not None and self.num_open.get(tenant, 0) + num_more > most:
            message = f"a key must have at most {most} unfinished requests, samples counted one by one; wait for some"
            self._observer.reject("key_limit")
            raise RefusedError(message, None, "rate_limit_exceeded", 429, self._retry_s())

    def check_body(self, tenant: str, priority: int, body: Mapping[str, Any], timeout_s: int | float) -> None:
        """Raise BadRequestError for a body whose prompt, at its minimum length, would wait too long, or that asks for
        features that are disabled.
        """
        if self.ladder.has("extras"):
            for name in ("n", "best_of"):
                if isinstance(body.get(name), int) and body[name] > 1:
                    raise self._refused("extras", f"{name} must be 1 while the server is overloaded")
            if body.get("prompt_logprobs") is not None:
                raise self._refused("extras", "prompt_logprobs must be left out while the server is overloaded")
        self._check_wait(tenant, priority, self.fewest_tokens(body), timeout_s)

    def fewest_tokens(self, body: Mapping[str, Any]) -> int:
        """Return the minimum number of tokens in a body's prompt, from its length and the longest token."""
        prompt = body.get("prompt", body.get("input"))
        if isinstance(prompt, str):
            return max(int(len(prompt) / self._longest_token), 1)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        messages = body.get("messages")
        texts = (
            [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else ()
        )
        return max(int(sum(len(text) for text in texts if isinstance(text, str)) / self._longest_token), 1)

    @contextmanager
    def opened(self, tenant: str) -> Iterator[None]:
        """Count one more unfinished request of the tenant within the context."""
        self.num_open[tenant] = self.num_open.get(tenant, 0) + 1
        try:
            yield
        finally:
            self.num_open[tenant] -= 1
            if not self.num_open[tenant]:
                del self.num_open[tenant]

    @contextmanager
    def admitted(
        self, tenant: str, priority: int, groups: Sequence[RequestGroup], timeout_s: int | float
    ) -> Iterator[None]:
        """Count the samples of requests as unfinished within the context, and take their tokens from the rate limit.

        Raises:
            BadRequestError: by their exact length they would wait too long, or exceed a limit.
        """
        requests = [request for group in groups for request in group.requests]
        self._check_wait(tenant, priority, sum(request.num_prompt_tokens for request in requests), timeout_s)
        self._check_open(tenant, len(requests) - 1)
        num_taken = tokens_to_take(requests)
        self._check_rate(self.limits.take(tenant, num_taken, time.monotonic()))
        self.num_open[tenant] += len(requests) - 1
        try:
            yield
        finally:
            self.num_open[tenant] -= len(requests) - 1
            self.limits.settle(tenant, num_taken, tokens_used(groups), time.monotonic())

    async def turn(self, priority: int, through: asyncio.Future[None]) -> None:
        """Hold a request below class 0 while the load is high, but not once `through` is done: its client has left."""
        if priority > 0 and self.ladder.has("batch") and not (through.done() or self._is_draining):
            held = asyncio.get_running_loop().create_future()
            self._held.append((priority, held))
            try:
                await asyncio.wait({held, through}, return_when=asyncio.FIRST_COMPLETED)
                if held.done():
                    held.result()
            finally:
                with suppress(ValueError):
                    self._held.remove((priority, held))

    def headers(self, tenant: str) -> list[tuple[bytes, bytes]]:
        """Return the reply headers with a tenant's remaining limits and the disabled features."""
        headers = self.limits.headers(tenant, time.monotonic())
        if on := self.ladder.on:
            headers.append((b"x-degraded", ",".join(on).encode()))
        return headers

    # Estimates

    def target_s(self, priority: int) -> int | float | None:
        """Return the maximum time to first token for a priority class; None if it has no limit."""
        return self._targets_s.get(priority, self._targets_s.get(None))

    def _check_wait(self, tenant: str, priority: int, num_tokens: int, timeout_s: int | float) -> None:
        """Raise RefusedError if a prompt does not fit the queue, or if its first token would come too late."""
        estimator, most = self._observer.wait_estimator, self._config.max_queued_tokens
        num_waiting = estimator.num_waiting_tokens()
        if num_waiting and num_waiting + num_tokens > most:
            raise self._full(tenant, "queue_tokens", "the queue of the server is full of tokens")
        target_s = self.target_s(priority)
        most_s = min(timeout_s, math.inf if target_s is None else target_s)
        if most_s == math.inf or (wait := self._observer.wait(priority)) is None:
            return
        first_s = wait.first_token_s + estimator.prefill_s(num_tokens)
        if wait.start_s and first_s > most_s:
            message = f"the first token would be there in {first_s:.1f} s, and must be within {most_s:.1f} s"
            raise self._full(tenant, "wait", message, wait.start_s)

    def _retry_s(self) -> int | float:
        """Return the seconds after which a refused client should try again."""
        wait = self._observer.wait(0)
        return 1.0 if wait is None else wait.start_s

    def _check_rate(self, excess: Excess | None) -> None:
        """Count and raise the refusal for an exceeded rate limit; None is no excess."""
        if excess is None:
            return
        self._observer.reject("rate_limit")
        raise RefusedError(excess.message, None, "rate_limit_exceeded", 429, excess.wait_s)

    def _full(self, tenant: str, reason: str, message: str, retry_s: int | float | None = None) -> RefusedError:
        """Count a refusal and return its error: 429 if the tenant has more open requests than the mean, else 503."""
        refused = self._refused(reason, message, retry_s)
        if exceeds_fair_share(self.num_open, tenant):
            refused.status_code = 429
        return refused

    def _refused(self, reason: str, message: str, retry_s: int | float | None = None) -> RefusedError:
        """Count a refusal by its reason, and return the error for the client (503)."""
        self._observer.reject(reason)
        retry_s = self._retry_s() if retry_s is None else retry_s
        return RefusedError(f"{message}; try again later", None, "overloaded", 503, retry_s)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    """End the wait for a future, with an error or without; a cancelled one has ended already."""
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)
