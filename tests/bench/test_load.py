"""Tests of the open loop over a fake engine and a fake clock, with times known in advance."""

from typing import Any

import fake_engine
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.outputs import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.tools.bench.load import Clock, LoadTrace, RequestTrace, TimedRequest, run_load

STEP_S = 0.25


class FakeClock(Clock):
    """Clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.slept: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds

    def work(self, seconds: float) -> None:
        self.time_s += seconds


class TwoReplicas(fake_engine.FakeEngine):
    """Two fake engines that get requests in turns and step at the same time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(None)
        self._clock = clock
        self._replicas = [fake_engine.FakeEngine(None, stats=self.stats) for _ in range(2)]

    def add_request(self, *args: Any) -> None:
        self._replicas[0].add_request(*args)
        self._replicas.reverse()

    def has_unfinished(self) -> bool:
        return any(replica.has_unfinished() for replica in self._replicas)

    def step(self) -> list[RequestOutput]:
        self._clock.work(STEP_S)
        working = [replica for replica in self._replicas if replica.has_unfinished()]
        outputs = [output for replica in working for output in replica.step()]
        self.last_steps = [step for replica in working for step in replica.last_steps]
        return outputs


def serve(
    *requests: TimedRequest, max_num_seqs: int = 4, max_concurrency: int | None = None
) -> tuple[LoadTrace, FakeClock]:
    clock = FakeClock()
    engine = fake_engine.FakeEngine(None, max_num_seqs=max_num_seqs, step_s=STEP_S, sleep=clock.work)
    return run_load(engine, requests, clock, max_concurrency=max_concurrency), clock


def test_an_infinite_rate_equals_the_offline_run() -> None:
    trace, clock = serve(*(TimedRequest([1, 2, 3], 2) for _ in range(6)))
    assert [r.token_s for r in trace.requests] == 4 * [[0.25, 0.5]] + 2 * [[0.75, 1.0]]
    assert [s.num_waiting for s in trace.engine.steps] == [2, 2, 0, 0]
    assert [s.num_rows for s in trace.engine.steps] == [4, 4, 2, 2]
    assert trace.elapsed_s == 1.0
    assert trace.engine.stats.num_steps == 4
    assert clock.slept == []


def test_arrivals_do_not_wait_for_completions() -> None:
    """A single row serves a request in 1 s; requests arrive every 0.5 s, and the queue grows by the difference."""
    trace, _ = serve(*(TimedRequest([i], 4, 0.5 * i) for i in range(5)), max_num_seqs=1)
    assert [r.ttft_s for r in trace.requests] == [0.25, 0.75, 1.25, 1.75, 2.25]
    assert [r.e2e_s for r in trace.requests] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert max(s.num_waiting for s in trace.engine.steps) == 3  # five requests are due at 2 s and two are done
    assert [s.time_s for s in trace.engine.steps] == [STEP_S * i for i in range(1, 21)]


def test_latency_counts_from_when_a_request_is_due() -> None:
    """The second request is due during a step and queued at its end: the wait counts in its latency."""
    trace, _ = serve(TimedRequest([1], 1), TimedRequest([2], 1, 0.1))
    assert trace.requests[1].ttft_s == pytest.approx(0.15 + STEP_S)


def test_an_idle_engine_sleeps_until_the_next_is_due() -> None:
    trace, clock = serve(TimedRequest([1], 1, 0.5), TimedRequest([2], 1, 10.0))
    assert clock.slept == [0.5, 9.25]
    assert [(s.time_s, s.num_rows) for s in trace.engine.steps] == [(0.5, 0), (0.75, 1), (10.0, 0), (10.25, 1)]
    assert [r.ttft_s for r in trace.requests] == [STEP_S, STEP_S]


def test_requests_are_queued_by_arrival_and_traced_in_the_given_order() -> None:
    trace, _ = serve(TimedRequest([1], 1, 2.0), TimedRequest([2, 3], 1), max_num_seqs=1)
    assert [r.arrival_s for r in trace.requests] == [2.0, 0.0]
    assert [r.num_prompt_tokens for r in trace.requests] == [1, 2]
    assert [r.token_s for r in trace.requests] == [[2.25], [0.25]]


