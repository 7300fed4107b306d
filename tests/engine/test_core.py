"""The core over a device that checks what it is told: whatever comes in, outputs are right and nothing is lost."""

import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import SeenTokens, SimulatedExecutor, generate_alone, make_request
from slow_tier import SlowTier

from jaxserve.config import EngineConfig
from jaxserve.engine import core, load_balancer, replica
from jaxserve.engine.core import EngineCore
from jaxserve.engine.deltas import Delta
from jaxserve.engine.event_log import EventLog, event_from_json, event_to_json, read_log, replay_log
from jaxserve.engine.events import (
    CacheReset,
    Cancelled,
    Record,
    ReplicaEvent,
    Scheduled,
    Submitted,
    Transferred,
    replay,
)
from jaxserve.engine.replica import Replica
from jaxserve.engine.step_chooser import NewChooser, StepChooser
from jaxserve.engine.step_stats import InFlight
from jaxserve.execution.executor import Executor
from jaxserve.kv_cache import eviction, group_kinds, page_store, pages, transfers
from jaxserve.metrics import EngineStats
from jaxserve.models.arch import ArchConfig, RopeConfig
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.schedule_config import ScheduleConfig
from jaxserve.scheduling import decode, ledger, prefill, scheduler
from jaxserve.scheduling.choice import StepChoice, Timing
from jaxserve.scheduling.plan import StepShape
from jaxserve.scheduling.sharded import AnyScheduler, new_scheduler
from jaxserve.scheduling.step_costs import StepCosts
from tests.parameters import mainly
from tests.random_runs import examples

ARCH = ArchConfig(
    "Fake",
    vocab_size=100,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=8,
    max_position=256,
    norm_eps=1e-6,
    ropes=(RopeConfig(theta=1e4),),
    windows=(None,),
)
SIZES = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, page_size=4, num_pages=24)
LARGER = replace(SIZES, max_num_seqs=6, max_num_batched_tokens=32)  # several prompts start in a step
DRAFTING = replace(SIZES, max_drafts=3, targets=((0, 5.0, 1.0), (3, 9.0, 2.0)))
FEW_PROGRAMS = replace(SIZES, max_num_seqs=24, max_num_batched_tokens=32, num_pages=40, few_programs=True)
FAILURE = RuntimeError("the device has failed")


def pass_on(error: BaseException) -> None:
    """Stand in for the leader of several processes, which tells the others."""


def end_at_assertions(error: BaseException) -> None:
    """Stand in likewise, but end the test if it is not the device that has failed."""
    if isinstance(error, AssertionError):
        raise error


