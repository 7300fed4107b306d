"""Open-loop load: requests arrive when they are due, whether or not earlier ones have been answered.

Latencies count from the moment a request is due, and so include the time before the engine queues it. Otherwise a slow
engine would reduce its own load (coordinated omission). With limited concurrency, latencies count from the moment the
limit admits the request: the limit stands for a client or proxy that holds requests back.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.assembly.driven import DrivenEngine


class Clock:
    """The machine's clock; a simulated clock overrides both methods."""

    def now_s(self) -> float:
        """Return the time in seconds, from any origin."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of a load.

    Attributes:
        prompt: prompt token ids, in a dict if there is a picture.
        output_len: number of tokens to generate.
        arrival_s: arrival time in seconds after the start; after the end of request `after`, if it has one.
        after: index of the request that must have ended before, in the load; None for none.
        session: name of its conversation; empty for none.
        picture: size of its picture, such as "480 x 640"; empty for none.
    """

    prompt: list[int] | Mapping[str, Any]
    output_len: int
    arrival_s: float = 0.0
    after: int | None = None
    session: str = ""
    picture: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, without a picture's."""
        return len(self.prompt["prompt_token_ids"] if isinstance(self.prompt, Mapping) else self.prompt)


@dataclass(slots=True)
class RequestTrace:
    """Arrival times of a request and its tokens, in seconds after the start, and the size of its picture."""

    arrival_s: float  # due time, or later if concurrency is limited
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    picture: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Time from arrival to last token."""
        return self.token_s[-1] - self.arrival_s

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies; tokens that arrive simultaneously count as one arrival."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_s) if later > earlier]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if there is only one."""
        num_later = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_later if num_later else None


@dataclass(frozen=True, slots=True)
class StepSample:
    """State of a replica at the end of a step, or of an idle engine at the end of a wait."""

    time_s: float
    num_rows: int = 0
    num_tokens: int = 0
    num_pages_used: int = 0
    num_waiting: int = 0  # requests that have arrived but hold no slot: new or preempted


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """An engine's steps and statistics during one run."""

    steps: list[StepSample]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Trace of one run.

    Attributes:
        requests: served requests, in the given order.
        elapsed_s: time from start to last token.
        engine: the engine's work; None for a server, which is known only by its replies.
        failures: reasons why other requests were not served.
    """

    requests: list[RequestTrace]
    elapsed_s: float
    engine: EngineTrace | None = None
    failures: Sequence[str] = ()


def run_load(
    engine: DrivenEngine,
    requests: Sequence[TimedRequest],
    clock: Clock | None = None,
    *,
    max_concurrency: int | None = None,
) -> LoadTrace:
    """Serve each request from its due time to its last token; sampling is greedy, end-of-sequence tokens are ignored.

    Args:
        engine: engine without requests; it has none afterwards either, even if a request fails.
        requests: requests to serve; requests due at the same time are queued in this order.
        clock: clock to use; the machine's by default.
        max_concurrency: maximum number of unfinished requests; the next one then arrives when one of them ends.

    Raises:
        RequestError: a request cannot be served.
    """
    return _OpenLoop(engine, requests, clock or Clock(), max_concurrency or len(requests)).run()


class _OpenLoop:
    """One run of a load: it queues requests when they are due, steps the engine, and records when tokens arrive.

    Args:
        engine: engine without requests.
        requests: requests to serve.
        clock: clock by which requests are due and tokens are timed.
        max_concurrency: maximum number of unfinished requests.
    """

    def __init__(
        self, engine: DrivenEngine, requests: Sequence[TimedRequest], clock: Clock, max_concurrency: int
    ) -> None:
        self._engine, self._requests, self._clock = engine, requests, clock
        first = [index for index, request in enumerate(requests) if request.after is None]
        self._due = sorted((requests[index].arrival_s, index) for index in first)
        self._next = {request.after: index for index, request in enumerate(requests) if request.after is not None}
        self._free_since_s = deque([0.0] * max_concurrency)  # start of idleness of each free client
        self._traces = [RequestTrace(r.arrival_s, r.num_tokens, picture=r.picture) for r in requests]
        self._steps: list[StepSample] = []
        self._start_s = 0.0

    def run(self) -> LoadTrace:
        """Serve all requests and return the trace; if one fails, abort the others and raise its error."""
        before = dataclasses.replace(self._engine.stats)
        self._start_s = self._clock.now_s()
        try:
            while self._due or self._engine.has_unfinished():
                self._queue_due()
                self._step_or_wait()
        except BaseException:
            for index in range(len(self._requests)):
                self._engine.abort(_request_id(index))
            raise
        elapsed_s = max(trace.token_s[-1] for trace in self._traces)
        return LoadTrace(self._traces, elapsed_s, EngineTrace(self._steps, self._engine.stats.since(before)))

    def _now_s(self) -> float:
        """Return the seconds since the start of the run."""
        return self._clock.now_s() - self._start_s

    def _queue_due(self) -> None:
        """Give the engine every request that is due, as far as the concurrency limit allows."""
        now_s = self._now_s()
        for _ in range(self._num_due(now_s)):
            due_s, index = self._due.pop(0)
            request = self._requests[index]
            self._traces[index].arrival_s = max(due_s, self._free_since_s.popleft())
            params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
            options = {"reuse": ReuseHint(request.session)} if request.session else {}
            self._engine.add_request(_request_id(index), request.prompt, params, **options)

    def _step_or_wait(self) -> None:
        """Take one engine step and record its tokens; if the engine is idle, sleep until the next request is due."""
        if self._engine.has_unfinished():
            outputs = self._engine.step()
            now_s = self._now_s()
            self._sample_steps(now_s)
            for output in outputs:
                self._note_tokens(output, now_s)
        elif self._due:
            self._clock.sleep(max(0.0, self._due[0][0] - self._now_s()))
            self._steps.append(StepSample(self._now_s()))  # idle

    def _note_tokens(self, output: RequestOutput, now_s: float) -> None:
        """Record `now_s` as the arrival time of a request's new tokens; if it has ended, free its client."""
        index = int(output.request_id.removeprefix(_PREFIX))
        trace = self._traces[index]
        num_new = len(output.outputs[0].token_ids) - len(trace.token_s)
        trace.token_s += [now_s] * num_new
        if output.finished:
            trace.num_cached_tokens = output.num_cached_tokens
            trace.num_prompt_tokens = len(output.prompt_token_ids)
            self._free_since_s.append(now_s)
            if (later := self._next.get(index)) is not None:
                insort(self._due, (now_s + self._requests[later].arrival_s, later))

    def _sample_steps(self, now_s: float) -> None:
        """Append the state of each replica, whose step has ended at `now_s`, to the engine's trace."""
        for step in self._engine.last_steps:
            num_waiting = step.num_waiting + self._num_due(now_s)
            self._steps.append(StepSample(now_s, step.num_rows, step.num_tokens, step.num_pages_used, num_waiting))

    def _num_due(self, now_s: float) -> int:
        """Return the number of arrived requests that are not queued yet."""
        return min(bisect_right(self._due, (now_s, len(self._requests))), len(self._free_since_s))


_PREFIX = "bench-"


def _request_id(index: int) -> str:
    """Return the engine's id for the request with this index in the load."""
    return f"{_PREFIX}{index}"
