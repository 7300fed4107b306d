"""One engine over several processes: tokens equal those of one process on one device."""

import json
import pickle
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.metrics import EngineStats
from jaxserve.outputs import RequestOutput
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import Job, assert_same, few_but_rich, jobs, run, tokens
from tests.processes.spawning import join, start
from tests.random_runs import examples

SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 18,  # four busy rows do not fit, so that preemption is common
    "multi_step": 5,
    "compile_ahead": "minimal",
    "skip_tokenizer_init": True,
}
Workload = tuple[Path | None, list[Job], list[RequestOutput]]
LEADER = Path(__file__).with_name("leader.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", num_attention_heads=8, head_dim=8)
    return path


@pytest.fixture(scope="module")
def workloads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Workload]:
    """Return random requests of every kind and their results on one process and device; the last with other weights."""
    engine = Engine(EngineConfig(str(model), **SIZES))
    collected: list[Workload] = []

    @given(jobs=jobs(aborts=True))
    @settings(few_but_rich, max_examples=examples(8))
    def collect(jobs: list[Job]) -> None:
        engine.reset_prefix_cache()
        whole = [Job(job.prompt, job.params, job.arrival, salt=job.salt) for job in jobs]
        collected.append((None, jobs, run(engine, whole)))

    collect()
    other = tmp_path_factory.mktemp("other")
    write_checkpoint(other, "llama", seed=1, num_attention_heads=8, head_dim=8)
    engine.update_weights(other)
    prompts = [Job(tokens(9, n)) for n in range(4)]
    return [*collected, (other, prompts, run(engine, prompts))]


def start_leader(
    count: int, devices: int, model: Path, workloads: Path, outputs: Path, options: Sequence[dict[str, Any]]
) -> list["subprocess.Popen[str]"]:
    """Start processes with some devices each; the last of `options` goes for all further processes."""
    every = [*options, *[options[-1]] * (count - len(options))]
    paths = [str(model), str(workloads), str(outputs)]
    common = [str(LEADER), "{address}", "{count}"]
    return start([[*common, str(index), *paths, json.dumps(own)] for index, own in enumerate(every)], devices)


@pytest.mark.parametrize(
    ("count", "devices"), [(2, 2), pytest.param(4, 2, marks=[pytest.mark.full, pytest.mark.exhaustive])]
)
def test_tokens_are_those_of_one_process(
    tmp_path: Path, model: Path, to_run: Path, workloads: list[Workload], count: int, devices: int
) -> None:
    outputs = tmp_path / "outputs"
    options = SIZES | {"tensor_parallel_size": count * devices, "forbid_compiles": True}
    for code, output in join(start_leader(count, devices, model, to_run, outputs, [options])):
        assert code == 0, output
    stats: EngineStats
    results, stats = pickle.loads(outputs.read_bytes())
    for (_, planned, expected), got in zip(workloads, results, strict=True):
        for job, output, wanted in zip(planned, got, expected, strict=True):
            if job.abort is None:
                assert_same(output, wanted, job)
    assert stats.num_preemptions > 0
    assert stats.num_steps > stats.num_dispatches, "some dispatches had several"
    assert stats.num_cached_tokens > 0


@pytest.fixture
def to_run(tmp_path: Path, workloads: list[Workload]) -> Path:
    path = tmp_path / "workloads"
    path.write_bytes(pickle.dumps([workload[:2] for workload in workloads]))
    return path


@pytest.fixture
def one_job(tmp_path: Path) -> Path:
    """Return workloads for runs that end before any result."""
    path = tmp_path / "workloads"
    path.write_bytes(pickle.dumps([(None, [Job(tokens(9, 0))])]))
    return path


@pytest.mark.full
def test_processes_that_plan_otherwise_are_found_out(tmp_path: Path, model: Path, one_job: Path) -> None:
    common = SIZES | {"tensor_parallel_size": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "multi_step": 1}
    options = [common, common | {"strays": True}]
    (leader_code, leader), (code, follower) = join(start_leader(2, 1, model, one_job, tmp_path / "outputs", options))
    assert code == leader_code == 75
    assert "process 1 on" in leader
    assert "its plans differ" in leader
    assert "its plans differ" in follower


def test_processes_of_other_options_are_refused(tmp_path: Path, model: Path, one_job: Path) -> None:
    options = [SIZES | {"tensor_parallel_size": 2, "max_num_batched_tokens": tokens} for tokens in (16, 8)]
    for code, output in join(start_leader(2, 1, model, one_job, tmp_path / "outputs", options)):
        assert code == 1, "an error that nobody caught"
        assert "all processes must have the same max_num_batched_tokens, got 16 in process 0 and 8 in another" in output