class Driven:
    """A core with replicas over simulated devices, and what has become of each request."""

    def __init__(
        self,
        num_replicas: int = 1,
        *,
        sizes: ScheduleConfig = SIZES,
        max_steps: int = 1,
        step_ahead: bool = True,
        records: Sequence[Record] = (),
        on_failure: Callable[[BaseException], None] = pass_on,
        new_chooser: NewChooser = StepChooser,
    ) -> None:
        config = EngineConfig("none", multi_step=max_steps, step_ahead=step_ahead)
        self.executors = [SimulatedExecutor(sizes, max_steps) for _ in range(num_replicas)]
        self.replicas = [
            Replica(config, ARCH, executor, EngineStats(), record, new_chooser)
            for executor, record in zip_longest(self.executors, records)
        ]
        self.core = EngineCore(self.replicas, step_ahead=step_ahead, on_failure=on_failure)
        self.requests: list[Request] = []  # by key
        self.unfinished: dict[Request, list[int]] = {}
        self.ended: dict[Request, tuple[list[int], FinishReason]] = {}
        self.num_added = 0

    def submit(self, **kwargs: Any) -> Request:
        request = make_request(f"{self.num_added}#0", arrival=self.num_added, **kwargs)
        self.num_added += 1
        request.key = len(self.requests)
        self.requests.append(request)
        request.constraint = SeenTokens() if request.waits_for_tokens else None
        self.unfinished[request] = []
        self.core.inbox.append(Submitted([request]))
        return request

    def cancel(self, request: Request) -> None:
        self.core.inbox.append(Cancelled([request.key], FinishReason.ABORT))

    def end_moves(self, tier: SlowTier) -> None:
        tier.launch()
        keys = [tier.end(0, ok=True)[0] for _ in range(len(tier.moves))]
        self.core.inbox.append(Transferred(keys, ok=True))
        self.step()

    def step(self) -> None:
        self.core.step(0.0)
        self.take()
        self.core.check_integrity()

    def take(self) -> None:
        """Check each delta as a frontend would see it."""
        while self.core.outbox:
            delta = pickle.loads(pickle.dumps(self.core.outbox.popleft()))  # values: they could go to another process
            assert isinstance(delta, Delta)
            if delta.step is not None:
                for key, token_ids in zip(delta.step.keys, delta.step.token_ids, strict=True):
                    if token_ids:
                        self.unfinished[self.requests[key]] += token_ids
                for ended in delta.step.ended.values():
                    self._end(self.requests[ended.key], ended.reason)
            for ended in delta.ended:
                if self.requests[ended.key] in self.unfinished:
                    self._end(self.requests[ended.key], ended.reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        token_ids = self.unfinished.pop(request)
        expected, expected_reason = generate_alone(request)
        if reason is FinishReason.ABORT:
            assert token_ids == expected[: len(token_ids)]
        else:
            assert (token_ids, reason) == (expected, expected_reason)
        self.ended[request] = token_ids, reason

    def drain(self) -> None:
        while self.core.has_work():
            self.step()
        assert not self.unfinished
        assert all(replica.scheduler.num_pages_used == 0 for replica in self.replicas)


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
            core,
            decode,
            eviction,
            group_kinds,
            ledger,
            load_balancer,
            page_store,
            pages,
            prefill,
            replica,
            scheduler,
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
        (2, 53, True, SystemExit),
        *(
            pytest.param(*sizes, error, marks=pytest.mark.full)
            for sizes in ((2, 23, True), (3, 31, False))
            for error in (SystemExit, ValueError)
        ),
    ],
)
def test_wherever_a_step_breaks_off_everybody_is_told_and_the_core_serves_on(
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
            driven.core.recover(broken)  # as the core's thread does
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


def test_where_pages_for_drafts_run_out_a_program_runs_what_is_planned() -> None:
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


def test_time_comes_from_the_executor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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


def step_or_recover(driven: Driven, counts: Counter[str]) -> None:
    """Step as the core's thread does, which recovers where a planted error breaks off a cancel."""
    num_broken_off = counts["broken off"]
    try:
        driven.core.step(0.0)
    except RuntimeError as error:
        if error is not FAILURE or counts["broken off"] == num_broken_off:
            raise
        driven.core.recover(error)


def record_log(
    path: Path, num_events: int, num_replicas: int = 1, *, sizes: ScheduleConfig = SIZES, fails: bool = True
) -> tuple[list[Path], Counter[str]]:
    """Record a run of random events and failures; returns a log for each replica, and what has happened how often."""
    import random

    rng = random.Random(5)
    paths = [path.with_name(f"{path.name}.{index}" if index else path.name) for index in range(num_replicas)]
    logs = [EventLog(path, sizes) for path in paths]
    prefixes = [[], *([kind] * 24 for kind in range(3))]
    counts: Counter[str] = Counter()

    def recorder(log: EventLog) -> Record:
        def record(event: ReplicaEvent) -> None:
            counts[type(event).__name__] += 1
            if isinstance(event, Scheduled):
                counts["several steps"] += event.choice.max_steps > 1 or bool(event.choice.num_drafts)
            counts["plans"] += isinstance(event, Scheduled) and event.program is not None
            log.record(event)

        return record

    def break_off(*_: object) -> None:
        counts["broken off"] += 1
        raise FAILURE

    driven = Driven(num_replicas, sizes=sizes, max_steps=4, records=list(map(recorder, logs)))
    while sum(counts[kind.__name__] for kind in get_args(ReplicaEvent)) < num_events:
        match rng.randrange(8):
            case 0 | 1 if len(driven.unfinished) < 8 * num_replicas:
                for _ in range(rng.randrange(1, 3 * num_replicas)):
                    prompt = rng.choice(prefixes) + [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
                    stop_ids = frozenset([rng.randrange(5)] if rng.randrange(2) else [])
                    whose = {"priority": rng.choice([0, 0, 3]), "tenant": rng.choice(["", "a"])}
                    driven.submit(prompt=prompt, max_tokens=rng.randrange(1, 20), stop_ids=stop_ids, **whose)
            case 2 if driven.unfinished:
                driven.cancel(rng.choice(list(driven.unfinished)))
            case 3 if rng.randrange(10) == 0:
                driven.core.inbox.append(CacheReset())
            case 3 if fails and rng.randrange(10) == 0:
                replica = rng.choice(driven.replicas)
                executor = driven.executors[driven.replicas.index(replica)]
                match rng.randrange(3):
                    case 0:
                        executor.fails_at_launch = FAILURE
                    case 1:
                        executor.fails_on_device = FAILURE
                    case 2:  # fails in the middle of a plan, or of taking tokens
                        vars(replica.scheduler._ledger.store)["register_columns"] = break_off
            case _:
                step_or_recover(driven, counts)
                driven.take()
                counts["preempted"] = max(
                    [counts["preempted"], *(request.num_preemptions for request in driven.unfinished)]
                )
    driven.drain()
    for log in logs:
        log.close()
    return paths, counts


@pytest.mark.usefixtures("no_type_checks")  # they would take most of the time
@pytest.mark.parametrize(
    ("num_events", "num_replicas", "sizes"),
    [
        (3_000, 3, DRAFTING),
        *(
            pytest.param(10_000, *case, marks=pytest.mark.full)
            for case in ((3, DRAFTING), (1, SIZES), (1, LARGER), (3, LARGER))
        ),
    ],
)
def test_a_log_of_thousands_of_events_replays_to_the_same_plans(
    tmp_path: Path, num_events: int, num_replicas: int, sizes: ScheduleConfig
) -> None:
    paths, counts = record_log(tmp_path / "events", num_events, num_replicas, sizes=sizes)
    assert sum(len(path.read_text().splitlines()) for path in paths) > num_events
    assert sum(map(replay_log, paths)) == counts["plans"] > num_events // 5
    happened = {"Finished", "CacheReset", "Recovered", "several steps", "preempted"}
    assert all(counts[what] for what in happened | ({"Withdrawn"} if num_replicas > 1 else set())), counts


def test_the_end_of_a_transfer_is_an_event_that_is_replayed() -> None:
    events: list[ReplicaEvent] = []

    def record(event: ReplicaEvent) -> None:
        events.append(event_from_json(json.loads(json.dumps(event_to_json(event)))))

    driven = Driven(records=[record])
    tier = SlowTier(SIZES.page_size, 1000, driven.executors[0].device)
    scheduler = driven.replicas[0].scheduler
    vars(scheduler)["_tiers"] = [tier]
    scheduler.restart()
    for first in range(4):
        request = driven.submit(prompt=[first, *[1] * 38], max_tokens=2)
        while request in driven.unfinished:
            driven.step()
        driven.end_moves(tier)
    again = driven.submit(prompt=[0, *[1] * 38], max_tokens=2)
    driven.step()
    assert again.status is RequestStatus.LOADING
    driven.end_moves(tier)
    while again in driven.unfinished:
        driven.step()
    assert driven.ended[again][0] == generate_alone(again)[0]
    assert (again.num_cached_tokens, tier.counts["loaded"]) == (36, 9)
    digests = [event.digest for event in events if isinstance(event, Scheduled)]
    anew = new_scheduler(SIZES)
    vars(anew)["_tiers"] = [SlowTier(SIZES.page_size, 1000)]
    anew.restart()
    assert replay(events, anew) == len(set(digests))


class RandomChooser(StepChooser):
    """Chooses at random within the limits of programs."""

    def __init__(self, config: EngineConfig, scheduler: AnyScheduler, executor: Executor, costs: StepCosts) -> None:
        super().__init__(config, scheduler, executor, costs)
        self._random = Random(3)

    def choose(
        self, now_s: float, in_flight: Sequence[InFlight], constrained: Collection[Request]
    ) -> StepChoice | None:
        most = super().choose(now_s, in_flight, constrained)
        if most is None or self._random.random() < 0.2:  # or to wait for a step in flight
            return most if not in_flight else None
        timing = Timing(*(self._random.random() for _ in Timing._fields)) if self._random.random() < 0.5 else None
        may_split = most.may_split and self._random.random() < 0.5
        num_drafts = [self._random.randint(0, num) for num in most.num_drafts]
        if most.num_drafts and not any(num_drafts):
            return StepChoice(1, (), timing)
        return StepChoice(self._random.randint(1, most.max_steps), num_drafts, timing, may_split)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("sizes", [SIZES, replace(LARGER, targets=DRAFTING.targets), DRAFTING])
def test_another_chooser_makes_other_plans_of_the_same_tokens(tmp_path: Path, sizes: ScheduleConfig) -> None:
    """`drain` compares the tokens of each request with those that it gets alone."""
    choices: dict[str, list[StepChoice]] = {}
    for name, new_chooser in (("usual", StepChooser), ("random", RandomChooser)):
        log = EventLog(tmp_path / name, sizes)
        driven = Driven(sizes=sizes, max_steps=4, records=[log.record], new_chooser=new_chooser)
        draw = Random(7)
        for _ in range(40):
            prompt = [draw.randrange(5) for _ in range(draw.randrange(1, 20))]
            waits = draw.random() < 0.3
            driven.submit(prompt=prompt, max_tokens=draw.randrange(1, 20), priority=3 * waits, waits_for_tokens=waits)
            for _ in range(draw.randrange(4)):
                driven.step()
        driven.drain()
        log.close()
        choices[name] = [event.choice for event in read_log(tmp_path / name)[1] if isinstance(event, Scheduled)]
        assert replay_log(tmp_path / name) > 40
    assert sizes.max_drafts or {choice.max_steps for choice in choices["random"]} == {1, 2, 3, 4}
    assert len({tuple(choice.num_drafts) for choice in choices["random"]}) > 3 * (sizes.max_drafts > 0)
    assert not sizes.targets or any(choice.timing for choice in choices["random"])
    assert choices["usual"] != choices["random"]


@pytest.mark.usefixtures("no_type_checks")
def test_older_logs_have_the_fields_of_a_choice_beside_each_other(tmp_path: Path) -> None:
    (path,), counts = record_log(tmp_path / "events", 600, sizes=DRAFTING)
    first, *lines = path.read_text().splitlines()
    events = list(map(json.loads, lines))
    for event in events:
        if event[0] == "Scheduled":
            (max_steps, num_drafts, timing, may_split), program, digest = event[1:]
            event[1:] = [max_steps, program, digest, num_drafts, timing or [], may_split]
    path.write_text("".join(f"{line}\n" for line in (first, *map(json.dumps, events))))
    assert replay_log(path) == counts["plans"] > 100
    assert event_from_json(["Scheduled", 2, 8, 5]) == Scheduled(StepChoice(2), StepShape(8), 5)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("kind", mainly(["Added", "Recovered"], "Finished", "Updated", "CacheReset"))
def test_a_changed_log_is_found_out(tmp_path: Path, kind: str) -> None:
    """Some changes make no difference: a request that is ended a step earlier by its last token, say."""
    path = tmp_path / "events"
    record_log(path, 2000, fails=kind == "Recovered")
    lines = path.read_text().splitlines(keepends=True)
    pattern = rf'\["{kind}"' + (r".*\d" if kind == "Updated" else "")
    cancelled = {json.loads(line)[1] for line in lines if line.startswith('["Finished"')}  # may never start
    places = [i for i, line in enumerate(lines) if i > 300 and re.match(pattern, line)]
    if kind == "Added":
        places = [i for i in places if json.loads(lines[i])[1]["request_id"] not in cancelled]
    places = places[:8]
    num_found = 0
    for place in places:
        instead = [] if kind != "Updated" else [_with_a_token_less(lines[place])]
        path.write_text("".join([*lines[:place], *instead, *lines[place + 1 :]]))
        try:
            replay_log(path)
        except (RuntimeError, AssertionError, IndexError):
            num_found += 1
    least = len(places) if kind == "Added" else len(places) // 2 + 1
    assert num_found >= least > 0, f"{num_found} of {len(places)}"


def _with_a_token_less(line: str) -> str:
    kind, rows = json.loads(line)
    next(row for row in rows if row).pop()
    return json.dumps([kind, rows]) + "\n"


def test_a_log_is_bounded_and_may_be_torn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events"
    record_log(path, 500)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert len(list(read_log(path)[1])) == len(whole.splitlines()) - 2
    log = EventLog(path, SIZES, max_bytes=1000)
    for _ in range(1000):
        log.record(CacheReset())
    log.close()
    assert path.stat().st_size <= 1000
    assert replay_log(path) == 0
    assert "is full" in caplog.text
