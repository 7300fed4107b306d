"""A worker process as seen by the driver: ask, stop, end; and the machine's load meanwhile."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines.cpu_times import CpuTimes


class WorkerDiedError(Exception):
    """The process ended, or was ended because it did not answer in time."""


class RunFailedError(Exception):
    """The worker lives, but could not do the work."""


class Worker:
    """One engine in a separate process group, stopped (SIGSTOP) between requests.

    A stopped process spins on no core, whatever its thread pools do: engines run with their default settings.

    Args:
        command: command that speaks the protocol of worker.py.
        log_path: file for its stderr.
        timeout_s: maximum time to wait for an answer, or for loading.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path, timeout_s: float) -> None:
        self._command, self._env, self._log_path, self._timeout_s = command, dict(env), log_path, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        """Start the process and wait until it has loaded; return its first message, kept as `ready`."""
        with self._log_path.open("wb") as log:
            # A group within this session, not a session: if this process dies, the kernel ends the stopped group.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                process_group=0,
            )
        self.ready = self._receive()
        self._signal(signal.SIGSTOP)
        return self.ready

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Resume the worker for one request; return its answer, with "cores_used" and "noise_share" added.

        Raises:
            WorkerDiedError, RunFailedError: see there.
        """
        self._signal(signal.SIGCONT)
        before = CpuTimes.now(self._process.pid)
        self._send(message)
        answer = self._receive()
        after = CpuTimes.now(self._process.pid)
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise RunFailedError(answer["error"])
        known = before is not None and after is not None
        return {
            **answer,
            "cores_used": after.cores_used(since=before) if known else None,
            "noise_share": after.noise_share(since=before) if known else None,
        }

    def end(self) -> None:
        """Kill the process and its children, if it runs."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDiedError(self._last_words()) from None

    def _receive(self) -> dict[str, Any]:
        """Return the next line; nothing is buffered, because each request has one answer."""
        readable, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        if not readable:
            self.end()
            raise WorkerDiedError(f"no answer within {self._timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDiedError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'it said nothing'} (log: {self._log_path})"
