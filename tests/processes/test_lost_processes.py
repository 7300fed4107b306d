"""A process that is killed or stops ends the others soon, with its name, and the batch can be resumed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.distributed.peers import EXIT_CODE
from tests.processes.spawning import join, start, wait_for

NUM_REQUESTS = 8
SILENCE_S, GRACE_S = 8.0, 2.0  # less than in use, so that tests take less time
SLACK_S = 20.0  # allowance for a busy machine
PROGRAM = [str(Path(__file__).with_name("short_waits.py")), str(SILENCE_S), str(GRACE_S)]

Batch = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Start a batch of the embedded model over some processes."""
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 24, "temperature": 0}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body | {"seed": n}}
        for n in range(NUM_REQUESTS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def start_batch(count: int) -> list["subprocess.Popen[str]"]:
        engine = ["--tensor-parallel-size", str(count), "--compile-ahead", "minimal"]
        engine += ["--max-num-seqs", "1", "--max-num-batched-tokens", "1", "--multi-step", "1"]  # one program
        run = ["--coordinator-address", "{address}", "--num-processes", "{count}"]
        command = [*PROGRAM, "batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *engine, *run]
        return start([[*command, "--process-id", str(index)] for index in range(count)], devices=1)

    return start_batch


def wait_for_records(path: Path, processes: list["subprocess.Popen[str]"], num_records: int) -> None:
    """Wait until so many records are written."""
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= num_records, processes)


@pytest.mark.parametrize(("end", "victim"), [(signal.SIGKILL, 0), (signal.SIGKILL, 3), (signal.SIGSTOP, 2)])
def test_a_lost_process_ends_all_others(end: signal.Signals, victim: int) -> None:
    """Four processes without engines, connected as those of a run."""
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), "4"]
    options: dict[str, Any] = {"stdout": -1, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with contextlib.ExitStack() as ends:

        def launch(index: int, port: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen([*command, str(index), port], **options)
            ends.callback(process.communicate)
            ends.callback(process.kill)
            return process

        leader = launch(0, "0")
        assert leader.stdout is not None
        port = leader.stdout.readline().strip()
        processes = [leader, *(launch(index, port) for index in (1, 2, 3))]
        assert leader.stdout.readline() == "all have connected\n"
        processes.pop(victim).send_signal(end)
        for code, output in join(processes, timeout_s=SLACK_S):
            assert code == EXIT_CODE, output
            assert f"lost process {victim} " in output
            assert end == signal.SIGKILL or "it was silent for 3 s" in output


@pytest.mark.full
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (4, 0), (4, 3)])
def test_a_killed_process_ends_the_others_and_the_batch_goes_on(
    tmp_path: Path, batch: Batch, count: int, victim: int
) -> None:
    """By default test_lockstep.py loses a process, and tests/openai/test_batch_files.py resumes a batch."""
    out = tmp_path / "out.jsonl"
    processes = batch(count)
    wait_for_records(out, processes, 2)
    processes[victim].kill()
    killed = time.monotonic()
    ended = join(processes)
    assert time.monotonic() - killed < GRACE_S + SLACK_S
    for index, (code, output) in enumerate(ended):
        if index != victim:
            assert code == EXIT_CODE, output
            assert f"lost process {victim} " in output, output
    if (count, victim) != (4, 3):  # the batch is resumed once
        return
    done = out.read_bytes().count(b"\n")
    assert 2 <= done < NUM_REQUESTS
    for code, output in join(batch(2)):
        assert code == 0, output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(int(record["custom_id"]) for record in records) == list(range(NUM_REQUESTS))
    assert all(record["response"]["status_code"] == 200 for record in records)


@pytest.mark.full
def test_a_process_that_stops_is_lost_after_a_while(tmp_path: Path, batch: Batch) -> None:
    processes = batch(2)
    wait_for_records(tmp_path / "out.jsonl", processes, 1)
    processes[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    leader_code, leader = join(processes[:1])[0]
    assert time.monotonic() - stopped < SILENCE_S + GRACE_S + SLACK_S
    assert leader_code == EXIT_CODE
    assert f"it was silent for {SILENCE_S:.0f} s" in leader
    processes[1].kill()
    processes[1].communicate()


@pytest.mark.long
def test_a_process_that_cannot_start_is_named() -> None:
    command = [*PROGRAM, "generate", "x", "--coordinator-address", "{address}", "--num-processes", "{count}"]
    engine = ["--tensor-parallel-size", "2", "--compile-ahead", "minimal"]
    other = ["--max-model-len", str(10**9)]
    commands = [[*command, "--process-id", "0", *engine], [*command, "--process-id", "1", *engine, *other]]
    (leader_code, leader), (code, follower) = join(start(commands, devices=1))
    assert code == leader_code == EXIT_CODE
    assert "max_model_len must be at most" in follower
    assert "lost process 1 " in leader


@pytest.mark.full  # test_lockstep.py has the refusal by default, of the Python interface
def test_errors_common_to_all_processes_are_reported_by_all() -> None:
    command = [*PROGRAM, "generate", "x", "--coordinator-address", "{address}", "--num-processes", "{count}"]
    engine = ["--tensor-parallel-size", "1"]
    for code, output in join(start([[*command, "--process-id", str(index), *engine] for index in range(2)], devices=2)):
        assert code == 2, output
        assert "tensor_parallel_size must be a multiple of the number of processes, got 1 and 2" in output
