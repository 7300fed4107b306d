"""Replicas: the servers of a router, whether they are ready, their loads, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from jaxserve.api.kv_store_config import PRODUCER
from jaxserve.errors import brief
from jaxserve.routing.config import RouterConfig
from jaxserve.routing.upstream import Reply, Upstream
from jaxserve.scheduling.router import ROW_CHARGE_TOKENS, Prefix, Router
from jaxserve.server.http import KEEP_ALIVE_S

logger = logging.getLogger(__name__)

_NOT_ASKED = "it has not answered yet"
_MIN_TOKEN_S = 1e-9
_RECENT_S = 30.0  # half-life of work in the sum that spreads requests over idle replicas, and thus over their caches
_RECENT_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load that a replica reports.

    Attributes:
        num_running: its running requests.
        num_waiting_tokens: uncomputed prompt tokens of its waiting requests.
        prompt_token_s: its time per prompt token; None if unknown.
        is_producer: True if it computes prompts for other servers.
    """

    num_running: int = 0
    num_waiting_tokens: int = 0
    prompt_token_s: float | None = None
    is_producer: bool = False

    @classmethod
    def from_reply(cls, reply: object) -> LoadReport:
        """Return the load in a reply to `/load`; values that servers of other kinds leave out are zero."""
        given = reply if isinstance(reply, dict) else {}

        def count(name: str) -> int:
            value = given.get(name, 0)
            return max(int(value), 0) if isinstance(value, int | float) else 0

        token_s = given.get("prompt_token_s")
        is_known = isinstance(token_s, float) and token_s > _MIN_TOKEN_S
        num_running = count("num_running" if "num_running" in given else "server_load")
        is_producer = given.get("kv_role") == PRODUCER
        return cls(num_running, count("num_waiting_tokens"), token_s if is_known else None, is_producer)

    @property
    def num_tokens(self) -> int:
        """Load in tokens as the router counts it."""
        return self.num_waiting_tokens + ROW_CHARGE_TOKENS * self.num_running


class Replica:
    """A server that the router gives requests.

    Args:
        index: its index in the router.
        url: its URL.
        config: options of the router.

    Attributes:
        problem: why it gets no requests; None if it is ready.
        report: its last load report.
        load: load in tokens that this router has given it.
        num_requests: requests that it serves for this router.
        loads: the loads of these requests.
        avoided_until_s: monotonic time until which it gets requests only if no other replica is ready.
    """

    def __init__(self, index: int, url: str, config: RouterConfig) -> None:
        self.index, self.url = index, url
        self.problem: str | None = _NOT_ASKED
        self.report = LoadReport()
        self.load = self.num_requests = 0
        self.loads = set[Load]()
        self.avoided_until_s = 0.0
        self._recent, self._recent_at_s = 0.0, 0.0
        self._config = config
        self._upstream = Upstream(url, config.connect_timeout_s, KEEP_ALIVE_S / 2)  # closed here before the server does

    @property
    def recent_tokens(self) -> float:
        """Tokens that it was given lately, earlier ones counting less."""
        return float(self._recent * 0.5 ** ((time.monotonic() - self._recent_at_s) / _RECENT_S))

    def note_work(self, num_tokens: int) -> None:
        """Add tokens to `recent_tokens`."""
        self._recent, self._recent_at_s = self.recent_tokens + num_tokens, time.monotonic()

    def request(
        self, method: str, path: str, headers: Iterable[tuple[str, str]] = (), body: bytes | None = None
    ) -> Reply:
        """Return a context that sends a request; see `Upstream.request`."""
        return self._upstream.request(method, path, headers, body)

    async def ask(self) -> None:
        """Update `problem` and `report`. A replica that does not answer in time loses its connections."""
        try:
            async with asyncio.timeout(self._config.poll_timeout_s):
                problem = await self._ask_ready()
                if problem is None:
                    async with self.request("GET", "/load") as reply:
                        content = await reply.read()
                    if reply.status == 200:
                        self.report = LoadReport.from_reply(json.loads(content))
        except TimeoutError:
            problem = f"it has not answered within {self._config.poll_timeout_s} s"
            self.close()  # the requests that it serves continue elsewhere
        except (OSError, ValueError) as error:
            problem = f"it does not answer: {brief(str(error) or type(error).__name__)}"
        self.set_problem(problem)

    async def _ask_ready(self) -> str | None:
        """Return why the replica is not ready; None if it is."""
        for path in ("/ready", "/health"):  # servers of other kinds have only the second
            async with self.request("GET", path) as reply:
                text = (await reply.read()).decode(errors="replace")
                if reply.status != 404:
                    return None if reply.status == 200 else f"{path} has status {reply.status}: {brief(text)}"
        return "it has neither /ready nor /health"

    def set_problem(self, problem: str | None) -> None:
        """Set why the replica gets no requests, and log a change."""
        if (problem is None) != (self.problem is None):
            if problem is None:
                logger.info("replica %s is ready", self.url)
            else:
                logger.warning("replica %s gets no requests: %s", self.url, problem)
        self.problem = problem

    def close(self) -> None:
        """Close all connections; requests that the replica serves end as if it had died."""
        self._upstream.close()


