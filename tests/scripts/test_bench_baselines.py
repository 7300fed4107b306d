"""The comparison with baselines: turns, medians and ratios, and baselines that die or fail."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bench_baselines
from baselines import rounds
from baselines.cpu_times import CpuTimes
from baselines.fixed_batches import generate_in_batches
from baselines.limit import least_work
from baselines.process import RunFailedError, Worker, WorkerDiedError
from baselines.registry import ENGINES, worker_environment
from jaxserve.api.metrics import PeakRates
from jaxserve.models import registry
from jaxserve.tools.bench.workloads import Workload, WorkloadRequest, load_workload
from tests.checkpoints import hf_dict

ROOT = Path(__file__).parents[2]
FOUR = Workload("four", 0, tuple(WorkloadRequest(5, n) for n in (3, 4, 5, 6)))
SHORT = Workload("short", 0, (WorkloadRequest(5, 2), WorkloadRequest(5, 2)))  # fake_baseline.py's DEATH_LEN
Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a maker of fake workers, which are ended after the test."""
    workers = []

    def start(name: str, mood: str = "well", timeout_s: float = 60) -> Worker:
        command = [sys.executable, str(ROOT / "tests/scripts/fake_baseline.py"), name, str(tmp_path / "journal"), mood]
        workers.append(Worker(command, worker_environment(), tmp_path / f"{name}.log", timeout_s))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def contest(workers: dict[str, Worker]) -> rounds.Contest:
    result = rounds.Contest(workers, vocab_size=100, say=lambda _: None)
    result.load()
    return result


def turns(tmp_path: Path) -> list[tuple[str, str]]:
    """Return which worker was asked for which prompts."""
    return [tuple(line.split(" ", 1)) for line in (tmp_path / "journal").read_text().splitlines()]


