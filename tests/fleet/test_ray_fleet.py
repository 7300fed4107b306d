"""Fleets on a local Ray, whose actors run engines without a model (`mortal_engine.py`)."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import psutil
import pytest
import tiny_tokenizers
from fake_engine import FakeEngine
from killing import records_by_id

from jaxserve import cli
from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.fleet.fleet import MAX_ISOLATED_DEATHS
from jaxserve.fleet.ray_fleet import plan_actors, ray_fleet
from jaxserve.openai.batch_files import run_batch
from jaxserve.system import environment as variables
from jaxserve.text.loading import load_tokenizer

# Ray forks to start its processes, which execute others at once; jax, started by other tests here, warns of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

HOOK = {"worker_process_setup_hook": "mortal_engine.setup"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_tokenizers.write(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level()))


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """Let actors find the tests, and undo Ray's settings afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))
        before = dict(os.environ)
        yield
        for name in os.environ.keys() - before.keys():
            patch.delenv(name)


@pytest.fixture(scope="module")
def cluster(environment: None) -> Iterator[None]:
    """Connect this process to a Ray of four CPUs, whatever the machine has."""
    assert variables.ray_address() == "local"
    import ray

    ray.init(
        "local", num_cpus=4, include_dashboard=False, object_store_memory=2**27, log_to_driver=False, runtime_env=HOOK
    )
    yield
    deadline = time.monotonic() + 20
    while actor_processes():  # Ray does not wait for processes that it kills
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ray.shutdown()