class Replicas:
    """All replicas, and the choice among them by load, speed and cached prefixes.

    Attributes:
        all: the replicas.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.all = [Replica(index, url, config) for index, url in enumerate(config.replicas)]
        self._config = config
        self._router = Router(len(self.all))
        self._polls: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # set and replaced when a replica becomes ready

    def start(self) -> None:
        """Start to poll the replicas; to be called on the event loop."""
        self._polls = [asyncio.create_task(self._poll(replica)) for replica in self.all]

    async def close(self) -> None:
        """Stop polling, and close all connections."""
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        for replica in self.all:
            replica.close()

    @property
    def has_producer(self) -> bool:
        """True if a ready replica computes prompts for another ready one."""
        roles = {replica.report.is_producer for replica in self.all if replica.problem is None}
        return len(roles) == 2

    @property
    def num_ready(self) -> int:
        """Number of replicas that get requests."""
        return sum(replica.problem is None for replica in self.all)

    def fail(self, replica: Replica, problem: str) -> None:
        """Give a replica no more requests until it answers again; its cache may be lost."""
        replica.set_problem(problem)
        self._router.forget(replica.index)
        self._router.close(replica.index)

    def choose(
        self, prefix: Prefix, num_tokens: int, tried: Collection[Replica] = (), *, from_producers: bool = False
    ) -> tuple[Replica, int] | None:
        """Return a ready replica for a request, and the prompt tokens that it is expected to have cached.

        Args:
            prefix: sampled prefixes of the prompt.
            num_tokens: estimated prompt tokens.
            tried: replicas that have refused the request.
            from_producers: True to choose a producer; others are preferred otherwise.

        Returns:
            None if no replica is ready but these.
        """
        ready, now_s = {each for each in self.all if each.problem is None and each not in tried}, time.monotonic()
        ready = {each for each in ready if each.avoided_until_s <= now_s} or ready
        suitable = {replica for replica in ready if replica.report.is_producer == from_producers}
        if not suitable and not from_producers:
            suitable = ready
        costs = [replica.report.prompt_token_s for replica in self.all]
        known = [cost for cost in costs if cost is not None]
        for replica, cost in zip(self.all, costs, strict=True):
            load = max(replica.load, replica.report.num_tokens) + round(replica.recent_tokens * _RECENT_WEIGHT)
            self._router.set_load(replica.index, load, is_open=replica in suitable)
            self._router.set_token_cost(replica.index, cost or (sum(known) / len(known) if known else 1.0))
        route = self._router.choose(prefix, num_tokens + ROW_CHARGE_TOKENS, only_open=True)
        return None if route is None else (self.all[route.replica], route.num_shared_tokens)

    def serving(self, replica: Replica, prefix: Prefix, num_tokens: int) -> Load:
        """Return a context within which a request counts on a replica.

        Args:
            replica: the replica.
            prefix: sampled prefixes of the prompt.
            num_tokens: prompt tokens that it must compute.
        """
        replica.note_work(num_tokens + ROW_CHARGE_TOKENS)
        self._router.note(replica.index, prefix)
        return Load(replica, num_tokens + ROW_CHARGE_TOKENS, self._config.silence_timeout_s)

    async def wait_for_ready(self, until_s: float) -> bool:
        """Wait until a replica is ready; return False if none is at `until_s`, in the clock's seconds."""
        while not self.num_ready:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        return True

    async def _poll(self, replica: Replica) -> None:
        """Ask a replica again and again whether it is ready, and end its silent requests, until cancelled."""
        while True:
            oldest_s = time.monotonic() - self._config.silence_timeout_s
            for load in replica.loads:
                if load.heard_s < oldest_s:
                    load.end()
            was_ready = replica.problem is None
            try:
                await replica.ask()
            except Exception as error:  # a defect must not end the poll
                logger.exception("replica %s could not be asked", replica.url)
                replica.set_problem(f"it could not be asked: {error!r}")
            if replica.problem is None and not was_ready:
                self._changed.set()
                self._changed = asyncio.Event()
            elif replica.problem is not None and was_ready:
                self.fail(replica, replica.problem)
            await asyncio.sleep(self._config.poll_interval_s)


class SilentError(Exception):
    """A replica that has sent nothing for too long."""


class Load:
    """Load that one request adds to a replica, within this context.

    Args:
        replica: the replica.
        num_tokens: the load in tokens.
        silence_timeout_s: see `RouterConfig`.

    Attributes:
        heard_s: monotonic time of the last byte; infinity while the client is waited for.
    """

    def __init__(self, replica: Replica, num_tokens: int, silence_timeout_s: float) -> None:
        self._replica, self._num_tokens = replica, num_tokens
        self._silence_timeout_s = silence_timeout_s
        self._limit = asyncio.timeout(None)
        self.heard_s = time.monotonic()

    async def __aenter__(self) -> Load:
        """Add the load."""
        self._replica.load += self._num_tokens
        self._replica.num_requests += 1
        self._replica.loads.add(self)
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Remove the load; SilentError if the replica has been silent for too long."""
        self._replica.num_requests -= 1
        self._replica.loads.discard(self)
        self.lower(0)
        try:
            await self._limit.__aexit__(*error)
        except TimeoutError:
            self._replica.avoided_until_s = time.monotonic() + self._silence_timeout_s
            raise SilentError(f"it has sent nothing for {self._silence_timeout_s} s") from None

    def end(self) -> None:
        """End the request, as the replica is silent."""
        if not self._limit.expired():
            self._limit.reschedule(0.0)

    def heard(self) -> None:
        """Note that a part of the reply has come, and that the prompt is computed."""
        self.heard_s = time.monotonic()
        if self._num_tokens > ROW_CHARGE_TOKENS:
            self.lower(ROW_CHARGE_TOKENS)

    def lower(self, num_tokens: int) -> None:
        """Lower the load to `num_tokens`; a higher one stays as it is."""
        less = max(self._num_tokens - num_tokens, 0)
        self._num_tokens -= less
        self._replica.load -= less
