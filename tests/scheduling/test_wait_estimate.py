"""Estimates of waits in virtual time: the real core over devices whose steps take a known time."""

import random
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.core import EngineCore
from jaxserve.core.deltas import Delta
from jaxserve.core.events import Submitted
from jaxserve.core.replica import Replica
from jaxserve.core.wait_estimator import WaitEstimator
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_time import Rates, StepTime
from jaxserve.scheduling.wait_estimate import OutputLengths, SchedulerSizes, Work, estimate_wait
from simulate import modelled

END = 1  # token that ends an output
SIZES = SchedulerSizes(
    num_slots=4, num_batched_tokens=64, num_kv_tokens=10_000, page_size=16, long_threshold=64, long_chunk=32
)
RATES = Rates(0.01, 0.01, 0.001, 0.001)


class Stopping:
    """Executor whose rows end at random: each token is the last with the same probability."""

    def __init__(self, executor: Any, mean_len: float, seed: int) -> None:
        self._executor, self._share, self._random = executor, 1 / mean_len, np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, plan: Any, program: Any) -> Any:
        handle = self._executor.launch(plan, program)
        read = handle.result

        def result() -> StepResult:
            plain = read()
            ids = np.where(self._random.random(plain.token_ids.shape) < self._share, END, 5).astype(np.int32)
            return StepResult(ids, plain.num_tokens, plain.ended_s)

        handle_with = type("Handle", (), {"launched_s": handle.launched_s, "num_compiles": 0})()
        handle_with.is_ready, handle_with.result = handle.is_ready, result
        return handle_with


def relative_errors(sizes: dict[str, int], load: float, *, stops: bool, seed: int, count: int) -> list[float]:
    """Relative errors of all estimates that were at least a tenth of a second, of requests that came at random."""
    rng = random.Random(seed)
    arch, executor = modelled("llama-3.1-8b", "h200", **sizes)
    device: Any = Stopping(executor, 60, seed) if stops else executor
    replica = Replica(EngineConfig("none"), arch, device, EngineStats())
    core = EngineCore([replica], step_ahead=True, on_failure=lambda _: None)
    estimator = WaitEstimator(core)
    arrivals, now = [], 0.0
    for index in range(count):
        now += rng.expovariate(load)
        prompt, output = rng.choice([(100, 60), (700, 150), (30, 200), (4000, 40)])
        params = SamplingParams(max_tokens=output)
        stop_ids = frozenset({END}) if stops else frozenset()
        ids = [index, *range(2, prompt + 1)]
        request = Request(f"{index}#0", ids, params, 0, prompt + output, stop_ids=stop_ids, key=index, arrival=index)
        arrivals.append((now, request))
    requests = [request for _, request in arrivals]
    expected: dict[int, tuple[float, float]] = {}
    errors = []
    while arrivals or core.has_work():
        while arrivals and arrivals[0][0] <= executor.now_s:
            now, request = arrivals.pop(0)
            wait = estimator.wait(request.num_prompt_tokens) if request.arrival % 3 == 0 else None
            if wait is not None:
                expected[request.key] = now, wait.start_s
            core.inbox.append(Submitted([request]))
        if not core.has_work():
            executor.now_s = arrivals[0][0]
            continue
        core.step(executor.now_s)
        while core.outbox:
            delta = core.outbox.popleft()
            assert isinstance(delta, Delta)
            for admitted in delta.admitted:
                came, wait_s = expected.pop(admitted.key, (0.0, 0.0))
                if came and max(delta.at_s - came, wait_s) > 0.1:
                    errors.append(abs(wait_s - (delta.at_s - came)) / max(delta.at_s - came, 1e-2))
            for ended in delta.step.ended.values() if delta.step else ():
                at_limit = ended.reason is FinishReason.LENGTH
                estimator.lengths.ended(len(requests[ended.key].output_token_ids), at_limit=at_limit)
    return errors


@pytest.mark.parametrize(
    ("slots", "pages", "stops", "count"),
    [
        pytest.param(16, 20_000, False, 90, marks=pytest.mark.full),
        pytest.param(16, 20_000, True, 120, marks=[pytest.mark.full, pytest.mark.exhaustive]),
        pytest.param(64, 800, False, 160, marks=[pytest.mark.full, pytest.mark.exhaustive]),
        pytest.param(64, 800, True, 240, marks=[pytest.mark.full, pytest.mark.exhaustive]),
    ],
)
def test_half_of_all_estimates_are_right_within_30_percent(slots: int, pages: int, stops: bool, count: int) -> None:
    sizes = {"max_num_batched_tokens": 512, "max_model_len": 8192, "page_size": 16}
    errors = relative_errors(
        sizes | {"max_num_seqs": slots, "num_pages": pages}, 60.0, stops=stops, seed=slots, count=count
    )
    assert len(errors) >= count / 10
    assert statistics.median(errors) < 0.3


def test_an_idle_engine_starts_requests_immediately() -> None:
    wait = estimate_wait(RATES, SIZES, [], [], Work(40.0, 1.0))
    assert wait == (0.0, pytest.approx(RATES.step_s(40, 0)))
    long = estimate_wait(RATES, SIZES, [], [], Work(640.0, 1.0))
    assert long.first_token_s > 10 * RATES.step_s(32, 0)


