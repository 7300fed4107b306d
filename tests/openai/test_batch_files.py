"""Bounds of a batch, and restarts after its end."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import fake_engine
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killing import records_by_id, run_with_kills

from jaxserve import cli
from jaxserve.errors import ConfigError
from jaxserve.openai import batch_output
from jaxserve.openai.batch_files import find_finished, run_batch
from jaxserve.text.tokenizer import Tokenizer
from tests.openai.batches import completion, mixed_requests, run, write_lines
from tests.parameters import mainly
from tests.random_runs import examples

# Bounds


@pytest.mark.parametrize("bound", [1, 5, None])
def test_requests_in_flight_stay_within_the_bound(engine: FakeEngine, tmp_path: Path, bound: int | None) -> None:
    requests = [completion(str(i), ["a", "b", "c"] if i % 5 == 0 else "a") for i in range(100)]
    run(engine, tmp_path, requests, max_in_flight=bound)
    assert engine.max_unfinished == (bound or 3 * engine.max_num_seqs)


def test_a_request_wider_than_the_bound_goes_alone(engine: FakeEngine, tmp_path: Path) -> None:
    records = run(engine, tmp_path, [completion("a"), completion("b", n=9), completion("c")], max_in_flight=4)
    assert engine.max_unfinished == 9
    assert all(r["error"] is None for r in records.values())


def test_input_is_read_no_further_than_the_window(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The first step comes once the window is full, whatever the length of the file."""
    engine = FakeEngine(tokenizer, max_num_seqs=3)
    write_lines(tmp_path / "in.jsonl", [completion(str(i)) for i in range(50)])
    added = []

    def stopping() -> list:
        added.append(engine.num_added)
        raise KeyboardInterrupt

    engine.step = stopping
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert added == [9]
    assert not engine.has_unfinished()


# Restarts


