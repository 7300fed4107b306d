"""The process of a core, and the link to it: how both end with the caller, and what the messages carry."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.assembly import core_process
from jaxserve.assembly.core_process import CoreProcess
from jaxserve.core import link
from jaxserve.core.deltas import Delta
from jaxserve.core.process_messages import (
    FromCore,
    Logged,
    Start,
    pack_delta,
    portable_error,
    stats_values,
    unpack_delta,
)
from jaxserve.errors import EngineDiedError, RequestError
from jaxserve.openai.replies import system_fingerprint
from tests.waiting import until

PATIENCE_S = 60
PROGRAM = """
import atexit, os, signal, sys, threading, time
from jaxserve.errors import EngineDiedError
from jaxserve.offline.llm import LLM
from jaxserve.api.sampling_params import SamplingParams
from jax._src import config, xla_bridge

config.bool_flag("jax_only_here", True, "as some modules of jax add")
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(sys.argv[1], engine_process=True, compile_ahead="minimal", max_model_len=512, max_num_seqs=4)
long = SamplingParams(max_tokens=500, ignore_eos=True)
assert not xla_bridge._backends, "the devices are the other process's"
assert llm.engine.occupancy.num_pages == llm.engine.schedule.num_pages
thread = threading.Thread(target=llm.generate, args=([[1, 2]] * 9, long, False))
thread.start()
while not llm._threads._thread:
    time.sleep(1e-3)
if not (fork := os.fork()):
    signal.alarm(10)
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(fork, 0)[1] == 0, "a fork need not wait for threads that it does not have"
thread.join()
told, tell = os.pipe()
if not os.fork():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        llm.generate([[1, 2]], long, False)
    except EngineDiedError as error:
        llm.close()
        os.write(tell, b"refused" if "fork" in str(error) else b"?")
    del llm
    time.sleep(600)
assert os.read(told, 9) == b"refused"
try:
    print("serves", llm.engine.host.driver._process.pid, flush=True)
    while True:
        llm.generate([[1, 2]], long, False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("served", len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), False)), flush=True)
while True:
    llm.generate([[1, 2]], long, False)
"""


def test_a_process_ends_without_its_client_and_without_standard_error() -> None:
    program = """
import multiprocessing, sys
from jaxserve.assembly.core_process import CoreProcess
sys.stderr = None
ours, theirs = multiprocessing.Pipe()
theirs.close()
CoreProcess(ours).run()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S).returncode == 0


@pytest.mark.long
def test_interrupts_and_deaths_of_the_caller(llama: Path) -> None:
    """Ctrl-C is for the caller alone; the core ends with it, however that ends."""
    command = [sys.executable, "-c", PROGRAM, str(llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        try:
            word, number = program.stdout.readline().split()
            assert word == "serves"
            pid = int(number)
            time.sleep(0.1)
            os.killpg(program.pid, signal.SIGINT)  # a terminal signals the whole group
            assert [program.stdout.readline() for _ in range(2)] == ["interrupted\n", "served 1\n"]
            program.kill()
            until(lambda: not is_running(pid))  # although the fork is there
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether there is a process that runs; one whose parent has gone may stay a zombie in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_start_asks_for_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits until all are compiled has them compiled, though the run may be a short one."""
    looks, flushed = [], []

    class Host:
        core = close = schedule = None

        @property
        def is_warm(self) -> bool:
            looks.append(len(flushed))
            return len(looks) > 2

    monkeypatch.setattr(core_process, "gc", SimpleNamespace(collect=int, freeze=int))
    monkeypatch.setattr(CoreProcess, "_new_host", lambda process, start: Host())
    monkeypatch.setattr(CoreProcess, "_flush", lambda process: flushed.append(1))
    monkeypatch.setattr(CoreProcess, "send", lambda process, message: None)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        CoreProcess(ours)._start(Start(None, None, frozenset(), {}, logging.INFO))
    assert (looks, len(flushed)) == ([1, 1, 1], 2)


def test_there_is_work_until_all_has_come() -> None:
    """The frontend's thread ends if there is none: that must not be while a message is taken, or the end is told."""
    own = link.Link()
    own._connection, theirs = multiprocessing.Pipe()
    checks = []

    class Checked(deque[Any]):
        def popleft(self) -> Any:
            checks.append(own.has_work())
            return super().popleft()

        def append(self, item: Any, /) -> None:
            checks.append(own.has_work() and own.error is not None)
            super().append(item)

    own._untaken, own.outbox = Checked([3]), Checked()
    status = own.status._replace(num_taken=1, has_work=True)
    own._take(FromCore([], status, stats_values(own.stats), []))
    own._end_all(EngineDiedError("gone"))
    assert checks == [True, True]
    assert not own.has_work()
    theirs.close()


def test_log_records_follow_the_client_log_level(caplog: pytest.LogCaptureFixture) -> None:
    own = link.Link()
    caplog.set_level(logging.WARNING, "other")
    for level in (logging.INFO, logging.ERROR):
        record = {"name": "other", "levelno": level, "levelname": logging.getLevelName(level), "msg": "100%"}
        own._take(Logged(record))
    own.end()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.ERROR, "100%")]


def test_an_unpicklable_error_is_reported_by_its_text() -> None:
    class LocalError(Exception):
        pass

    assert isinstance(portable_error(RequestError("x")), RequestError)
    assert str(portable_error(LocalError("why"))) == "LocalError: why"
    delta = unpack_delta(pack_delta(Delta(1.0, error=LocalError("why"))))
    assert isinstance(delta, Delta)
    assert str(delta.error) == "LocalError: why"


def test_replies_name_one_configuration_wherever_the_core_runs() -> None:
    names = {system_fingerprint(EngineConfig("tiny", engine_process=value)) for value in (False, True)}
    assert len(names | {system_fingerprint(EngineConfig("other"))}) == 2
