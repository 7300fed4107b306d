"""One engine over several processes: tokens equal those of one process on one device."""

import json
import pickle
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.distributed.peers import EXIT_CODE
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import Job, assert_same, few_but_rich, jobs, run, tokens
from tests.processes.spawning import join, start, wait_for
from tests.random_runs import examples
from tests.soon_compiled import few_programs

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
    with few_programs():
        engine = DrivenEngine(EngineConfig(str(model), **SIZES | {"multi_step": 1}))
    collected: list[Workload] = []

    @given(jobs=jobs(aborts=True))
    @settings(few_but_rich, max_examples=examples(5))
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
    count: int, devices: int, model: Path, workloads: Path, outputs: Path, options: Sequence[list[dict[str, Any]]]
) -> list["subprocess.Popen[str]"]:
    """Start processes with some devices each, with `options` as leader.py has them: one list for each process."""
    paths = [str(model), str(workloads), str(outputs)]
    common = [str(LEADER), "{address}", "{count}"]
    return start([[*common, str(index), *paths, json.dumps(own)] for index, own in enumerate(options)], devices)


@pytest.fixture
def to_run(tmp_path: Path, workloads: list[Workload]) -> Path:
    path = tmp_path / "workloads"
    path.write_bytes(pickle.dumps([workload[:2] for workload in workloads]))
    return path


@pytest.mark.parametrize(
    ("count", "devices"), [(2, 2), pytest.param(4, 2, marks=[pytest.mark.full, pytest.mark.exhaustive])]
)
@pytest.mark.long
def test_refused_options_then_the_tokens_of_one_process_until_one_is_lost(
    tmp_path: Path, model: Path, to_run: Path, workloads: list[Workload], count: int, devices: int
) -> None:
    outputs = tmp_path / "outputs"
    good = SIZES | {"tensor_parallel_size": count * devices, "forbid_compiles": True}
    uneven, other = good | {"tensor_parallel_size": 1}, good | {"max_num_batched_tokens": 8}
    options = [[uneven, other if index == count - 1 else good, good] for index in range(count)]
    processes = start_leader(count, devices, model, to_run, outputs, options)
    wait_for(outputs.exists, processes)
    processes[1].kill()
    for index, (code, output) in enumerate(join(processes)):
        assert f"must be a multiple of the number of processes, got 1 and {count}" in output
        assert "all processes must have the same max_num_batched_tokens, got 16 in process 0 and 8 in another" in output
        if index != 1:
            assert code == EXIT_CODE, output
            assert "lost process 1 " in output, output
    stats: EngineStats
    results, stats = pickle.loads(outputs.read_bytes())
    for (_, planned, expected), got in zip(workloads, results, strict=True):
        for job, output, wanted in zip(planned, got, expected, strict=True):
            if job.abort is None:
                assert_same(output, wanted, job)
    assert stats.num_preemptions > 0
    assert stats.num_steps > stats.num_dispatches, "some dispatches had several"
    assert stats.num_cached_tokens > 0


@pytest.mark.full
def test_processes_with_different_plans_are_detected(tmp_path: Path, model: Path) -> None:
    workloads = tmp_path / "workloads"
    workloads.write_bytes(pickle.dumps([(None, [Job(tokens(9, 0))])]))
    common = SIZES | {"tensor_parallel_size": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "multi_step": 1}
    options = [[common], [common | {"strays": True}]]
    (leader_code, leader), (code, follower) = join(start_leader(2, 1, model, workloads, tmp_path / "outputs", options))
    assert code == leader_code == EXIT_CODE
    assert "process 1 on" in leader
    assert "its plans differ" in leader
    assert "its plans differ" in follower
