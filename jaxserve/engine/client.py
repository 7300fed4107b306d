"""CoreClient: a core in a process of its own, as `CoreHost` is one in this process.

    Frontend --> CoreClient --pipe--> CoreProcess --> CoreHost

One thread alone, which no interrupt of a caller reaches, reads and writes the pipe: everybody else leaves events and
calls for it, and wakes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve import weights
from jaxserve.distributed import processes
from jaxserve.engine import messages
from jaxserve.engine.backlog import prefill_s
from jaxserve.engine.core_thread import MAX_DELTAS
from jaxserve.engine.events import Event, Submitted
from jaxserve.engine.messages import Call, Failed, FromCore, Logged, Reply, Start, Started, ToCore
from jaxserve.engine.status import CoreStatus, MemoryState
from jaxserve.environment import child_variables
from jaxserve.errors import ConfigError, EngineDiedError
from jaxserve.metrics import EngineStats, Occupancy, PeakRates, StepStats
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.wait_estimate import OutputLengths, Wait

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jaxserve.config import EngineConfig
    from jaxserve.engine.deltas import Delta
    from jaxserve.engine.parameters import Weights
    from jaxserve.execution.roofline import Device
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params

END_S = 10.0  # time that the process has to end once its pipe is closed
ESTIMATE_S = 0.5  # time that an estimate of a wait may take, for which the loop of a server stands still
MOST_STEPS = 256  # statistics of steps that are kept for who drives the engine


class CoreClient:
    """A core in another process, which ends with this object at the latest. See `CoreHost`.

    Args:
        config: model and options.
        arch: sizes of the model.
        eos_ids: tokens that end an output.

    Raises:
        ConfigError: the engine cannot start there, or not in a process of its own.
        EngineDiedError: the process has ended while it started.
    """

    peers = None

    def __init__(self, config: EngineConfig, arch: ArchConfig, eos_ids: frozenset[int]) -> None:
        if sys.platform == "win32":
            raise ConfigError("engine_process must be False on Windows, got True")
        if processes.is_joined():
            raise ConfigError("engine_process must be False in a run of several processes, got True; drop it")
        self.driver = link = _Link()
        self._end = weakref.finalize(self, link.end)
        # The model is read here; whatever `hf_overrides` is need not be sent.
        sent = dataclasses.replace(config, engine_process=False, hf_overrides=None)
        level = logging.getLogger("jaxserve").getEffectiveLevel()
        try:
            link.launch(Start(sent, arch, eos_ids, _settings(), level))
        except BaseException:
            self._end()
            raise
        self.stats, self.outbox, self.last_steps = link.stats, link.outbox, link.last_steps
        self.schedule, self.send = link.started.schedule, link.send
        self.check_fits = Scheduler(self.schedule).check_fits
        self.backlog = ClientBacklog(link, self.schedule.of_shard.max_num_batched_tokens)

    def _call(self, name: str, *args: Any) -> Any:
        return self.driver.call(name, *args)

    # Steps

    def advance(self) -> None:
        """Wait for a step."""
        self.last_steps.clear()
        while self.driver.has_work() and not self.outbox:
            self.driver.wait(None)

    def take_events(self) -> None:
        """Have the core take its events."""
        if self.problem is None:
            self._call("take_events")

    def follow(self) -> None:
        """Go on: this process does not follow another one."""

    # Weights and memory

    @property
    def params(self) -> Params:
        """Raise ConfigError: arrays of devices stay in their process."""
        raise ConfigError(
            "params are arrays on devices of the engine's own process, which no other can have; give update_weights "
            "other arrays or a directory, or start the engine with engine_process=False"
        )

    def prepare_weights(self, given: Weights) -> None:
        """Prepare other weights for `replace_weights`; ConfigError if they do not fit the model."""
        self.memory.check_open()
        self._call("prepare_weights", _on_host(given) if isinstance(given, Mapping) else given)

    def replace_weights(self) -> None:
        """Serve with the weights that were prepared."""
        self._call("replace_weights")

    def sleep(self, level: int) -> None:
        """Free the devices' memory until `wake_up`."""
        self._call("sleep", level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate that memory again."""
        self.memory.check_open()
        self._call("wake_up", tags)

    def wait_until_warm(self) -> None:
        """Block until every program is compiled."""
        self._call("wait_until_warm")

    def peak_rates(self) -> PeakRates:
        """Return the peak rates of the device."""
        rates: PeakRates = self._call("peak_rates")
        return rates

    def describe_device(self) -> Device:
        """Return what the device is."""
        device: Device = self._call("describe_device")
        return device

    def close(self) -> None:
        """Abort all requests, free everything and end the process."""
        if not self.driver.status.memory.is_closed:
            with contextlib.suppress(EngineDiedError):
                self._call("close")
        self._end()

    # What there is to see

    @property
    def memory(self) -> MemoryState:
        """Memory of the devices."""
        return self.driver.status.memory

    def check_serve(self) -> None:
        """Raise an error if no request can be served now: EngineDiedError if the process has ended by itself."""
        if self.driver.error is not None and not self.memory.is_closed:
            raise EngineDiedError(str(self.driver.error))
        self.memory.check_serve()

    @property
    def is_warm(self) -> bool:
        """True once every program is compiled."""
        return self.driver.status.is_warm

    @property
    def problem(self) -> str | None:
        """Reason why nothing can be served any more; None if there is none."""
        if self.driver.status.memory.is_closed:
            return "the engine has closed itself after a failure"
        return None if self.driver.error is None else str(self.driver.error)

    @property
    def num_waiting(self) -> int:
        """Requests that have no pages and no slot, with events that were not taken."""
        return self.occupancy.num_waiting + self.driver.num_untaken

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages of all replicas."""
        return self.driver.status.occupancy

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared."""
        self._call("check_integrity")


class ClientBacklog:
    """Estimates of a core in another process, as `Backlog` has them.

    Args:
        link: way to the process.
        most_in_step: most tokens of a prompt in a step.

    Attributes:
        lengths: lengths of outputs that have ended.
    """

    def __init__(self, link: _Link, most_in_step: int) -> None:
        self._link, self._most_in_step = link, most_in_step
        self._latest: Wait | None = None
        self.lengths = OutputLengths()

    def num_waiting_tokens(self) -> int:
        """Return the tokens to compute of requests that wait."""
        return self._link.status.num_waiting_tokens + self._link.num_untaken_tokens

    def wait(self, num_tokens: int = 1, priority: int | None = None) -> Wait | None:
        """Return how long a request that came now would wait, or the last estimate if the process does not answer."""
        with contextlib.suppress(Empty, EngineDiedError):
            self._latest = self._link.call("estimate", num_tokens, priority, self.lengths, most_s=ESTIMATE_S)
        return self._latest

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time that a prompt takes beyond a step of one token."""
        return prefill_s(num_tokens, self._link.status.rates, self._most_in_step)


class _Link:
    """The process, the pipe to it and the thread that serves the pipe; a driver of a core as `CoreThread` is.

    Attributes:
        outbox: deltas that have come.
        stats: totals; those of the core as they were with the last message.
        last_steps: statistics of the latest steps.
        status: status of the core with the last message.
        started: what it has said first.
        error: reason why the process has ended; None as long as it runs.
        num_untaken_tokens: tokens of the prompts of events that the core has not taken, as far as is known.
    """

    status = CoreStatus(0, False, Occupancy(0, 0, 0, 0), 0, None, MemoryState(), False)
    started: Started

    def __init__(self) -> None:
        self.outbox: deque[Delta | BaseException] = deque()
        self.stats = EngineStats()
        self.last_steps: deque[StepStats] = deque(maxlen=MOST_STEPS)
        self.error: BaseException | None = None
        self.num_untaken_tokens = 0
        self._untaken: deque[int] = deque()  # tokens of the prompts of each of these events
        self._events: deque[Event] = deque()  # to be sent, as are these calls
        self._calls: deque[Call] = deque()
        self._replies: dict[int, SimpleQueue[Reply]] = {}
        self._numbers = itertools.count()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()  # told once the core has started, or cannot
        self._num_received = self._num_acknowledged = 0  # deltas
        self._is_paused = self._is_ending = False
        self._is_awake = False  # True if the thread is going to look for what there is to send
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._process: subprocess.Popen[bytes]
        self._connection: Connection

    def launch(self, start: Start) -> None:
        """Start process and thread, and wait for the core; raise whatever has kept it from starting."""
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxserve.engine.core_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=child_variables(PYTHONPATH=path),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt is for this process
            )
        threading.Thread(target=self._run, args=(start,), name="jaxserve pipe", daemon=True).start()
        self._ready.get()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the process, by closing the pipe or else by force. From any thread, the pipe's too."""
        self._is_ending = True
        self._wake()
        process = getattr(self, "_process", None)
        if process is None:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # From any thread, which an interrupt may stop anywhere

    def send(self, event: Event) -> None:
        """Leave an event for the core."""
        self._events.append(event)
        self._wake()
        if self.error is not None and isinstance(event, Submitted):  # nobody else tells of its end
            self.outbox.append(self.error)

    def call(self, name: str, *args: Any, most_s: float | None = None) -> Any:
        """Call a method of the host and return its result, or raise its exception; Empty if that takes too long."""
        number, reply = next(self._numbers), SimpleQueue[Reply]()
        self._replies[number] = reply
        self._calls.append(Call(number, name, args))
        self._wake()
        if self.error is not None:  # the thread may have ended before
            self._replies.pop(number, None)
            raise EngineDiedError(str(self.error))
        value, error = reply.get(timeout=most_s)[1:]
        if error is not None:
            raise error
        return value

    def _wake(self) -> None:
        """Have the thread look for what there is to send."""
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):  # full, which wakes it as well; or closed
                self._waker.send(b"x")

    # As `CoreThread`

    def start(self) -> None:
        """Do nothing: the process drives its core by itself."""

    def has_work(self) -> bool:
        """Return whether deltas may come."""
        return self.error is None and (self.num_untaken > 0 or self.status.has_work)

    @property
    def num_untaken(self) -> int:
        """Events that the core has not taken, as far as is known."""
        return len(self._untaken) + len(self._events)

    @property
    def is_running(self) -> bool:
        """True if deltas may come that somebody waits for."""
        return self.has_work() and not self._is_paused

    def wait(self, most_s: float | None) -> None:
        """Wait for a message, for at most some seconds."""
        if self._num_received - len(self.outbox) - self._num_acknowledged >= MAX_DELTAS // 2:
            self._wake()
        with contextlib.suppress(Empty):
            self._news.get(timeout=most_s)

    def pause(self) -> None:
        """Have nobody wait for deltas until `resume`; the core goes on as far as it may."""
        self._is_paused = True
        self._news.put(None)

    def resume(self) -> None:
        """Let deltas be waited for."""
        self._is_paused = False

    # The thread of the pipe

    def _run(self, start: Start) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        wakes = self._wakes.fileno()
        try:
            messages.send(self._connection, start)
            while not self._is_ending:
                for handle, _ in poll.poll():
                    if handle == wakes:
                        self._wakes.recv(4096)
                        self._is_awake = False  # first: what comes from now on wakes it again
                        self._send()
                    else:
                        self._take(messages.receive(self._connection))
        except (EOFError, OSError):
            pass
        except BaseException:
            logging.getLogger(__name__).exception("the engine's process is given up: a message could not be taken")
        self._end_all(self.error or self._death())

    def _send(self) -> None:
        if not hasattr(self, "started"):
            return
        num_delivered = self._num_received - len(self.outbox)
        events = []
        while self._events:
            event = self._events[0]
            num_tokens = 0
            if isinstance(event, Submitted):
                num_tokens = sum(request.num_prompt_tokens for request in event.requests)
            self._untaken.append(num_tokens)
            self.num_untaken_tokens += num_tokens
            events.append(messages.formed(self._events.popleft()))
        call = self._calls.popleft() if self._calls else None
        if events or call is not None or num_delivered - self._num_acknowledged >= MAX_DELTAS // 2:
            self._num_acknowledged = num_delivered
            messages.send(self._connection, ToCore(events, num_delivered, call))
        if self._calls:
            self._wake()

    def _take(self, message: FromCore | Started | Failed | Logged) -> None:
        match message:
            case FromCore(deltas, status, stats, steps, reply):
                messages.take_stats(self.stats, stats)
                self.last_steps.extend(StepStats(*step) for step in steps)
                self.outbox.extend(messages.unpacked(delta) for delta in deltas if delta is not None)
                self._num_received += len(deltas)
                for _ in range(status.num_taken - self.status.num_taken):
                    self.num_untaken_tokens -= self._untaken.popleft()
                self.status = status
                if reply is not None and (waiting := self._replies.pop(reply.number, None)) is not None:
                    waiting.put(reply)
                self._news.put(None)
            case Started():
                self.started = message
                self._ready.put(None)
                self._wake()
            case Failed(error):
                self.error = error
                self._is_ending = True
            case Logged(record):
                made = logging.makeLogRecord(record)
                logging.getLogger(made.name).handle(made)

    def _death(self) -> EngineDiedError:
        """Return the error of a process that has ended, or that ends."""
        if self._is_ending:
            return EngineDiedError("the engine's process was ended; start another engine")
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}" + (", as if memory were short" if code == -signal.SIGKILL else "")
        return EngineDiedError(f"the engine's process has ended {how}: no requests are served; start another engine")

    def _end_all(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing comes any more."""
        self.error = error
        self.outbox.append(error)
        self._ready.put(None)
        for number, waiting in list(self._replies.items()):
            waiting.put(Reply(number, None, EngineDiedError(str(error))))
        self._news.put(None)
        self._connection.close()
        self._wakes.close()
        self._waker.close()


def _settings() -> dict[str, Any]:
    """Return the settings of jax, which the process takes as far as its own differ."""
    kinds = bool | int | float | str | None
    return {name: value for name, value in jax.config.values.items() if isinstance(value, kinds)}


def _on_host(given: Mapping[str, Any]) -> Any:
    """Return weights as arrays of this process."""

    def array(value: Any) -> Any:
        found = weights.from_torch(value)
        return np.asarray(found) if hasattr(found, "dtype") else found

    return jax.tree.map(array, dict(given))
