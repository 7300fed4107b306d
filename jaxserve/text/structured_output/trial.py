"""Trial: the first compilation of each grammar, in a child process that time and memory limits can end.

llguidance cannot be interrupted, and a short schema may make it compute for hours and exhaust memory. So a child
process compiles a grammar first, and only a grammar within the limits is compiled again in this process: matchers
cannot be sent between processes, and the second compilation takes the same time and memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.errors import BusyError, FaultError, RequestError
from jaxserve.system.child_process import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILE_S = 5.0  # processor time per grammar, which grows with the square of a schema's properties
PATIENCE = 4  # wall time may be this many times as long, as processors are shared
COMPILE_BYTES = 2**30  # memory per grammar
NUM_CHILDREN = 3  # concurrent compilations
MAX_KEPT_BYTES = 2**28  # a process that keeps more memory for later grammars is ended
START_S = 120.0  # maximum time for a child to read the tokenizer
MAX_REFUSED = 1024  # remembered refusals
REFUSED_S = 60.0  # lifetime of a refusal that might not recur
NICENESS = 5

_UNKNOWN, _UNSATISFIABLE = re.compile(r"Unimplemented keys: (\[[^\n]*\])"), "Unsatisfiable schema"
_SCRIPT = Path(__file__).with_name("child.py")


class Cost(NamedTuple):
    """Processor time and memory that compiling a grammar took."""

    cpu_s: float
    num_bytes: int


class TooLongError(RequestError):
    """Error if a grammar exceeds its limit of compile time or memory."""


def refused(reason: str) -> RequestError:
    """Return the error for a grammar that llguidance refuses with the message `reason`."""
    if unknown := _UNKNOWN.search(reason):
        return RequestError(f"JSON schemas in structured_outputs must do without the keywords {unknown[1][:500]}")
    if _UNSATISFIABLE in reason:
        _, _, why = reason.partition(_UNSATISFIABLE)
        return RequestError(
            "JSON schemas in structured_outputs must be such that some value obeys them, but this is not so: "
            f"{why.strip(': ').partition(chr(10))[0][:500]}"
        )
    return RequestError(f"structured_outputs must be what llguidance accepts, but it said: {reason[:2000]}")


class Child:
    """Process that compiles one grammar at a time; it starts with the first grammar.

    Args:
        start: first line of its input, which has the tokenizer and the limits.
    """

    def __init__(self, start: bytes) -> None:
        self._start = start
        self._process: ChildProcess | None = None

    def compile(self, grammar: str) -> Cost:
        """Compile a grammar in the process, and return its cost; RequestError if it is refused or exceeds a limit."""
        process = self._started()
        process.write(json.dumps(grammar).encode() + b"\n")
        line = process.read_line(PATIENCE * COMPILE_S)
        if line is None:
            is_late = process.status in (None, -signal.SIGXCPU)
            self.end()
            limit = f"in {COMPILE_S:g} s" if is_late else f"within {COMPILE_BYTES >> 20} MiB of memory"
            raise TooLongError(
                f"structured_outputs must compile {limit}, this takes more; leave out optional properties, patterns or "
                "alternatives"
            )
        answer: dict[str, Any] = json.loads(line)
        if answer["kept_bytes"] > MAX_KEPT_BYTES:
            self.end()
        if answer["reason"]:
            raise refused(answer["reason"])
        return Cost(answer["cpu_s"], answer["num_bytes"])

    def end(self) -> None:
        """Kill the compiling process; the next grammar starts a new one."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _started(self) -> ChildProcess:
        """Return the process, started if it does not run; see `ChildProcess.started`."""
        if self._process is not None and self._process.status is None:
            return self._process
        self.end()  # closes the pipes if it has already ended
        need = "structured_outputs are compiled by"
        self._process = process = ChildProcess.started(_SCRIPT, self._start, START_S, need, RAYON_NUM_THREADS="1")
        return process


class Trials:
    """Compilation of grammars in child processes for all tenants; one tenant never occupies all. Thread-safe.

    Args:
        tokenizer_json: text of `tokenizer.json`.
        vocab_size: number of model tokens.
        eos_ids: tokens that end an output.
        limits: llguidance's parser limits.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: list[int], limits: dict[str, Any]) -> None:
        start = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "eos_ids": eos_ids, "limits": limits}
        start |= {"max_bytes": COMPILE_BYTES, "max_s": COMPILE_S, "niceness": NICENESS}
        line = json.dumps(start).encode() + b"\n"
        self._free = [Child(line) for _ in range(NUM_CHILDREN)]
        self._changed = threading.Condition()
        self._waiting: Counter[str] = Counter()
        self._num_running: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._refused: OrderedDict[bytes, tuple[float, RequestError]] = OrderedDict()  # keys are hashes

    def run(self, grammar: str, tenant: str) -> Cost:
        """Compile a tenant's grammar in a child process, and return its cost; refusals are remembered.

        Raises:
            RequestError: the grammar is refused or exceeds a limit.
            BusyError: it waits too long, also for a process that starts.
            FaultError: no process can start.
        """
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._changed:
            until_s, error = self._refused.get(key, (0.0, None))
            if error is not None and time.monotonic() < until_s:
                raise RequestError(*error.args)
        try:
            with self._child(tenant) as child:
                return child.compile(grammar)
        except RequestError as error:
            for_s = REFUSED_S if isinstance(error, TooLongError) else float("inf")
            if not isinstance(error, BusyError | FaultError):
                with self._changed:
                    self._refused[key] = time.monotonic() + for_s, error
                    while len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
            raise

    @contextmanager
    def _child(self, tenant: str) -> Iterator[Child]:
        """Wait until it is a tenant's turn, and yield a free child for its use inside the context."""
        until_s = time.monotonic() + PATIENCE * COMPILE_S
        with self._changed:
            self._waiting[tenant] += 1
            try:
                while not self._is_next(tenant):
                    if not self._changed.wait(until_s - time.monotonic()):
                        raise BusyError("structured_outputs of others are being compiled; try again")
                child = self._free.pop()
                self._num_running[tenant] += 1
            finally:
                self._waiting[tenant] -= 1
                self._waiting += Counter()  # drops zeros
                self._changed.notify_all()
        began_s = time.monotonic()
        try:
            yield child
        finally:
            with self._changed:
                self._free.append(child)
                self._num_running[tenant] -= 1
                self._num_running += Counter()
                self._used_s[tenant] += time.monotonic() - began_s
                if len(self._used_s) > MAX_REFUSED:
                    self._used_s.clear()
                self._changed.notify_all()

    def _is_next(self, tenant: str) -> bool:
        """Return whether a child is free, and no waiting tenant comes before this one.

        The last free child is reserved for tenants without one.
        """
        if not self._free or (len(self._free) == 1 and self._num_running[tenant]):
            return False

        def rank(name: str) -> tuple[int, float]:
            return self._num_running[name], self._used_s[name]

        return all(rank(tenant) <= rank(other) for other in self._waiting if other != tenant)
