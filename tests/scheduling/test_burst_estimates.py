"""Estimates of waits in a burst after requests of other kinds: from steps of one row, before a second one was seen."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from jaxserve.models import registry
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from jaxserve.scheduling.step_time import Rates
from tests.checkpoints import hf_dict
from tests.simulation import SimulatedExecutor

SCHEDULE = ScheduleConfig(16, 256, max_model_len=1024, page_size=16, num_pages=4000)
MULTI_STEP, DRAFTS = 8, 3


class TimedStep(NamedTuple):
    """A step that ends at a known time."""

    executor: Any
    launched_s: float
    ended_s: float
    max_new: list[int]
    num_compiles: int = 0

    def is_ready(self) -> bool:
        return self.ended_s <= self.executor.now_s

    def result(self) -> StepResult:
        self.executor.now_s = max(self.executor.now_s, self.ended_s)
        tokens = np.zeros((len(self.max_new), max(*self.max_new, 1)), np.int32)
        return StepResult(tokens, np.array(self.max_new, np.int32), self.ended_s)


class TimedExecutor(SimulatedExecutor):
    """Executor whose steps take the times of `rates`, and more or less by chance."""

    costs = Costs(1, lambda num_tokens, num_live: num_tokens, lambda num_tokens, num_rows, _: 4 * num_tokens + num_rows)

    def __init__(self, rates: Rates, seed: int) -> None:
        super().__init__(SCHEDULE)
        self.now_s, self._rates, self._free_s, self._random = 0.0, rates, 0.0, random.Random(seed)

    def took_s(self, num_prefill_tokens: int, num_rows: int, num_steps: int = 1) -> float:
        return self._random.lognormvariate(-0.02, 0.2) * num_steps * self._rates.step_s(num_prefill_tokens, num_rows)

    def launch(self, plan: StepPlan, program: StepShape) -> Any:
        self._free_s = max(self._free_s, self.now_s) + self.took_s(plan.num_prefill_tokens, plan.num_decode_tokens)
        return TimedStep(self, self.now_s, self._free_s, plan.max_new)


Measured = tuple[float, dict[str, int]]  # time of a dispatch and its counts, as `StepTime.ended` takes them
History = Callable[[TimedExecutor, random.Random], Iterator[Measured]]


def prompt(device: TimedExecutor, num_tokens: int) -> Measured:
    return device.took_s(num_tokens, 0), {"num_prefill_tokens": num_tokens, "num_rows": 0}


def decode(device: TimedExecutor, num_rows: int, num_steps: int = 1) -> Measured:
    counts = {"num_prefill_tokens": 0, "num_rows": num_rows, "num_steps": num_steps}
    return device.took_s(0, num_rows, num_steps), counts


def one_request(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    """Return the fewest steps from which anything is estimated."""
    yield prompt(device, 60)
    yield from (decode(device, 1) for _ in range(3))


def single(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    for _ in range(5):
        yield prompt(device, rng.randint(20, 100))
        yield from (decode(device, 1) for _ in range(30))


def same_prompts(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    for _ in range(5):
        yield prompt(device, 50)
        yield from (decode(device, 1) for _ in range(30))


def with_schemas(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    """Every other request computes a mask for each token, which takes longer."""
    for index in range(6):
        yield prompt(device, rng.randint(20, 100))
        for _ in range(30):
            wall_s, counts = decode(device, 1)
            yield wall_s * (1.3 if index % 2 else 1.0), counts


def multi_step(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    for _ in range(6):
        yield prompt(device, rng.randint(20, 100))
        yield from (decode(device, 1, MULTI_STEP) for _ in range(4))


def prefill_heavy(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    for _ in range(40):
        yield prompt(device, rng.randint(150, 256))
        yield decode(device, 1)


def speculative(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    """Each round computes a row's token and its drafts, of which some are accepted."""
    for _ in range(6):
        yield prompt(device, rng.randint(20, 100))
        for _ in range(8):
            wall_s = device.took_s(0, 1 + DRAFTS, 2)
            yield wall_s, {"num_prefill_tokens": 0, "num_rows": 1, "num_steps": 2, "num_sampled": rng.randint(4, 6)}


def few_rows(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    for _ in range(10):
        yield prompt(device, rng.randint(20, 100))
        yield from (decode(device, rng.randint(1, 4)) for _ in range(10))


def passed_burst(device: TimedExecutor, rng: random.Random) -> Iterator[Measured]:
    """Full batches, then single requests again."""
    for _ in range(40):
        yield decode(device, SCHEDULE.max_num_seqs)
    yield from single(device, rng)


def errors_in_burst(rates: Rates, history: History, seed: int) -> list[float]:
    """Return the estimates of a burst's waits relative to the waits, of requests behind two full batches."""
    device, rng = TimedExecutor(rates, seed), random.Random(seed)
    replica = Replica(EngineConfig("none"), registry.from_hf_config(hf_dict("llama")), device, EngineStats())
    for wall_s, counts in history(device, rng):
        replica.step_stats.step_time.ended(wall_s, **counts)
    core = EngineCore([replica], step_ahead=True, on_failure=lambda _: None)
    estimator, expected_s, found = WaitEstimator(core), dict[int, float](), list[float]()
    for index in range(90):
        num_tokens, output = rng.randint(20, 100), rng.randint(20, 60)
        ids = [index, *range(2, num_tokens + 1)]
        request = Request(
            f"{index}#0", ids, SamplingParams(max_tokens=output), 0, num_tokens + output, arrival=index, key=index
        )
        if index > 2 * SCHEDULE.max_num_seqs and index % 8 == 0:  # the first waits are few steps long
            wait = estimator.wait(num_tokens)
            assert wait is not None
            expected_s[index] = float(wait.start_s)
        core.inbox.append(Submitted([request]))
    while core.has_work():
        core.step(device.now_s)
        while core.outbox:
            delta = core.outbox.popleft()
            assert isinstance(delta, Delta)
            found += [expected_s[each.key] / delta.at_s for each in delta.admitted if each.key in expected_s]
    return found


# Rows that take as long as their FLOPs make expect, longer, and shorter; steps that hardly take time of their own.
RATES = {
    "as-expected": Rates(0.010, 0.010, 0.0008, 0.0010),
    "slow-rows": Rates(0.012, 0.010, 0.0008, 0.0014),
    "fast-rows": Rates(0.010, 0.012, 0.0010, 0.0008),
    "heavy-steps": Rates(0.050, 0.045, 0.0005, 0.0006),
    "light-steps": Rates(0.002, 0.0015, 0.001, 0.0014),
}
CHOSEN = "slow-rows"  # with all histories
HISTORIES: list[History] = [
    one_request,
    single,
    same_prompts,
    with_schemas,
    multi_step,
    prefill_heavy,
    speculative,
    few_rows,
    passed_burst,
]


CASES = [
    pytest.param(
        rates,
        history,
        id=f"{name}-{history.__name__}",
        marks=[] if name == CHOSEN or history is single else pytest.mark.full,
    )
    for name, rates in RATES.items()
    for history in HISTORIES
]


@pytest.mark.parametrize(("rates", "history"), CASES)
def test_estimates_in_a_burst_are_right_within_a_factor_of_1_5(rates: Rates, history: History) -> None:
    found = errors_in_burst(rates, history, seed=1)
    assert len(found) == 7
    assert min(found) > 1 / 1.5
    assert max(found) < 1.5