def test_a_limit_on_concurrency_holds_requests_back() -> None:
    """Requests of 4 and 2 steps in turns, at most two at a time: a further request arrives when one has ended."""
    requests = [TimedRequest([i], 2 if i % 2 else 4) for i in range(4)] + [TimedRequest([4], 1, 9.1)]
    trace, _ = serve(*requests, max_concurrency=2)
    assert [r.arrival_s for r in trace.requests] == [0.0, 0.0, 0.5, 1.0, 9.1]
    assert [r.ttft_s for r in trace.requests] == pytest.approx([STEP_S] * 5)
    assert {s.num_waiting for s in trace.engine.steps} == {0}
    assert max(s.num_rows for s in trace.engine.steps) == 2


@given(
    lens=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    gap_s=st.sampled_from([0.0, 0.1, 1.0]),
    limit=st.integers(1, 13),
)
def test_limited_concurrency_is_kept_and_fully_used(lens: list[int], gap_s: float, limit: int) -> None:
    requests = [TimedRequest([i], output_len, gap_s * i) for i, output_len in enumerate(lens)]
    trace, _ = serve(*requests, max_num_seqs=20, max_concurrency=limit)
    spans = [(r.arrival_s, r.token_s[-1]) for r in trace.requests]
    for request, (arrival_s, _) in zip(requests, spans, strict=True):
        assert sum(start <= arrival_s < end for start, end in spans) <= limit
        assert arrival_s == request.arrival_s or arrival_s in {end for _, end in spans}
    if limit >= len(lens):
        assert [start for start, _ in spans] == [r.arrival_s for r in requests]


def test_the_engine_is_left_empty_when_a_run_breaks_off() -> None:
    clock = FakeClock()

    def interrupt(seconds: float) -> None:
        clock.work(seconds)
        if clock.time_s > 1001:
            raise KeyboardInterrupt

    engine = fake_engine.FakeEngine(None, step_s=STEP_S, sleep=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_load(engine, [TimedRequest([1], 9)] * 6, clock)
    assert not engine.has_unfinished()
    with pytest.raises(RequestError, match="max_tokens"):
        run_load(engine, [TimedRequest([1], 9), TimedRequest([1], 0)], clock)
    assert not engine.has_unfinished()


def test_statistics_count_only_this_run() -> None:
    engine = fake_engine.FakeEngine(None)
    for _ in range(2):
        trace = run_load(engine, [TimedRequest([1], 3)], FakeClock())
        assert (trace.engine.stats.num_steps, len(trace.engine.steps), trace.engine.stats.num_output_tokens) == (
            3,
            3,
            3,
        )


def test_steps_are_those_of_every_replica() -> None:
    clock = FakeClock()
    engine = TwoReplicas(clock)
    trace = run_load(engine, [TimedRequest([i], i) for i in (1, 2, 3, 4, 5)], clock)
    assert len(trace.engine.steps) == trace.engine.stats.num_steps == 5 + 4
    assert sum(step.num_tokens for step in trace.engine.steps) == 1 + 2 + 3 + 4 + 5
    assert [(step.time_s, step.num_rows) for step in trace.engine.steps[:3]] == [(0.25, 2), (0.25, 3), (0.5, 2)]


def test_an_itl_is_between_arrivals_and_tpot_is_per_token() -> None:
    trace = RequestTrace(arrival_s=1.0, num_prompt_tokens=1, token_s=[2.0, 2.0, 2.0, 5.0, 5.0])
    assert trace.itls_s == [3.0]
    assert trace.tpot_s == 0.75
    single = RequestTrace(1.0, 1, token_s=[2.0])
    assert (single.itls_s, single.tpot_s) == ([], None)


@given(bursts=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 32)), min_size=1))
def test_bursts_lengthen_itls_and_never_make_them_zero(bursts: list[tuple[int, int]]) -> None:
    """Compare with bursts given by their gaps in ms and numbers of tokens."""
    arrivals = np.cumsum([gap_ms for gap_ms, _ in bursts]).tolist()
    token_s = [float(at) for at, (_, num_tokens) in zip(arrivals, bursts, strict=True) for _ in range(num_tokens)]
    trace = RequestTrace(0.0, 1, token_s=token_s)
    assert trace.itls_s == [gap_ms for gap_ms, _ in bursts[1:]]
    if len(token_s) > 1:
        assert trace.tpot_s == pytest.approx(sum(trace.itls_s) / (len(token_s) - 1))
