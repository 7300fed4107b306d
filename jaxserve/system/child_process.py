"""ChildProcess: a script in a process of its own, for work that must end within limits of time and memory."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve.errors import BusyError, FaultError
from jaxserve.system.environment import child_variables

logger = logging.getLogger(__name__)

_PART_BYTES = 2**20
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class ChildProcess:
    """A Python script that reads requests from its standard input, and writes answers to its standard output.

    It is killed with this object, and when this process exits.

    Args:
        script: the script; its imports come from this process's path.
        variables: further environment variables.

    Raises:
        OSError: the system refuses the process.
    """

    def __init__(self, script: Path, **variables: str) -> None:
        # Imports come from this process's path, not from the script's directory, whose modules would shadow others.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_variables(PYTHONPATH=path, **variables),
        )
        assert self._process.stdin is not None, "it has pipes"
        assert self._process.stdout is not None, "it has pipes"
        self._input, self._output = self._process.stdin, self._process.stdout
        self.kill: Callable[[], Any] = weakref.finalize(self, _kill, self._process)

    @classmethod
    def started(
        cls, script: Path, request: bytes, timeout_s: int | float, need: str, *, advice: str = "", **variables: str
    ) -> ChildProcess:
        """Start a script and wait for its answer to a first request, which means that it is ready.

        Args:
            script: see the class.
            request: first request.
            timeout_s: time until the answer.
            need: beginning of the message, such as "images are decoded by".
            advice: end of the message if the script ends by itself.
            variables: see the class.

        Raises:
            BusyError: the machine lacks memory, processes or time for it now.
            FaultError: it cannot start.
        """
        try:
            process = cls(script, **variables)
        except OSError as error:
            kind = BusyError if error.errno in _SHORTAGES else FaultError
            raise kind(f"{need} a process of their own, but: {error}") from error
        process.write(request)
        if process.read_line(timeout_s) is not None:
            return process
        status = process.status
        process.kill()
        if status in (None, -signal.SIGKILL):  # or the system has ended it, for lack of memory
            logger.warning("%s was not ready in %g s, or was killed", script, timeout_s)
            raise BusyError(f"{need} a process of their own, which was not ready in {timeout_s:g} s; try again")
        logger.error("%s has ended with status %s; run it to see its error", script, status)
        raise FaultError(f"{need} a process of their own, which ends with status {status}; see the log{advice}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def write(self, data: bytes) -> None:
        """Write to the process's input; nothing happens if it has ended, which reading its answer shows."""
        with suppress(OSError):
            self._input.write(data)
            self._input.flush()

    def read_line(self, timeout_s: int | float) -> bytes | None:
        """Return the next line of its output; None if it does not come in time, or if the process has ended.

        The process writes nothing after a line before it is asked to.
        """
        return self._read(lambda data: data.endswith(b"\n"), timeout_s, _PART_BYTES)

    def read(self, num_bytes: int, timeout_s: int | float) -> bytes | None:
        """Return the next bytes of its output; None if they do not come in time, or if the process has ended."""
        return self._read(lambda data: len(data) >= num_bytes, timeout_s, num_bytes)

    def _read(self, is_whole: Callable[[bytearray], bool], timeout_s: int | float, part_bytes: int) -> bytes | None:
        data = bytearray()
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not is_whole(data):
                if not selector.select(until_s - time.monotonic()):
                    return None
                part = os.read(self._output.fileno(), part_bytes)
                if not part:
                    self._process.wait()
                    return None
                data += part
        return bytes(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
