"""The core over a device that checks what it is told: whatever comes in, outputs are right and nothing is lost."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import SimulatedExecutor

from jaxserve.core import core, replica
from jaxserve.core.events import CacheReset
from jaxserve.errors import ConfigError
from jaxserve.scheduling import balancer, decode, ledger, prefill, prompts, scheduler, shard, starts
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.kv_cache import (
    eviction,
    group_kinds,
    page_store,
    pages,
    prefix_index,
    state_snapshots,
    transfers,
)
from jaxserve.scheduling.request import FinishReason
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests.driven_core import FAILURE, FEW_PROGRAMS, SIZES, Driven, end_at_assertions
from tests.random_runs import examples

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 4), min_size=1, max_size=30),
        "max_tokens": st.integers(1, 20),
        "stop_ids": st.frozensets(st.integers(0, 4), max_size=1),
        "waits_for_tokens": st.sampled_from([False, False, False, True]),
        "may_be_extended": st.sampled_from([False, False, True]),
        "priority": st.sampled_from([0, 0, 0, 2, -1]),
        "tenant": st.sampled_from(["", "", "a"]),
    }
)


class CoreMachine(RuleBasedStateMachine):
    """Random events and failures of the device: those that have not failed are served as if alone."""

    @initialize(
        num_replicas=st.integers(1, 3),
        max_steps=st.sampled_from([1, 4, 8]),
        max_drafts=st.sampled_from([0, 3]),
        step_ahead=st.booleans(),
        splits=st.booleans(),
        sizes=st.sampled_from([SIZES, FEW_PROGRAMS]),
    )
    def start(
        self, num_replicas: int, max_steps: int, max_drafts: int, step_ahead: bool, splits: bool, sizes: ScheduleConfig
    ) -> None:
        sizes = replace(sizes, max_drafts=max_drafts, has_split_steps=splits)
        self.driven = Driven(
            num_replicas, sizes=sizes, max_steps=max_steps, step_ahead=step_ahead, on_failure=end_at_assertions
        )

    @rule(request=REQUESTS, count=st.sampled_from([1, 1, 20]))
    def submit(self, request: dict[str, Any], count: int) -> None:
        for _ in range(count):
            self.driven.submit(**request)

    @precondition(lambda self: self.driven.unfinished)
    @rule(data=st.data(), times=st.integers(1, 2))
    def cancel(self, data: st.DataObject, times: int) -> None:
        """Cancel a request in whatever state it is; twice is as once."""
        request = data.draw(st.sampled_from(list(self.driven.unfinished)))
        for _ in range(times):
            self.driven.cancel(request)
        self.driven.core.take_events()
        self.driven.take()
        assert request.status.name == "FINISHED"
        assert request in self.driven.ended
        assert not request.pages

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driven.step()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driven.core.inbox.append(CacheReset())

    @rule(data=st.data(), on_device=st.booleans())
    def fail(self, data: st.DataObject, on_device: bool) -> None:
        executor = data.draw(st.sampled_from(self.driven.executors))
        setattr(executor, "fails_on_device" if on_device else "fails_at_launch", FAILURE)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "driven"):
            self.driven.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driven"):
            return
        self.driven.drain()
        assert len(self.driven.ended) == self.driven.num_added
        for executor in self.driven.executors:
            executor.fails_at_launch = executor.fails_on_device = None
        request = self.driven.submit(prompt=[1, 2, 3], max_tokens=5)
        self.driven.drain()
        assert self.driven.ended[request][1] is not FinishReason.ABORT, "the core serves on"


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


class BreakOff:
    """Raises an error at one line of the modules that the core changes requests in."""

    FILES = frozenset(
        module.__file__
        for module in (
            balancer,
            core,
            decode,
            eviction,
            group_kinds,
            ledger,
            page_store,
            pages,
            prefill,
            prefix_index,
            prompts,
            replica,
            scheduler,
            shard,
            starts,
            state_snapshots,
            transfers,
        )
    )

    def __init__(self, line: int, error: type[BaseException]) -> None:
        self.line, self.error = line, error
        self.where: str | None = None

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self.FILES or self.where is not None:
            return None
        if event == "line":
            self.line -= 1
            if self.line < 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self.error
        return self.trace


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(  # strides are primes: no loop is always met at one line
    ("num_replicas", "stride", "devices_fail", "error"),
    [
        (1, 7, False, ValueError),
        pytest.param(2, 53, True, SystemExit, marks=pytest.mark.long),
        *(
            pytest.param(*sizes, error, marks=pytest.mark.full)
            for sizes in ((2, 23, True), (3, 31, False))
            for error in (SystemExit, ValueError)
        ),
    ],
)
def test_a_step_broken_off_anywhere_ends_its_requests_and_the_core_continues(
    num_replicas: int, stride: int, devices_fail: bool, error: type[BaseException]
) -> None:
    """Requests end as they would alone, or are aborted; pages, slots and queues are as if nothing had happened.

    So they do where devices fail as well, and the step breaks off again while that is dealt with.
    """
    line, places, driven = 0, set(), Driven()
    while True:
        driven = Driven(num_replicas)
        for n in range(6 * num_replicas):
            driven.submit(prompt=[n % 3, 1, 2, 3, 4, 1, 2, 3, 4, 1][: 3 + n % 8], max_tokens=1 + n % 5)
        driven.cancel(next(iter(driven.unfinished)))
        driven.core.step(0.0)
        driven.cancel(list(driven.unfinished)[3])
        if devices_fail:
            driven.executors[0].fails_at_launch = driven.executors[1].fails_on_device = FAILURE
        break_off = BreakOff(line, error)
        sys.settrace(break_off.trace)
        try:
            for _ in range(8):
                driven.core.step(0.0)
        except error as broken:
            sys.settrace(None)
            driven.core.recover(broken)  # the core's thread does the same
        finally:
            sys.settrace(None)
        driven.step()
        for _ in range(100):
            if driven.core.has_work():
                driven.step()
        assert not driven.unfinished, f"never told: {break_off.where}"
        assert not driven.core.has_work()
        for executor in driven.executors:
            executor.fails_at_launch = executor.fails_on_device = None
        request = driven.submit(prompt=[1, 2, 3], max_tokens=5)
        driven.drain()
        assert driven.ended[request][1] is not FinishReason.ABORT, break_off.where
        if break_off.where is None:
            break
        places.add(break_off.where)
        line += stride
    assert len(places) > (100 if devices_fail else 200)
    num_aborted = sum(reason is FinishReason.ABORT for _, reason in driven.ended.values())
    assert num_aborted > 2 if devices_fail else num_aborted == 2, "the cancelled ones alone"


def test_a_plan_without_pages_for_drafts_still_has_a_program() -> None:
    """Few programs have several steps, but all numbers of rows have drafts."""
    sizes = replace(FEW_PROGRAMS, max_num_seqs=32, max_num_batched_tokens=512, num_pages=131, max_drafts=8)
    driven = Driven(sizes=sizes, max_steps=32)
    for n in range(32):
        driven.submit(prompt=[n % 5, *range(5)], max_tokens=20)
    drafted = set()
    while driven.unfinished:
        driven.step()
        drafted |= {bool(step.plan.num_drafts) for step in driven.replicas[0].in_flight if step.plan.num_rows > 16}
    assert drafted == {True, False}
    assert {reason for _, reason in driven.ended.values()} == {FinishReason.LENGTH}


def test_a_replica_with_a_broken_device_ends_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(2)
    requests = [driven.submit(prompt=[n], max_tokens=5) for n in range(4)]
    driven.step()
    failed = driven.replicas[0]
    lost = set(driven.core._balancer.ids_on(0))

    def fail() -> bool:
        raise FAILURE

    monkeypatch.setattr(failed.in_flight[0].handle, "is_ready", fail)
    driven.step()
    driven.drain()
    assert {r.request_id for r in requests if driven.ended[r][1] is FinishReason.ABORT} == lost


def test_a_request_whose_adapter_is_gone_ends_without_the_others() -> None:
    driven = Driven(2, sizes=replace(SIZES, max_loras=1))

    def hold(adapter: str) -> None:
        if adapter == "gone":
            raise ConfigError("the adapter is gone")

    driven.core.hold_adapter = hold
    lost, *served = (driven.submit(prompt=[1, 2], max_tokens=3, adapter=each) for each in ("gone", "kept", "", "kept"))
    driven.drain()
    assert driven.ended[lost] == ([], FinishReason.ABORT)
    assert [str(each) for each in driven.errors] == ["the adapter is gone"]
    assert all(reason is not FinishReason.ABORT for _, reason in (driven.ended[each] for each in served))


def test_running_and_waiting_adapters_are_told_apart() -> None:
    driven = Driven(1, sizes=replace(SIZES, max_loras=1))
    for adapter in ("a", "", "b"):
        driven.submit(prompt=[1, 2], max_tokens=3, adapter=adapter)
    assert driven.core.adapters_in_use() == (set(), {"a", "b"})
    driven.step()
    assert driven.core.adapters_in_use() == ({"a"}, {"b"})
    driven.drain()
    assert driven.core.adapters_in_use() == (set(), set())


def test_an_event_that_breaks_off_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever counts what it has sent would wait for it for ever."""
    driven = Driven()
    driven.submit(prompt=[1, 2], max_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(driven.core._balancer, "add", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driven.core.take_events()
    assert (driven.core.num_taken, len(driven.core.inbox)) == (1, 0)
    driven.core.inbox.append(CacheReset())
    driven.core.lose_all(ValueError())
    assert driven.core.num_taken == 2


def test_executors_are_executors() -> None:
    assert isinstance(SimulatedExecutor(SIZES), Executor)


@pytest.mark.parametrize("splits", [False, True])
def test_a_row_that_waits_for_its_tokens_advances_every_second_plan_or_every_split_one(splits: bool) -> None:
    driven = Driven(sizes=replace(SIZES, has_split_steps=splits))
    waiting = driven.submit(prompt=[1], max_tokens=6, waits_for_tokens=True)
    others = [driven.submit(prompt=[2, n], max_tokens=12) for n in range(2)]
    lengths = []
    while driven.unfinished:
        driven.step()
        lengths.append([len(driven.unfinished.get(r) or driven.ended.get(r, [[]])[0]) for r in (waiting, *others)])
    steps = [step for step, (before, after) in enumerate(pairwise(lengths)) if after[0] > before[0]]
    assert [b - a for a, b in pairwise(steps)] == [1 if splits else 2] * (len(steps) - 1)
    assert len(lengths) <= 12 + 2, "the others did not wait for it"


@pytest.mark.parametrize("is_queued", [True, False])
def test_rows_that_cannot_be_split_leave_others_their_several_steps(is_queued: bool) -> None:
    driven = Driven(sizes=replace(SIZES, has_split_steps=True), max_steps=8)
    for n in range(SIZES.max_num_seqs if is_queued else 2):
        driven.submit(prompt=[n], max_tokens=20)
    driven.submit(prompt=[99], max_tokens=2, waits_for_tokens=True, may_be_extended=not is_queued)
    most_steps = 0
    while driven.unfinished:
        driven.step()
        most_steps = max([most_steps, *(step.plan.num_steps for step in driven.replicas[0].in_flight)])
        assert not any(step.plan.is_split and step.plan.num_steps > 1 for step in driven.replicas[0].in_flight)
    assert most_steps > 1


def test_time_comes_only_from_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def no_clock() -> float:
        raise AssertionError("the core has read a clock")

    driven = Driven(max_steps=4)
    with monkeypatch.context() as patch:  # the report of costs reads a clock after the test
        for name in ("monotonic", "perf_counter", "time"):
            patch.setattr(time, name, no_clock)
        for n in range(3):
            driven.submit(prompt=[n], max_tokens=9)
        driven.drain()