class Scripted:
    """A worker that answers with given wall times, one after the other."""

    def __init__(self, *walls_s: float, token_id: int = 7) -> None:
        self.ready = {"num_warm_up": None}
        self._walls_s, self._token_id = iter(walls_s), token_id

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        ids = [[self._token_id] * n for n in message["output_lens"]]
        return {"token_ids": ids, "wall_s": next(self._walls_s), "cores_used": 1.5, "noise_share": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such"], "must be a Hugging Face directory, and there is no "),
        (["no/such", "--workloads", "mixed"], "workload must be one of ["),
    ],
)
def test_failed_measurements_are_reported_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_baselines.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench_baselines.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        bench_baselines.main()
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert shown.startswith("bench_baselines.py: error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_engines_take_turns_on_the_same_prompts(start: Start, tmp_path: Path) -> None:
    race = contest({name: start(name) for name in ("jaxserve", "a", "b")})
    race.run(FOUR, num_rounds=3)
    asked = turns(tmp_path)
    assert [name for name, _ in asked] == ["jaxserve", "a", "b"] * 4  # the warm-up, then three rounds
    rounds_of_prompts = [{prompts for _, prompts in asked[i : i + 3]} for i in range(0, 12, 3)]
    assert [len(prompts) for prompts in rounds_of_prompts] == [1] * 4
    assert len(set.union(*rounds_of_prompts)) == 4  # prompts never repeat
    assert [(run["engine"], run["round"]) for run in race.runs][:4] == [
        ("jaxserve", 0),
        ("a", 0),
        ("b", 0),
        ("jaxserve", 1),
    ]


def test_only_prompts_of_one_draw_share_a_prefix() -> None:
    workload = load_workload("shared-prefix-64")
    one, other = (rounds.draw_prompts(workload, 8192, draw) for draw in ("round 0", "round 1"))
    assert len({tuple(prompt[:512]) for prompt in one}) == 1
    assert len({tuple(prompt[512:]) for prompt in one}) == len(one)
    assert one[0][:16] != other[0][:16]
    assert [len(prompt) for prompt in one] == [r.prompt_len for r in workload.requests]


def test_medians_and_ratios() -> None:
    walls = {"jaxserve": (1.0, 2.0, 1.0, 4.0), "a": (9.0, 3.0, 6.0, 12.0)}  # the first one warms up
    race = rounds.Contest({name: Scripted(*w) for name, w in walls.items()}, 100, lambda _: None)
    race.run(FOUR, num_rounds=3)
    ours, baseline = rounds.summarise(race.runs)
    tokens = 3 + 4 + 5 + 6
    assert (ours["min"], ours["median"], ours["max"]) == (tokens / 4, tokens / 2, tokens)
    assert baseline["median"] == statistics.median([tokens / 3, tokens / 6, tokens / 12])
    assert (ours["ratio"], baseline["ratio"]) == (1.0, 3.0)
    assert baseline["unit"] == "output tok/s"
    assert baseline["num_runs"] == 3


def test_the_limit_counts_shared_prefixes_once_and_weights_once_per_step() -> None:
    arch = registry.from_hf_config(hf_dict("llama"))
    flops, requests = registry.flop_counts(arch), (WorkloadRequest(7, 3), WorkloadRequest(5, 2))
    alone = [least_work(Workload("one", 0, (each,)), arch) for each in requests]
    both = least_work(Workload("both", 0, requests), arch)
    assert both.flops == sum(work.flops for work in alone)
    scores = arch.num_layers * sum(range(1, 10))  # positions 0 to 8
    assert alone[0].flops == flops.step(9, 3, scores)
    sharing = [WorkloadRequest(7, 3, prefix_id=0, prefix_len=4), WorkloadRequest(5, 2, prefix_id=0, prefix_len=4)]
    shared = least_work(Workload("shared", 0, tuple(sharing)), arch)
    assert both.flops - shared.flops == flops.step(4, 0, arch.num_layers * sum(range(1, 5)))
    assert shared.num_bytes == both.num_bytes
    kv = 4 * arch.num_layers * arch.attention.kv.token_size
    assert both.num_bytes - alone[0].num_bytes == kv * 6, "the second request decodes one token, in a step of the first"
    assert both.seconds(PeakRates(float(both.flops), both.num_bytes / 2)) == 3
    in_16_bits = least_work(Workload("both", 0, requests), arch, float_bytes=2)
    assert (in_16_bits.flops, 2 * in_16_bits.num_bytes) == (both.flops, both.num_bytes)


def test_ids_are_compared_with_transformers_wherever_its_turn_is() -> None:
    token_ids = {"jaxserve": 7, "odd": 8, "transformers": 7}
    workers = {name: Scripted(*[1.0] * 3, token_id=token_id) for name, token_id in token_ids.items()}
    race = rounds.Contest(workers, 100, lambda _: None)
    race.run(FOUR, num_rounds=2)
    shares = {row["engine"]: (row["equal_requests_share"], row["cores_used"]) for row in rounds.summarise(race.runs)}
    assert shares == {"jaxserve": (1.0, 1.5), "odd": (0.0, 1.5), "transformers": (1.0, 1.5)}


def test_existing_preload_libraries_are_preloaded(tmp_path: Path) -> None:
    spec, python = ENGINES["vllm"], str(tmp_path / "bin/python")
    assert "libiomp5" not in worker_environment(spec, python).get("LD_PRELOAD", "")
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib/libiomp5.so"
    library.touch()
    assert worker_environment(spec, python)["LD_PRELOAD"] == str(library)


def test_one_stream_is_measured_after_its_first_token() -> None:
    worker = Scripted(1.0, 2.5, 0.5)  # warm-up, all tokens, one token
    race = rounds.Contest({"a": worker}, 100, lambda _: None)
    race.run(Workload("one", 0, (WorkloadRequest(8, 21),)), num_rounds=1)
    (row,) = rounds.summarise(race.runs)
    assert (row["median"], row["unit"], row["ttft_s"]) == (10.0, "decode tok/s", 0.5)
    assert row["ratio"] is None  # no ratio without jaxserve's time


def test_a_rate_that_time_denies_is_no_figure() -> None:
    with pytest.raises(RunFailedError, match="must take longer"):
        rounds.decode_rate(128, 0.5, 0.5)


@pytest.mark.parametrize(
    ("mood", "reason", "lives"),
    [
        ("dies", "ended with status 3", False),
        ("fails", "too short for me", True),
        ("cuts", "must have the length", True),
    ],
)
def test_a_bad_engine_is_reported_and_the_others_continue(start: Start, mood: str, reason: str, lives: bool) -> None:
    race = contest({"jaxserve": start("jaxserve"), "bad": start("bad", mood), "good": start("good")})
    for workload in (SHORT, FOUR):
        race.run(workload, num_rounds=2)
    assert all(reason in failure["reason"] for failure in race.failures)
    assert {failure["engine"] for failure in race.failures} == {"bad"}
    assert ("bad" in race.workers) == lives
    measured = [(run["workload"], run["engine"]) for run in race.runs]
    for workload in ("short", "four"):
        assert measured.count((workload, "jaxserve")) == measured.count((workload, "good")) == 2
    assert measured.count(("four", "bad")) == (2 if mood == "fails" else 0)


def test_an_engine_that_does_not_load_is_left_out(start: Start) -> None:
    race = contest({"bad": start("bad", "dies at load"), "good": start("good")})
    assert list(race.workers) == ["good"]
    (failure,) = race.failures
    assert failure["engine"] == "bad"
    assert "no memory" in failure["reason"]


def test_waiting_workers_are_stopped_and_end_with_the_driver(tmp_path: Path) -> None:
    """Workers end even if the driver is killed and cannot clean up."""
    driver = f"""
import os, sys, time
from pathlib import Path
from baselines.process import Worker
command = [sys.executable, {str(ROOT / "tests/scripts/fake_baseline.py")!r}, "a", "journal", "well"]
worker = Worker(command, os.environ, Path("log"), 60)
worker.load()
print(worker._process.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver], env=worker_environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # Only a process whose threads have all stopped ends with the driver; the first one may stop before others.
        threads = Path(f"/proc/{pid}/task")
        wait_for(lambda: {process_state(int(each.name)) for each in threads.iterdir()} == {"T"})
        process.kill()
    wait_for(lambda: process_state(pid) in (None, "Z"))


def test_a_worker_that_does_not_answer_is_ended(start: Start) -> None:
    worker = start("slow", timeout_s=0.001)
    with pytest.raises(WorkerDiedError, match="no answer within"):
        worker.load()


def process_state(pid: int) -> str | None:
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else None


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_other_processes_time_counts_as_noise() -> None:
    before, after = CpuTimes(1000, 400, 300), CpuTimes(1200, 550, 400)
    assert after.noise_share(since=before) == 0.25
    assert after.cores_used(since=before) == 0.5 * (os.cpu_count() or 1)
    start, group = CpuTimes.now(os.getpgid(0)), os.getpgid(0)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    now = CpuTimes.now(group)
    assert start is not None
    assert now is not None
    assert now.ours - start.ours >= 0.2 * os.sysconf("SC_CLK_TCK")
    assert now.busy - start.busy >= 0.2 * os.sysconf("SC_CLK_TCK")


def test_agreement_counts_up_to_the_first_difference() -> None:
    shares = rounds.agreement([[1, 2, 3, 4], [1, 9, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert shares == {"equal_requests_share": 0.5, "equal_tokens_share": 5 / 8}


def test_fixed_batches_keep_order_and_lengths() -> None:
    prompts, lens = [[i] for i in range(7)], [5, 1, 4, 1, 3, 9, 2]
    sizes = []

    def echo(batch: list[list[int]], num_tokens: int) -> list[list[int]]:
        sizes.append((len(batch), num_tokens))
        return [prompt * num_tokens for prompt in batch]

    assert generate_in_batches(echo, prompts, lens, 3) == [[i] * n for i, n in enumerate(lens)]
    assert sizes == [(3, 2), (3, 5), (1, 9)]
