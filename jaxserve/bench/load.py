"""An open loop over an engine: requests arrive when they are due, whether or not earlier ones have been answered.

Latencies count from the moment a request is due, so that what an engine under load makes it wait before it is even
queued counts too (otherwise a slow server would slow its own load down: coordinated omission). Where concurrency is
limited they count from when the limit lets it pass: it stands for something before the engine that holds requests back.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.metrics import EngineStats
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.stepped import MeasuredEngine


class Clock:
    """The machine's time; another clock overrides both."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A prompt, how many tokens to generate, and when it is due, in seconds after the start."""

    prompt: list[int]
    output_len: int
    arrival_s: float = 0.0


@dataclass(slots=True)
class RequestTrace:
    """When a request arrived and when each of its tokens was there, in seconds after the start."""

    arrival_s: float  # when it was due, or later where concurrency is limited
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.token_s[-1] - self.arrival_s

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: from each arrival to the next, where tokens that come together are one arrival."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_s) if later > earlier]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of a single token."""
        num_later = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_later if num_later else None


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a replica was doing up to one moment: a step that has just ended; or that the engine did nothing."""

    time_s: float
    num_rows: int = 0
    num_tokens: int = 0
    num_pages_used: int = 0
    num_waiting: int = 0  # requests that have arrived and have never or no longer a slot


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """All that one run of a load leaves behind: traces in the order of the requests."""

    requests: list[RequestTrace]
    steps: list[StepSample]
    stats: EngineStats  # of this run alone
    elapsed_s: float  # start to last token


def run_load(
    engine: MeasuredEngine,
    requests: Sequence[TimedRequest],
    clock: Clock | None = None,
    *,
    max_concurrency: int | None = None,
) -> LoadTrace:
    """Serve the requests, each from when it is due, to their last tokens; greedy, end of sequence ignored.

    Args:
        engine: an `Engine` without requests; left so, whatever happens.
        requests: those due at the same time are queued in this order.
        clock: by default the machine's.
        max_concurrency: most unfinished requests; others arrive when one of these has ended.

    Raises:
        RequestError: a request cannot be served.
    """
    return _OpenLoop(engine, requests, clock or Clock(), max_concurrency or len(requests)).run()


class _OpenLoop:
    """One run: queue what is due, step, note which tokens are there."""

    def __init__(
        self, engine: MeasuredEngine, requests: Sequence[TimedRequest], clock: Clock, max_concurrency: int
    ) -> None:
        self._engine, self._requests, self._clock = engine, requests, clock
        self._due = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_s))
        self._free_since_s = deque([0.0] * max_concurrency)  # places for further requests
        self._traces = [RequestTrace(r.arrival_s, len(r.prompt)) for r in requests]
        self._steps: list[StepSample] = []
        self._start_s = 0.0

    def run(self) -> LoadTrace:
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
        return LoadTrace(self._traces, self._steps, self._engine.stats.since(before), elapsed_s)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._start_s

    def _queue_due(self) -> None:
        now_s = self._now_s()
        for _ in range(self._num_due(now_s)):
            index = self._due.popleft()
            request = self._requests[index]
            self._traces[index].arrival_s = max(request.arrival_s, self._free_since_s.popleft())
            params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
            self._engine.add_request(_request_id(index), request.prompt, params)

    def _step_or_wait(self) -> None:
        if self._engine.has_unfinished():
            outputs = self._engine.step()
            now_s = self._now_s()
            self._sample(now_s)
            for output in outputs:
                self._note_tokens(output, now_s)
        elif self._due:
            self._clock.sleep(max(0.0, self._requests[self._due[0]].arrival_s - self._now_s()))
            self._steps.append(StepSample(self._now_s()))  # idle

    def _note_tokens(self, output: RequestOutput, now_s: float) -> None:
        trace = self._traces[int(output.request_id.removeprefix(_PREFIX))]
        num_new = len(output.outputs[0].token_ids) - len(trace.token_s)
        trace.token_s += [now_s] * num_new
        if output.finished:
            trace.num_cached_tokens = output.num_cached_tokens
            self._free_since_s.append(now_s)

    def _sample(self, now_s: float) -> None:
        for step in self._engine.last_steps:
            num_waiting = step.num_waiting + self._num_due(now_s)
            self._steps.append(StepSample(now_s, step.num_rows, step.num_tokens, step.num_pages_used, num_waiting))

    def _num_due(self, now_s: float) -> int:
        """Requests that have arrived and are not queued yet."""
        due = itertools.takewhile(lambda index: self._requests[index].arrival_s <= now_s, self._due)
        return sum(1 for _ in itertools.islice(due, len(self._free_since_s)))


_PREFIX = "bench-"


def _request_id(index: int) -> str:
    return f"{_PREFIX}{index}"
