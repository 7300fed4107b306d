"""Several replicas in one engine: the tokens of one, none idle beside a waiting request, and prefixes found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import Lowering
from jaxserve.layers.sharding import replica_meshes
from jaxserve.scheduling.router import Router
from jaxserve.tools.bench.load import TimedRequest, run_load
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import Job, assert_same, busy_step, few_but_rich, generate, jobs, run, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.sharded.devices.sizes import MODEL, SIZES

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(("replicas", "devices"), [(1, 2), (1, 8), (8, 1), (2, 4), (3, 2)])
def test_meshes_split_their_devices_along_the_tensor_axis_alone(replicas: int, devices: int) -> None:
    meshes = [mesh for mesh in replica_meshes(devices, replicas) if mesh is not None]
    assert len(meshes) == replicas
    for index, mesh in enumerate(meshes):
        assert list(mesh.shape.items()) == [("data", 1), ("tensor", devices), ("expert", 1), ("pipeline", 1)]
        assert list(mesh.devices.flat) == jax.devices()[index * devices : (index + 1) * devices]


def finish_all(engine: DrivenEngine) -> None:
    while engine.has_unfinished():
        busy_step(engine)


@given(jobs=jobs(aborts=True))
@settings(few_but_rich, max_examples=examples(5))
@pytest.mark.parametrize(
    ("replicas", "devices", "multi_step"),
    [(2, 2, 1), *(pytest.param(*sizes, 5, marks=pytest.mark.full) for sizes in [(2, 2), (3, 1)])],
)
def test_tokens_are_those_of_one_replica(
    start: Start, jobs: list[Job], replicas: int, devices: int, multi_step: int
) -> None:
    kept = [Job(job.prompt, job.params, job.arrival, salt=job.salt) for job in jobs]
    expected = run(start(), kept)
    options = {} if multi_step == 1 else {"multi_step": multi_step}
    for output, wanted, job in zip(run(start(devices, replicas, **options), jobs), expected, jobs, strict=True):
        if job.abort is None:
            assert_same(output, wanted, job)


@pytest.mark.parametrize("options", mainly([{}], {"step_ahead": False}))
def test_no_replica_idles_beside_a_waiting_request(start: Start, options: dict[str, Any]) -> None:
    engine = start(2, 2, **options)
    before = engine.stats.num_preemptions
    for index in range(24):
        params = SamplingParams(temperature=0, max_tokens=2 + 37 * (index % 3 == 0), ignore_eos=True)
        engine.add_request(str(index), tokens(1 + index % 20, index), params)
    while engine.has_unfinished():
        idle, num_waiting = [core for core in engine.replicas if not core.has_work()], engine.occupancy.num_waiting
        busy_step(engine)
        # A replica that got a request with a single token to go may have ended it by now.
        num_idle = sum(not core.view.changes.was_planned for core in idle)
        assert not num_idle or num_waiting < len(idle), "a request waits, and a replica that was idle still is"
    assert engine.stats.num_preemptions > before, "preempted requests are among those that wait"


def test_equal_requests_are_spread_evenly(start: Start) -> None:
    engine = start(2, 2)
    for index in range(6):
        engine.add_request(str(index), tokens(3, index), GREEDY)
    busy_step(engine)
    assert [core.scheduler.num_running for core in engine.replicas] == [3, 3]
    finish_all(engine)


def test_a_long_queue_costs_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, looks = start(2, 2), []
    choose = Router.choose
    monkeypatch.setattr(Router, "choose", lambda *args, **options: looks.append(args) or choose(*args, **options))
    for index in range(2000):
        engine.add_request(str(index), tokens(9, index), GREEDY)
    assert not looks
    for _ in range(20):
        looks.clear()
        busy_step(engine)
        assert len(looks) <= 2 * 8 + 2, "of those that are started, and of one that is not"
    for index in range(2000):
        engine.abort(str(index))
    engine.step()


def test_a_request_goes_where_its_prefix_is(start: Start) -> None:
    engine = start(2, 2)
    systems = [tokens(24, f"system {n}") for n in range(2)]
    generate(engine, systems, GREEDY)  # one on each
    before = engine.stats.num_cached_tokens
    for round_ in range(2):
        for index in (1, 0):
            outputs = generate(engine, [systems[index] + tokens(3, (round_, index))], GREEDY)
            assert outputs[0].num_cached_tokens == 24
    assert engine.stats.num_cached_tokens == before + 4 * 24


def test_the_queue_is_first_come_first_served(start: Start) -> None:
    engine = start(2, 2)
    outputs = [engine.add_request(str(n), tokens(9, n), GREEDY) for n in range(12)]
    while engine.has_unfinished():
        busy_step(engine)
        have_begun = [output.metrics.scheduled_s is not None for output in outputs]
        assert have_begun == sorted(have_begun, reverse=True)


def test_a_broken_replica_ends_its_own_requests_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(2, 2)
    prompts = [tokens(5, n) for n in range(4)]
    expected = generate(engine, prompts, GREEDY)
    outputs = [engine.add_request(str(n), prompt, GREEDY) for n, prompt in enumerate(prompts)]
    busy_step(engine)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("device")

    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[1].executor, "launch", fail)
        with pytest.raises(MemoryError):
            finish_all(engine)
    finish_all(engine)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(reasons) == ["abort", "abort", "length", "length"]
    for output, wanted in zip(outputs, expected, strict=True):
        if output.outputs[0].finish_reason != "abort":
            assert_same(output, wanted)
    for output, wanted in zip(generate(engine, prompts, GREEDY), expected, strict=True):
        assert_same(output, wanted)


def test_a_request_can_be_aborted_while_no_replica_has_room(start: Start) -> None:
    engine = start(2, 2)
    outputs = [engine.add_request(str(n), tokens(9, n), GREEDY) for n in range(12)]
    busy_step(engine)
    engine.abort("11")
    assert outputs[11].finished
    assert outputs[11].outputs[0].finish_reason == "abort"
    finish_all(engine)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 11 + ["abort"]


@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (2, 2)])
def test_a_load_has_the_steps_of_all_replicas(start: Start, replicas: int, devices: int) -> None:
    engine = start(devices, replicas)
    trace = run_load(engine, [TimedRequest(tokens(9, n), 12) for n in range(12)])
    assert trace.engine is not None
    assert sum(step.num_tokens for step in trace.engine.steps) == trace.engine.stats.num_tokens
    assert max(step.num_rows for step in trace.engine.steps) <= engine.schedule.max_num_seqs


def test_replicas_hold_weights_and_pool_on_devices_of_their_own(start: Start) -> None:
    engine = start(2, 2)
    for index, core in enumerate(engine.replicas):
        for leaf in jax.tree.leaves((core.executor.params, core.executor.state)):
            assert {shard.device.id for shard in leaf.addressable_shards} == {2 * index, 2 * index + 1}


@pytest.mark.full  # check_engine.py runs it by default, for one replica
@pytest.mark.usefixtures("no_xla_cache")
def test_a_second_start_lowers_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> DrivenEngine:
        sizes = SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 1, "compilation_cache_dir": str(tmp_path)}
        return DrivenEngine(EngineConfig(str(model), data_parallel_size=2, tensor_parallel_size=2, **sizes))

    def lower(*_: object) -> None:
        raise AssertionError("every program is on disk")

    prompts = [tokens(9, n) for n in range(4)]
    expected = generate(start(), prompts, GREEDY)
    monkeypatch.setattr(Lowering, "step", lower)
    for output, wanted in zip(generate(start(), prompts, GREEDY), expected, strict=True):
        assert_same(output, wanted)


def test_all_replicas_get_other_weights(start: Start, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", seed=1, **MODEL)
    prompts = [tokens(9, n) for n in range(4)]
    engines = [start(), start(2, 2)]
    old, new = [], []
    for engine in engines:
        before = engine.devices.params
        old.append(generate(engine, prompts, GREEDY))
        engine.update_weights(tmp_path)
        new.append(generate(engine, prompts, GREEDY))
        engine.update_weights(before)
    for results in (old, new):
        for output, wanted in zip(results[1], results[0], strict=True):
            assert_same(output, wanted)
    assert [o.outputs[0].token_ids for o in old[0]] != [o.outputs[0].token_ids for o in new[0]]


def test_more_replicas_than_devices_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"at most the number of devices, got 4 x 3 and 8"):
        start(4, 3)
