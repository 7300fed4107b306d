"""Ctrl-C at any time: the command ends with one line and status 130, and leaves its outputs in order."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine
import pytest
import tiny_tokenizers
from batch_jobs import batch_input, wait_for
from killing import records_by_id

from tests.parameters import mainly

LINE = "\njaxserve: interrupted"
NOT_IGNORED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in jobs
COMMAND = NOT_IGNORED + "import sys; from jaxserve.__main__ import main; sys.exit(main())"
INSTALLED = NOT_IGNORED + "import jaxserve.system.signals as interrupts; interrupts.install()\n"


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_s() -> float:
    """Return the time that the interpreter takes here before the handler is installed."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", INSTALLED], check=True)
    return time.monotonic() - started


def assert_interrupted(process: "subprocess.Popen[str]", when: object = None) -> str:
    shown, told = process.communicate(timeout=30)
    assert process.returncode == 130, (when, process.returncode, shown[-200:], told)
    assert told == f"{LINE}\n", (when, told)
    return shown


def interrupt_after(delay_s: float, cache_dir: Path) -> None:
    generate = ["generate", "def f(x):", "--max-tokens", "1000", "--compilation-cache-dir", str(cache_dir)]
    process = start(COMMAND, *generate)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    assert_interrupted(process, delay_s)


@pytest.mark.parametrize("delay_s", mainly([0.3, 2.0], 1.0))
def test_generate(delay_s: float, tmp_path: Path) -> None:
    interrupt_after(start_s() + delay_s, tmp_path)


@pytest.mark.full
def test_generate_thirty_times(tmp_path: Path) -> None:
    first_s = max(0.05, 2 * max(start_s() for _ in range(3)))
    for index in range(30):
        interrupt_after(first_s + (2.5 - first_s) * index / 29, tmp_path)


def test_in_a_call_that_takes_long() -> None:
    stuck = INSTALLED + "import hashlib; print(flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 300_000_000)"
    process = start(stuck)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert_interrupted(process)


SWALLOWED = """
import os

class Swallowing:
    def __del__(self):
        print(flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

with interrupts.unwinding():
    try:
        del [Swallowing()][0]
        while True:
            pass
    except KeyboardInterrupt:
        print("in order", flush=True)
        interrupts.notify()
        interrupts.leave()
"""


def test_an_interrupt_during_cleanup_is_not_swallowed() -> None:
    assert assert_interrupted(start(INSTALLED + SWALLOWED)) == "\nin order\n"


@pytest.mark.parametrize("apart_s", mainly([0.01], 0.0, 0.05))
def test_two_interrupts_of_a_batch(apart_s: float, tmp_path: Path) -> None:
    model = str(tiny_tokenizers.write(tmp_path / "model", tiny_tokenizers.byte_level()))
    source, out = batch_input(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    command = [sys.executable, fake_engine.__file__, "batch", source, str(out), "--model", model]
    slow = os.environ | {fake_engine.STEP_S: "0.01"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=slow, text=True)
    wait_for(out)
    process.send_signal(signal.SIGINT)
    time.sleep(apart_s)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, f"{LINE}; run the same command again to resume\n")
    assert 0 < len(records_by_id(out)) < 60
    assert out.read_text().endswith("}\n")
    subprocess.run(command, check=True, capture_output=True)
    assert len(records_by_id(out)) == 60
