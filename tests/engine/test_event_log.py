"""Logs of events: whoever replays one makes the same plans, and a log that was changed is found out."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from simulation import Loop, generate_alone, make_request, make_scheduler
from slow_mover import SlowMover

from jaxserve.core.event_log import EventLog, event_from_json, event_to_json, read_log, replay_log
from jaxserve.core.events import Added, CacheReset, Record, ReplicaEvent, Scheduled, replay
from jaxserve.scheduling.request import FinishReason, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepChoice, StepShape
from tests.driven_core import DRAFTING, FAILURE, LARGER, SIZES, Driven
from tests.parameters import mainly


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
                        vars(replica.scheduler.shards[0].ledger.store)["register_blocks"] = break_off
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

    mover = SlowMover(SIZES.page_size, [40, 1000])
    driven = Driven(records=[record], movers=[mover])
    for first in range(4):
        request = driven.submit(prompt=[first, *[1] * 38], max_tokens=2)
        while request in driven.unfinished:
            driven.step()
        driven.end_moves(mover)
    again = driven.submit(prompt=[0, *[1] * 38], max_tokens=2)
    driven.step()
    assert again.status is RequestStatus.LOADING
    driven.end_moves(mover)
    while again in driven.unfinished:
        driven.step()
    assert driven.ended[again][0] == generate_alone(again)[0]
    assert (again.num_cached_tokens, mover.counts["loaded"]) == (36, 9)
    digests = [event.digest for event in events if isinstance(event, Scheduled)]
    anew = Scheduler(SIZES, tiers=mover.new_tiers())
    assert replay(events, anew) == len(set(digests))


@pytest.mark.usefixtures("no_type_checks")
def test_older_logs_have_the_fields_of_a_choice_beside_each_other(tmp_path: Path) -> None:
    (path,), counts = record_log(tmp_path / "events", 600, sizes=DRAFTING)
    first, *lines = path.read_text().splitlines()
    events = list(map(json.loads, lines))
    for event in events:
        if event[0] == "Scheduled":
            (max_steps, num_drafts, timing, may_split, *others), program, digest = event[1:]
            assert others == [None, None]
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
    assert len(list(read_log(path).events)) == len(whole.splitlines()) - 2
    log = EventLog(path, SIZES, max_bytes=1000)
    for _ in range(1000):
        log.record(CacheReset())
    log.close()
    assert path.stat().st_size <= 1000
    assert replay_log(path) == 0
    assert "is full" in caplog.text


def test_a_request_that_moves_registers_its_pages_as_the_log_of_its_new_replica_says() -> None:
    """Where the pages of outputs are registered together, at which of them depends on the slot."""
    sizes = {"page_size": 32, "max_num_seqs": 2, "max_num_batched_tokens": 160}
    before = Loop(make_scheduler(**{**sizes, "max_num_seqs": 1}))
    moved = make_request("moved", [1] * 8, 200, priority=1)
    before.add(moved)
    while len(moved.output_token_ids) < 70:
        before.step()
    before.add(make_request("above", [2], 1)).step()
    [withdrawn] = before.scheduler.withdraw()
    assert withdrawn is moved
    logged = event_from_json(json.loads(json.dumps(event_to_json(Added(moved)))))
    assert isinstance(logged, Added)
    num_cached = []
    for request in (moved, logged.request):
        loop = Loop(make_scheduler(**sizes)).add(make_request("first", [3], 200))
        loop.step()
        loop.add(request)
        while request.num_known_tokens < 100:
            loop.step()
        assert request.slot == 1
        loop.scheduler.finish("first", FinishReason.ABORT)
        loop.add(again := make_request("again", request.tokens(0, 100), 1)).step()
        num_cached.append(again.num_cached_tokens)
    assert num_cached == [96, 96]
