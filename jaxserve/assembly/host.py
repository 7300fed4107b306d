"""CoreHost: the core and its devices, all that works with jax, in the process whose devices they are.

Its users, the engine's frontend, its threads and its server, do not ask where it is: `client.py` stands for one in
another process.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.api.metrics import (
    EngineStats,
    Occupancy,
    PeakRates,
    StepStats,
)
from jaxserve.assembly.build import build_runners, check_sizes, naming_exhaustion
from jaxserve.assembly.device_state import Devices
from jaxserve.assembly.lock_step import fail_others, follow, require_same_options
from jaxserve.assembly.memory import claim_memory
from jaxserve.core.core import EngineCore
from jaxserve.core.core_thread import POLL_S, CoreThread
from jaxserve.core.event_log import EventLog, event_to_json
from jaxserve.core.events import Record, ReplicaEvent, WeightsRead
from jaxserve.core.replica import Replica
from jaxserve.core.step_chooser import NewChooser, StepChooser
from jaxserve.core.wait_estimator import WaitEstimator
from jaxserve.distributed import processes
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.errors import ConfigError
from jaxserve.execution.roofline import Device, describe_device
from jaxserve.execution.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxserve.api.config import EngineConfig
    from jaxserve.assembly.parameters import Weights
    from jaxserve.core.status import MemoryState
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params
    from jaxserve.scheduling.executor import Executor
    from jaxserve.scheduling.schedule_config import ScheduleConfig


class CoreHost:
    """Replicas of a model on their devices. One thread at a time uses it, but any thread may call methods that say so.

    Args:
        config: model and options.
        arch: sizes of the model.
        executors: devices of the replicas; None for compiled programs, as `config` says.
        new_chooser: makes the chooser of a replica's steps.

    Attributes:
        core: the replicas and their inputs.
        devices: weights and memory of all replicas.
        peers: the other processes of the run; None if there are none.
        schedule: resolved sizes of steps and pool, of each replica.
        stats: totals since start, of all steps but those that may have ended since the last dispatch.
        outbox: deltas of the core.
        send: leaves an event for the core; from any thread.
        driver: thread that drives the core, once it is started.
        wait_estimator: estimates of waits; from any thread.
        check_fits: raises RequestError for a request that could not run to its end even alone; from any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        executors: Sequence[Executor] | None = None,
        new_chooser: NewChooser = StepChooser,
    ) -> None:
        claim_memory(config)
        check_sizes(config, arch)
        self.stats = EngineStats()
        self.peers = processes.joined_role() if executors is None else None
        if self.peers is not None:
            self.peers.require_free()
            require_same_options(config, self.peers)
            self.peers.claim()
        if executors is None:
            with naming_exhaustion(config):
                executors = build_runners(config, arch, self.peers)
        self.devices = Devices(config, arch, [e for e in executors if isinstance(e, Runner)])
        self.schedule = executors[0].schedule
        self._logs = [] if config.event_log is None else _open_logs(config.event_log, self.schedule, len(executors))
        records = [_recorder(self.peers, self._logs[i : i + 1]) for i in range(len(executors))]
        replicas = [
            Replica(config, arch, each, self.stats, record, new_chooser)
            for each, record in zip(executors, records, strict=True)
        ]
        self.core = EngineCore(replicas, step_ahead=config.step_ahead, on_failure=partial(fail_others, self.peers))
        self.outbox, self.send = self.core.outbox, self.core.inbox.append
        own = weakref.ref(self)  # an engine that nobody has any more is freed without the collector
        self.driver = CoreThread(self.core, lambda: host.close() if (host := own()) is not None else None)
        self.wait_estimator = WaitEstimator(self.core)
        self.check_fits = replicas[0].scheduler.check_fits
        self._given: tuple[Weights, Callable[[], Params]] | None = None  # weights that are prepared

    # Steps

    def advance(self) -> None:
        """Take a step, of the first replica that can go on."""
        while not self.core.step(time.monotonic()) and self.core.has_work():
            time.sleep(POLL_S)

    def take_events(self) -> None:
        """Have the core take its events, without a step."""
        self.core.take_events()

    def follow(self) -> None:
        """Replay the events of another process, if this one is to follow it, and end this one with that."""
        if isinstance(self.peers, Follower):
            replica = self.core.replicas[0]
            follow(self.peers, replica.scheduler, replica.executor, self.devices)
            raise SystemExit(0)

    # Weights and memory

    @property
    def params(self) -> Params:
        """Weights in use; see `LLM.params`."""
        return self.devices.params

    def prepare_weights(self, given: Weights) -> None:
        """Prepare other weights for `replace_weights`; ConfigError if they do not fit the model."""
        self.memory.check_open()
        if self.peers is not None and not isinstance(given, str | os.PathLike):
            raise ConfigError("weights must be a directory that all processes can read, got arrays of one; save them")
        self._given = given, self.devices.prepare(given)

    def replace_weights(self) -> None:
        """Serve with the weights that were prepared; unfinished requests are ended, for callers to begin them again."""
        assert self._given is not None, "weights were prepared"
        (given, make), self._given = self._given, None
        if self.peers is not None and isinstance(given, str | os.PathLike):
            self.peers.tell(event_to_json(WeightsRead(os.fspath(given))))
        try:
            self.devices.replace(make)
        except BaseException as error:
            self.core.abort_all(error)
            raise
        self.core.abort_all()
        for replica in self.core.replicas:
            replica.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Free the devices' memory until `wake_up`; see `LLM.sleep`."""
        for replica in self.core.replicas:
            replica.drop_in_flight()
            replica.reset_prefix_cache()
        self.devices.sleep(keep_weights=level == 1)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate that memory again; see `LLM.wake_up`."""
        self.devices.wake_up(tags)

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead). From any thread."""
        self.devices.wait_until_warm()

    def peak_rates(self) -> PeakRates:
        """Return the peak rates of the device; see `Engine.peak_rates`."""
        return self.devices.peak_rates()

    def describe_device(self) -> Device:
        """Return the kind and number of the devices."""
        return describe_device()

    def close_logs(self) -> None:
        """Write the rest of the event logs."""
        for log in self._logs:
            log.close()

    def close(self) -> None:
        """Abort all requests and free everything; the ends of requests are left in the outbox."""
        self.devices.close()
        with ExitStack() as stack:  # an error leaves nothing unfreed
            stack.callback(self.close_logs)
            for replica in self.core.replicas:
                stack.callback(replica.close)
            self.core.abort_all(RuntimeError("the engine was closed"))

    # What there is to see, from any thread

    @property
    def memory(self) -> MemoryState:
        """Memory of the devices."""
        return self.devices.memory

    def check_serve(self) -> None:
        """Raise RequestError if no request can be served now, RuntimeError if the engine is closed."""
        self.memory.check_serve()

    @property
    def is_warm(self) -> bool:
        """True once every program is compiled."""
        return self.devices.is_warm

    @property
    def problem(self) -> str | None:
        """Reason why nothing can be served any more; None if there is none."""
        return "the engine has closed itself after a failure" if self.memory.is_closed else None

    @property
    def num_waiting(self) -> int:
        """Requests that have no pages and no slot, with events that were not taken."""
        return self.core.num_waiting + len(self.core.inbox)

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages of all replicas now."""
        schedulers = [replica.scheduler for replica in self.core.replicas]
        return Occupancy(
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=self.core.num_waiting,
            num_pages_used=sum(scheduler.num_pages_used for scheduler in schedulers),
            num_pages=sum(scheduler.sizes.num_pages for scheduler in schedulers),
            num_deferred=sum(scheduler.num_deferred for scheduler in schedulers),
        )

    @property
    def last_steps(self) -> Sequence[StepStats]:
        """Statistics of steps, of any replica; see `EngineCore`."""
        return self.core.last_steps

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared."""
        self.core.check_integrity()


def _open_logs(path: str, schedule: ScheduleConfig, num_replicas: int) -> list[EventLog]:
    """Return the event log of each replica; all but the first end with their number."""
    return [EventLog(f"{path}.{index}" if index else path, schedule) for index in range(num_replicas)]


def _recorder(peers: Leader | Follower | None, logs: Sequence[EventLog]) -> Record | None:
    """Return a function to call with the events of a replica; None where nobody wants them."""
    sinks: list[Record] = [] if peers is None else [lambda event: peers.tell(event_to_json(event))]
    sinks += [log.record for log in logs]

    def record(event: ReplicaEvent) -> None:
        for sink in sinks:
            sink(event)

    return record if sinks else None