def test_a_lone_prompt_has_the_budget_of_one_shard() -> None:
    def estimates(num_shards: int) -> tuple[float, Any, Any]:
        sizes = (4 * num_shards, 64 * num_shards, 8192, 16, 1000 * num_shards)
        scheduler = Scheduler(ScheduleConfig(*sizes, num_data_shards=num_shards))
        step_time = SimpleNamespace(rates=lambda: RATES, cached_fraction=0.0)
        replica = SimpleNamespace(scheduler=scheduler, step_stats=SimpleNamespace(step_time=step_time))
        core: Any = SimpleNamespace(replicas=[replica], queued=[], inbox=[])
        estimator = WaitEstimator(core)
        alone = estimator.wait(640)
        for index in range(3):
            params = SamplingParams(max_tokens=1)
            scheduler.add(Request(str(index), [index] * 640, params, 0, 641, arrival=index))
        return estimator.prefill_s(640), alone, estimator.wait(640)

    one, four = estimates(1), estimates(4)
    assert four[:2] == one[:2]
    assert four[2].first_token_s < one[2].first_token_s, "the others have shards of their own"


def test_a_request_waits_for_the_first_slot_that_is_free() -> None:
    running = [Work(1.0, float(left), 100.0) for left in (30, 10, 20, 40)]
    wait = estimate_wait(RATES, SIZES, running, [], Work(8.0, 1.0))
    assert wait.start_s == pytest.approx(10 * RATES.step_s(0, 4), rel=0.01)
    behind = estimate_wait(RATES, SIZES, running, [Work(8.0, 500.0)], Work(8.0, 1.0))
    steps_s = 10 * RATES.step_s(0, 4) + RATES.step_s(8, 3) + 9 * RATES.step_s(0, 4)
    assert behind.start_s == pytest.approx(steps_s, rel=0.05)


def test_a_request_waits_for_pages() -> None:
    few = SIZES._replace(num_kv_tokens=300.0)
    running = [Work(1.0, float(left), 110.0) for left in (12, 25)]
    assert estimate_wait(RATES, few, running, [], Work(60.0, 1.0)).start_s == pytest.approx(
        12 * RATES.step_s(0, 2), rel=0.01
    )


def test_short_prompts_pass_long_ones_that_wait() -> None:
    running, waiting = [Work(500.0, 10.0)], [Work(500.0, 10.0)]
    assert estimate_wait(RATES, SIZES, running, waiting, Work(8.0, 1.0)).start_s == 0
    assert estimate_wait(RATES, SIZES, running, waiting, Work(500.0, 1.0)).start_s > 0.5


def test_requests_ahead_only_lengthen_a_wait() -> None:
    rng = random.Random(1)
    running = [Work(1.0, rng.uniform(1, 99), rng.uniform(1, 99)) for _ in range(4)]
    waiting = [Work(rng.uniform(1, 60), rng.uniform(1, 99)) for _ in range(400)]
    starts_s = [
        estimate_wait(RATES, SIZES, running, waiting[:count], Work(8.0, 1.0)).start_s for count in range(0, 400, 57)
    ]
    assert starts_s == sorted(starts_s)
    whole_s = estimate_wait(RATES, SIZES._replace(num_slots=4), running, waiting[:190], Work(8.0, 1.0)).start_s
    # Beyond the requests that are served in thought, the pace goes on.
    assert starts_s[-1] == pytest.approx(whole_s * 399 / 190, rel=0.15)


def test_times_of_steps_are_found_again() -> None:
    rng, true = random.Random(3), Rates(0.004, 0.002, 2e-5, 1e-4)
    step_time = StepTime()
    assert step_time.rates() is None
    for _ in range(400):
        prefill, rows, steps = rng.choice([(0, rng.randint(1, 60), rng.choice([1, 8])), (rng.randint(1, 500), 20, 1)])
        noise = rng.lognormvariate(-0.125, 0.5)  # its mean is 1
        wall_s = noise * (true.step_s(prefill, rows) if prefill else steps * true.step_s(0, rows))
        step_time.ended(wall_s, num_prefill_tokens=prefill, num_rows=rows, num_steps=steps, num_cached_tokens=prefill)
    rates = step_time.rates()
    assert rates is not None
    for step in [(0, 10), (0, 50), (100, 20), (400, 20)]:
        assert rates.step_s(*step) == pytest.approx(true.step_s(*step), rel=0.25)
    assert min(rates) >= 0
    assert step_time.cached_fraction == pytest.approx(0.5)


def test_lengths_of_outputs_are_found_again() -> None:
    rng, lengths = random.Random(4), OutputLengths()
    for _ in range(2000):
        length = int(rng.expovariate(1 / 80)) + 1
        lengths.ended(min(length, 100), at_limit=length >= 100)
    positions = [(index + 0.5) / 200 for index in range(200)]
    left = [lengths.left(10_000, may_stop=True, at=at) for at in positions]
    assert statistics.mean(left) == pytest.approx(80, rel=0.35)
    assert lengths.left(50, may_stop=False, at=0.5) == 50
    assert max(lengths.left(50, may_stop=True, at=at) for at in positions) == 50