@pytest.mark.parametrize("num_kills", mainly([4], 10))
def test_kills_lose_and_repeat_nothing(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_requests(300))
    command = [sys.executable, fake_engine.__file__, "batch", "--model", str(tokenizer_dir), str(tmp_path / "in.jsonl")]
    whole_path, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    subprocess.run([*command, str(whole_path)], check=True, stderr=subprocess.DEVNULL)
    monkeypatch.setenv(fake_engine.STEP_S, "0.0005")
    kills = run_with_kills([*command, str(out)], out, num_kills, seed=1, most_bytes=whole_path.stat().st_size // 8)
    assert kills == num_kills
    whole = records_by_id(whole_path)
    assert len(whole) == 300
    assert records_by_id(out) == whole


@pytest.fixture(scope="module")
def finished(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("finished")
    run(FakeEngine(tokenizer), folder, mixed_requests(12))
    return folder, (folder / "out.jsonl").read_bytes()


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_torn_output_resumes(tokenizer: Tokenizer, finished: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, whole = finished
    out = folder / "torn.jsonl"
    cut = data.draw(st.integers(0, len(whole)))
    out.write_bytes(whole[:cut])
    engine = FakeEngine(tokenizer)
    summary = run_batch(engine, folder / "in.jsonl", out, use_tqdm=False)
    assert summary.num_resumed == whole[:cut].count(b"\n")
    assert summary.num_records == 12
    assert records_by_id(out) == records_by_id(folder / "out.jsonl")
    assert summary.num_errors == sum(b'"status_code": 200' not in line for line in whole.splitlines())
    again = run_batch(engine, folder / "in.jsonl", out, use_tqdm=False)
    assert (again.num_resumed, again.completion_tokens) == (12, 0)


def test_an_interrupt_leaves_a_resumable_file(engine: FakeEngine, finished: tuple[Path, bytes], tmp_path: Path) -> None:
    folder, _ = finished
    step, steps = engine.step, iter(range(7))

    def interrupted() -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, folder / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert not engine.has_unfinished()
    engine.step = step
    summary = run_batch(engine, folder / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert 0 < summary.num_resumed < 12
    assert records_by_id(tmp_path / "out.jsonl") == records_by_id(folder / "out.jsonl")


def test_a_finished_batch_is_known_without_an_engine(engine: FakeEngine, tmp_path: Path) -> None:
    paths = (write_lines(tmp_path / "in.jsonl", [completion("a"), completion("b", bad=1)]), tmp_path / "out.jsonl")
    assert find_finished(*paths, seed=0) is None
    assert not paths[1].exists()
    run_batch(engine, *paths, use_tqdm=False)
    summary = find_finished(*paths, seed=0)
    assert (summary.num_records, summary.num_errors, summary.num_resumed, summary.completion_tokens) == (2, 1, 2, 0)
    with pytest.raises(ConfigError, match="another seed"):
        find_finished(*paths, seed=1)
    with paths[0].open("a") as file:
        file.write(json.dumps(completion("c")))
    assert find_finished(*paths, seed=0) is None


def test_lines_may_be_added_to_the_input(engine: FakeEngine, tmp_path: Path) -> None:
    first = run(engine, tmp_path, [completion("a"), completion("b")])
    assert run(engine, tmp_path, [completion("a"), completion("b"), completion("c")]).items() > first.items()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda requests, out: requests[1]["body"].update(prompt="x"), "line 2 is of another request"),
        (lambda requests, out: requests.reverse(), "of another request"),
        (lambda requests, out: requests.pop(), "lines that the input does not have"),
        (lambda requests, out: requests.insert(0, completion("new")), "of another request"),
        (lambda requests, out: out.write_text("my notes\n"), "its line 1 is no record"),
        (lambda requests, out: out.write_text("my notes"), "its last line is no record"),
        (lambda requests, out: out.write_bytes(out.read_bytes() * 2), "two records of line"),
        (lambda requests, out: out.write_bytes(out.read_bytes() + b"\0\0\n"), "its line 4 is no record"),
        (
            lambda requests, out: out.write_bytes(out.read_bytes().replace(b"_req_3", b"_req_99999999999")),
            "lines that the input does not have",
        ),
    ],
)
def test_the_output_of_something_else_is_refused_and_kept(
    engine: FakeEngine, tmp_path: Path, change: object, reason: str
) -> None:
    requests = [completion("a"), completion("b"), completion("c")]
    run(engine, tmp_path, requests)
    out = tmp_path / "out.jsonl"
    change(requests, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=f"{reason}.*choose another output file"):
        run(engine, tmp_path, requests)
    assert out.read_bytes() == before


def test_another_run_seed_is_another_batch(engine: FakeEngine, tmp_path: Path) -> None:
    run(engine, tmp_path, [completion("a")], seed=1)
    with pytest.raises(ConfigError, match="another seed"):
        run(engine, tmp_path, [completion("a")], seed=2)


def test_two_processes_cannot_write_one_output(engine: FakeEngine, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    entered, leave = threading.Event(), threading.Event()
    step = engine.step

    def waiting() -> list:
        entered.set()
        leave.wait(10)
        return step()

    engine.step = waiting
    paths = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    thread = threading.Thread(target=run_batch, args=(engine, *paths), kwargs={"use_tqdm": False})
    thread.start()
    assert entered.wait(10)
    with pytest.raises(ConfigError, match="another process is writing"):
        run_batch(FakeEngine(engine.tokenizer), *paths, use_tqdm=False)
    leave.set()
    thread.join(10)
    assert len(records_by_id(paths[1])) == 1


UNUSABLE = {  # input and output, and what is said of them
    "missing input": ("none.jsonl", "out.jsonl", r"input must be .* got .*none.jsonl: No such file .*; check the path"),
    "a directory as input": ("dir", "out.jsonl", r"input must be a regular file .*/dir, a directory; name a file in"),
    "a device as input": (os.devnull, "out.jsonl", r"input must be a regular file .* write its lines to a file"),
    "a pipe as input": ("pipe", "out.jsonl", r"input must be a regular file .* write its lines to a file"),
    "a long input": ("i" * 300, "out.jsonl", r"input must be .*: File name too long; check the path"),
    "a file above the input": ("in.jsonl/a", "out.jsonl", r"input must be .*: Not a directory; check the path"),
    "missing folder": ("in.jsonl", "no/deep/out.jsonl", r"output must be .* no directory \S*/no/deep; create it, or"),
    "a file above the output": ("in.jsonl", "in.jsonl/deep/out", r"output must be .*/in.jsonl is no directory; choose"),
    "a directory as output": ("in.jsonl", "dir", r"output must be .* name a file in it, such as \S*/dir/results.jsonl"),
    "a device as output": ("in.jsonl", os.devnull, r"output must be a regular file .* choose another output"),
    "a long output": ("in.jsonl", "o" * 300, r"output must be .*: File name too long; choose another output"),
    "a link into a missing folder": ("in.jsonl", "link", r"output must be .* no directory \S*/absent; create it, or"),
    "the input as output": ("in.jsonl", "dir/../in.jsonl", r"must be another file than the input, .*; choose another"),
    "a folder of the system": ("in.jsonl", "/proc/out.jsonl", r"output must be .* in /proc; choose another output"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_files_are_told_before_the_model_loads(
    case: str,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command and `run_batch` say the same, and no file is created or changed."""
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "out.jsonl")
    os.mkfifo(tmp_path / "pipe")
    before, content = sorted(tmp_path.rglob("*")), source.read_bytes()
    in_path, out_path, said = UNUSABLE[case]
    with pytest.raises(ConfigError, match=said):
        run_batch(engine, tmp_path / in_path, tmp_path / out_path)
    monkeypatch.setattr("jaxserve.cli.batch.load_llm", lambda _: pytest.fail("the model is loaded"))
    assert cli.main(["batch", str(tmp_path / in_path), str(tmp_path / out_path)]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before
    assert source.read_bytes() == content


def test_files_without_permission_say_so(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    source, out = write_lines(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    out.touch()
    with monkeypatch.context() as patch:
        patch.setattr(batch_output.os, "open", refuse)
        with pytest.raises(ConfigError, match=r"output must be .*: Permission denied; change its permissions"):
            run_batch(engine, source, out)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"input must be .*: Permission denied; change its permissions"):
        run_batch(engine, source, out)


def test_everything_is_synced_at_the_end(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(batch_output.os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    run(engine, tmp_path, [completion(str(i)) for i in range(20)])
    assert sizes[-1] == (tmp_path / "out.jsonl").stat().st_size
    assert len(sizes) < 5
