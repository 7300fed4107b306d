"""`jaxserve batch` as a program over the real engine: kills do not change its result."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import killing
import psutil
import pytest

from tests.e2e.sizes import SIZES

NUM_LINES = 120


def requests() -> list[dict[str, Any]]:
    """Return greedy and sampled lines, with and without seeds, several samples, logprobs, penalties, and wrong ones."""
    lines = []
    for i in range(NUM_LINES):
        body: dict[str, Any] = {"prompt": f"Once upon {i}", "max_tokens": 4 + i % 20, "temperature": (i % 3) * 0.7}
        body |= {"seed": i} if i % 2 else {}
        body |= {"n": 2} if i % 7 == 0 else {}
        body |= {"presence_penalty": 0.5, "logprobs": 2} if i % 5 == 0 else {}
        body |= {"no_such_parameter": 1} if i % 11 == 10 else {}
        lines.append({"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions", "body": body})
    return lines


def records(path: Path) -> dict[str, Any]:
    """Return what must not depend on the run: log probabilities and cache hits vary with a request's batch."""
    found = killing.records_by_id(path)
    for record in found.values():
        body = record["response"]["body"]
        for choice in body.get("choices", ()):
            choice.pop("logprobs")
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return found


@pytest.fixture(scope="module")
def command(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command without its output path."""
    folder = tmp_path_factory.mktemp("batch")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests()))
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "compile_ahead")
    flags = [f"--{name.replace('_', '-')}={SIZES[name]}" for name in names]
    cache = f"--compilation-cache-dir={folder / 'xla'}"
    return [sys.executable, "-m", "jaxserve", "batch", f"--model={llama}", *flags, cache, str(source)]


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    first = subprocess.run([*command, str(out)], check=False, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert len(records(out)) == NUM_LINES
    return out


@pytest.mark.full  # tests/openai/test_batch_files.py and tests/processes/test_lost_processes.py run it by default
@pytest.mark.parametrize("count", [2, 10])
def test_kills_lose_and_repeat_nothing(command: list[str], whole: Path, tmp_path: Path, count: int) -> None:
    killed = tmp_path / "killed.jsonl"
    most_bytes = whole.stat().st_size // (count + 1)  # the last kill comes before the end
    assert killing.run_with_kills([*command, str(killed)], killed, count, 3, most_bytes=most_bytes) == count
    assert records(killed) == records(whole)


@pytest.mark.full  # tests/fleet/test_ray_fleet.py runs it by default
def test_on_ray_an_engine_that_is_killed_loses_nothing(command: list[str], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [*command, str(out), "--ray", "--ray-actors=2"]
    program = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not out.exists() or out.read_bytes().count(b"\n") < NUM_LINES // 8:
        assert program.poll() is None, program.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = psutil.Process(program.pid).children(recursive=True)
    next(process for process in children if process.name().startswith("ray::_EngineAct")).kill()
    _, shown = program.communicate(timeout=120)
    assert program.returncode == 0, shown
    assert "of the fleet died: The actor is dead because its worker process has died" in shown
    assert records(out) == records(whole)