def actor_processes(of: int | None = None) -> list[psutil.Process]:
    """Return the actors that this process, or another one, has started."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if process.name().startswith("ray::_EngineAct"):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def write_batch(path: Path, count: int, **prompts: str) -> Path:
    """Write lines of one and two samples; `prompts` has those of some lines, by custom_id."""
    with path.open("w") as file:
        for i in range(count):
            body = {"prompt": prompts.get(f"line{i}", f"a {i}"), "max_tokens": 5 + i % 20, "n": 1 + i % 2}
            line = {"custom_id": f"line{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def expected(model: str, source: Path, **options: Any) -> dict[str, Any]:
    """Return the records of one engine."""
    out = source.with_suffix(".one")
    run_batch(FakeEngine(load_tokenizer(model), EngineConfig(model=model, **options)), source, out, use_tqdm=False)
    return records_by_id(out)


@pytest.mark.long
def test_requests_survive_killed_engines(
    cluster: None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_batch(tmp_path / "in.jsonl", 150), tmp_path / "out.jsonl"
    monkeypatch.chdir(model)  # not the directory of the actors
    rng = random.Random(0)
    with ray_fleet(2, model=os.curdir) as fleet:
        wait, sizes = fleet.wait, iter([10, 40, 80])
        target = next(sizes)

        def killing() -> list:
            nonlocal target
            if out.stat().st_size and out.read_bytes().count(b"\n") >= target:
                rng.choice(actor_processes()).kill()
                target = next(sizes, 1000)
            return wait()

        fleet.wait = killing
        run_batch(fleet, source, out, use_tqdm=False)
    assert target == 1000
    assert records_by_id(out) == expected(os.curdir, source)


@pytest.mark.full
def test_a_request_that_kills_engines_fails_and_the_others_are_served(
    cluster: None, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"line20": "please die", "line41": "please raise", "line55": "refuse it"}
    source, out = write_batch(tmp_path / "in.jsonl", 60, **prompts), tmp_path / "out.jsonl"
    with ray_fleet(2, model=model, max_num_seqs=2) as fleet:
        summary = run_batch(fleet, source, out, use_tqdm=False)
    assert (summary.num_records, summary.num_errors) == (60, 3)
    found, wanted = records_by_id(out), expected(model, source, max_num_seqs=2)
    errors = {number: found[f"batch_req_{number}"]["error"] for number in (21, 42, 56)}
    assert [errors[number]["code"] for number in (21, 42)] == ["engine_died"] * 2
    alone = f"{MAX_ISOLATED_DEATHS} engines died while they served only this request; the last: "
    assert errors[21]["message"].startswith(alone + "The actor is dead because its worker process has died")
    assert errors[42]["message"] == alone + "RuntimeError('a step went wrong')"
    assert found["batch_req_56"] == wanted["batch_req_56"]  # a refusal, as without Ray
    for number in set(range(1, 61)) - {21, 42}:
        assert found[f"batch_req_{number}"] == wanted[f"batch_req_{number}"]
    assert "the fleet died: RuntimeError('a step went wrong')" in caplog.text


@pytest.mark.long
def test_configuration_errors_of_actors_are_one_line(
    cluster: None, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_batch(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    arguments = ["batch", str(source), str(out), "--model", model, "--ray"]
    for flags, message in (
        (["--max-num-seqs", "13"], "max_num_seqs must not be 13, got 13; lower it"),
        (["--ray-actors", "5"], "--ray-actors must fit on the cluster, each with tensor_parallel_size CPUs"),
        (["--ray-actors", "0"], "the number of actors must be positive, got 0"),
        (["--stats"], "--stats shows the steps of one engine, and --ray runs several; leave out one of them"),
        (["--page-size", "0"], "page_size must be a positive integer"),
    ):
        assert cli.main([*arguments, *flags]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"jaxserve: error: {message}")
        assert shown.count("\n") == 1
    assert not out.exists()


@pytest.mark.full
def test_ray_address_names_the_cluster(cluster: None, model: str, tmp_path: Path) -> None:
    import ray

    source, out = write_batch(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    command = [sys.executable, fake_engine.__file__, "batch", str(source), str(out), "--model", model]
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": HOOK})}
    program = [*command, "--ray", "--ray-actors", "4"]  # more than a Ray of its own may have CPUs for
    subprocess.run(program, check=True, capture_output=True, env=os.environ | address | job)
    assert records_by_id(out) == expected(model, source)
    assert ray.cluster_resources()["CPU"] == 4


def test_a_missing_ray_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(variables.os, "environ", {})
    source = str(write_batch(tmp_path / "in.jsonl", 1))
    assert cli.main(["batch", source, "out", "--ray"]) == 2
    assert "needs Ray; install the extra ray: pip install 'jaxserve[ray]'" in capsys.readouterr().err
    assert cli.main(["batch", "in", "out", "--ray-actors", "2"]) == 2
    assert "--ray-actors needs --ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "num_devices", "wanted", "count", "asked"),
    [
        ([{"CPU": 8.0}, {"CPU": 8.0}], 1, None, 1, {"num_cpus": 1}),
        ([{"CPU": 8.0}, {"CPU": 8.0}], 4, 4, 4, {"num_cpus": 4}),
        (
            [{"CPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 4.0}],
            1,
            None,
            12,
            {"num_gpus": 1, "num_cpus": 0},
        ),
        ([{"GPU": 8.0}, {"GPU": 4.0}], 4, None, 3, {"num_gpus": 4, "num_cpus": 0}),
        ([{"GPU": 8.0}, {"GPU": 4.0}], 8, None, 1, {"num_gpus": 8, "num_cpus": 0}),
        ([{"GPU": 8.0}, {"GPU": 4.0}], 2, 5, 5, {"num_gpus": 2, "num_cpus": 0}),
        ([{"CPU": 100.0, "TPU": 4.0}] * 3, 4, None, 3, {"resources": {"TPU": 4}, "num_cpus": 0}),
    ],
)
def test_an_actor_asks_for_the_devices_of_its_engine(
    nodes: list, num_devices: int, wanted: int | None, count: int, asked: dict
) -> None:
    assert plan_actors(nodes, num_devices, wanted) == (count, asked)


@pytest.mark.parametrize(
    ("nodes", "num_devices", "wanted", "message"),
    [
        (
            [{"GPU": 4.0}, {"GPU": 4.0}],
            8,
            None,
            "tensor_parallel_size GPUs on one machine, got 0 with 8 each",
        ),
        ([{"GPU": 4.0}, {"GPU": 4.0}], 4, 3, "got 3 with 4 each, and 2 fit; lower one of them or add machines"),
        ([{"CPU": 2.0}], 4, None, "got 1 with 4 each, and 0 fit"),
        ([], 1, None, "and 0 fit"),
    ],
)
def test_a_fleet_that_does_not_fit_is_refused(nodes: list, num_devices: int, wanted: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_actors(nodes, num_devices, wanted)


def wait_for_output(program: "subprocess.Popen[str]", out: Path) -> list[psutil.Process]:
    """Return the processes below the program once it has written something; they listen only on loopback."""
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size):
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(program.pid).children(recursive=True)
    assert actor_processes(program.pid)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1"}
    return children


@pytest.mark.full
def test_an_interrupt_leaves_whole_files_and_no_processes(environment: None, model: str, tmp_path: Path) -> None:
    """The program starts a Ray of its own: on loopback, gone with the program, resumed by the next run."""
    source, out = write_batch(tmp_path / "in.jsonl", 120), tmp_path / "out.jsonl"
    command = [sys.executable, fake_engine.__file__, "batch", str(source), str(out), "--model", model, "--ray"]
    job = os.environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": HOOK})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=job, text=True, start_new_session=True) as program:
        try:
            children = wait_for_output(program, out)
            os.killpg(program.pid, signal.SIGINT)  # a terminal sends it to the group
            _, shown = program.communicate(timeout=60)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 130
    assert shown == "\njaxserve: interrupted; run the same command again to resume\n"
    deadline = time.monotonic() + 20
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = len(records_by_id(out))
    assert 0 < before < 120
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=job)
    assert f"120 records ({before} from before); no line failed" in done.stderr
    assert records_by_id(out) == expected(model, source)
