"""CoreHost: the core and its devices, in the process that owns the devices.

The engine's frontend, threads and server do not depend on its process: a `CoreClient` replaces a host in another
process.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import jax

from jaxserve.api.metrics import EngineStats, Occupancy, PeakRates, StepStats
from jaxserve.assembly.adapter_store import AdapterStore
from jaxserve.assembly.build import build_executors, check_sizes, naming_exhaustion
from jaxserve.assembly.device_state import Devices, NewWeights
from jaxserve.assembly.lock_step import fail_others, follow, require_same_options
from jaxserve.assembly.memory import claim_memory
from jaxserve.assembly.page_tiers import build_movers, check_model, new_lookups, shared_pages, with_host_tier
from jaxserve.assembly.parameters import adapter_layout
from jaxserve.assembly.peer_adapters import FollowerAdapters, OtherProcesses
from jaxserve.assembly.weights_content import WeightsContent
from jaxserve.core.core import EngineCore
from jaxserve.core.core_thread import POLL_S, CoreThread
from jaxserve.core.energy import EnergyAccount
from jaxserve.core.event_log import EventLog, event_to_json
from jaxserve.core.events import Record, ReplicaEvent, WeightsRead
from jaxserve.core.kv_publisher import KVPublisher
from jaxserve.core.replica import Replica
from jaxserve.core.step_chooser import StepChooser
from jaxserve.core.wait_estimator import WaitEstimator
from jaxserve.distributed import processes
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.errors import ConfigError
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.pipeline import Pipeline
from jaxserve.execution.roofline import Device, describe_device
from jaxserve.execution.runner import Runner
from jaxserve.system.machine_memory import container_bytes
from jaxserve.system.meter import find_meter

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.assembly.parameters import Weights
    from jaxserve.core.adapter_names import AdapterSource, LoadedAdapter
    from jaxserve.core.status import MemoryState
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params
    from jaxserve.scheduling.executor_protocol import Executor
    from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence
    from jaxserve.scheduling.schedule_config import ScheduleConfig

logger = logging.getLogger(__name__)


class CoreHost:
    """Replicas of a model on their devices. One thread at a time uses it, except for methods that allow any thread.

    Args:
        config: model and options.
        arch: sizes of the model.
        executors: devices of the replicas; None for compiled programs according to `config`.
        new_chooser: class of a replica's step chooser.

    Attributes:
        core: replicas and their queue.
        devices: weights and memory of all replicas.
        peers: other processes of the run; None without any.
        schedule: resolved sizes of steps and page pool, per replica.
        stats: totals since start, except for steps that ended after the last dispatch.
        outbox: deltas from the core.
        send: sends an event to the core; callable from any thread.
        driver: thread that drives the core, once started.
        wait_estimator: estimates waiting times; callable from any thread.
        check_fits: raises RequestError for a request that could not finish even by itself; callable from any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        executors: Sequence[Executor] | None = None,
        new_chooser: type[StepChooser] = StepChooser,
    ) -> None:
        claim_memory(config)
        self.peers, given = processes.joined_role() if executors is None else None, config
        if executors is None:
            is_distributed = self.peers is not None
            config = with_host_tier(
                given, arch, jax.default_backend(), float(container_bytes()), is_distributed=is_distributed
            )
        check_sizes(config, arch)
        self.stats = EngineStats()
        if self.peers is not None:
            self.peers.require_free()
            require_same_options(config, self.peers)
            self.peers.claim()
        content = None
        if executors is None:
            check_model(config, arch, is_distributed=self.peers is not None)
            content = WeightsContent(config.model_path) if config.keeps_pages else None
            with naming_exhaustion(config):
                executors = build_executors(config, arch, self.peers)
        stages = [executor.stages for executor in executors if isinstance(executor, Runner | Pipeline)]
        self.devices = Devices(config, arch, stages, content)
        self.schedule, devices = executors[0].schedule, self.devices
        try:
            movers = build_movers(config, executors, self.stats, lambda: devices.content)
        except (jax.errors.JaxRuntimeError, ConfigError) as error:  # the device cannot copy, or no page fits
            is_other = isinstance(error, ConfigError) and not str(error).startswith("kv_offloading_size")
            if config == given or is_other:
                raise
            logger.warning("no KV pages are kept in host memory by default: %s", error)
            config = given
            movers = build_movers(config, executors, self.stats, lambda: devices.content)
        self._logs = [] if config.event_log is None else _open_logs(config.event_log, self.schedule, movers)
        records = [_recorder(self.peers, self._logs[i : i + 1]) for i in range(len(executors))]
        meter = find_meter(config.energy_meter, describe_device().platform)
        energy = None if meter is None else EnergyAccount(meter, self.stats, time.monotonic())
        replicas = [
            Replica(config, arch, executor, self.stats, record, new_chooser, mover, publisher, energy)
            for executor, record, mover, publisher in zip(
                executors,
                records,
                movers,
                _publishers(config, self.schedule, len(executors), self.peers),
                strict=True,
            )
        ]
        self.core = EngineCore(replicas, step_ahead=config.step_ahead, on_failure=partial(fail_others, self.peers))
        self.core.lookups = new_lookups(config, movers[0], self.schedule)
        self.outbox, self.send = self.core.outbox, self.core.inbox.append
        own = weakref.ref(self)  # an abandoned engine is freed without the garbage collector
        self.driver = CoreThread(self.core, lambda: host.close() if (host := own()) is not None else None)
        self.wait_estimator = WaitEstimator(self.core)
        self.check_fits = replicas[0].scheduler.check_fits
        self._other_processes: OtherProcesses | None = None
        self._adapters = self._new_store(config, arch)
        self._given: tuple[Weights, NewWeights] | None = None  # prepared weights

    # Steps

    def advance(self) -> None:
        """Take a step on each replica that can continue; if none can, wait until one can or no work is left."""
        while not self.core.step(time.monotonic()) and self.core.has_work():
            time.sleep(POLL_S)

    def take_events(self) -> None:
        """Make the core take its events now, without a step."""
        self.core.take_events()

    def follow(self) -> None:
        """Replay the events of a leading process, if there is one, and end this process with it."""
        if isinstance(self.peers, Follower):
            replica = self.core.replicas[0]
            adapters = None if self._adapters is None else FollowerAdapters(self._adapters, self.peers)
            follow(self.peers, replica.scheduler, replica.executor, self.devices, adapters)
            raise SystemExit(0)

    # Weights and memory

    @property
    def params(self) -> Params:
        """Weights in use in the first replica, in the layout of its programs."""
        return self.devices.params

    def prepare_weights(self, given: Weights) -> None:
        """Prepare new weights for `replace_weights`; ConfigError if they do not fit the model."""
        self.memory.check_open()
        if self.peers is not None and not isinstance(given, str | os.PathLike):
            raise ConfigError("weights must be a directory that all processes can read, got arrays of one; save them")
        self._given = given, self.devices.prepare(given)

    def replace_weights(self) -> None:
        """Serve with the prepared weights; unfinished requests are ended, for callers to restart them."""
        assert self._given is not None, "weights were prepared"
        (given, new), self._given = self._given, None
        if self.peers is not None and isinstance(given, str | os.PathLike):
            self.peers.tell(event_to_json(WeightsRead(os.fspath(given))))
        try:
            self.devices.replace(new)
        except BaseException as error:
            self.core.abort_all(error)
            raise
        self.core.abort_all()
        for replica in self.core.replicas:
            replica.reset_prefix_cache(with_adapters=True)

    def _new_store(self, config: EngineConfig, arch: ArchConfig) -> AdapterStore | None:
        """Return the store of LoRA adapters, from which all runners load them; None if the engine serves none."""
        layout = adapter_layout(config, arch)
        replicas = self.devices.replicas
        if layout is None or not replicas:
            return None
        core = weakref.ref(self.core)  # which has the store: an abandoned engine is freed without the garbage collector

        def in_use() -> set[str]:
            return set() if (known := core()) is None else set().union(*known.adapters_in_use())

        stages = [(runner.arch, runner.mesh) for runner in replicas[0]]
        max_kept, others = config.max_cpu_loras, None
        if isinstance(self.peers, Leader):
            others = OtherProcesses(self.peers)
        elif self.peers is not None:
            max_kept = None  # the leading process decides
        told = () if others is None else (others.drop, others.evict)
        store = AdapterStore(layout, arch, stages, max_kept, in_use, *told)
        for replica in replicas:
            for index, runner in enumerate(replica):
                runner.adapter_arrays = partial(store.arrays, stage=index)
        self.core.hold_adapter = store.arrays if others is None else partial(others.hold, store)
        self._other_processes = others
        return store

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Read a LoRA adapter for requests; ConfigError if it does not fit the model. Callable from any thread."""
        assert self._adapters is not None, "an engine without adapters is asked for none"
        if self._other_processes is not None:
            return self._other_processes.load(self._adapters, source)
        return self._adapters.load(source)

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the adapters' digests for running requests, and for waiting ones; callable from any thread."""
        return self.core.adapters_in_use()

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's host memory once its requests have ended; callable from any thread."""
        assert self._adapters is not None, "an engine without adapters is asked for none"
        self._adapters.unload(digest)

    def sleep(self, level: int) -> None:
        """Free the device memory until `wake_up`; see `LLM.sleep`."""
        for replica in self.core.replicas:
            replica.drop_in_flight()
            replica.reset_prefix_cache(with_adapters=True)
        self.devices.sleep(keep_weights=level == 1)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate the memory that `sleep` has freed; see `LLM.wake_up`."""
        self.devices.wake_up(tags)

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead). Callable from any thread."""
        self.devices.wait_until_warm()

    def peak_rates(self) -> PeakRates:
        """Return the device's peak rates, from the user's cache or measured now."""
        return self.devices.peak_rates()

    def describe_device(self) -> Device:
        """Return the device that the core runs on."""
        return describe_device()

    def save_pages(self, sequence: CachedSequence) -> int:
        """Write the stored pages durably, and return how many tokens of a sequence have theirs on disk.

        Callable from any thread. No request may use the sequence.
        """
        return max([replica.save_pages(sequence) for replica in self.core.replicas])

    def shared_pages(self) -> str:
        """Return the identity of the pages in the shared store; empty without one. Callable from any thread."""
        return shared_pages(self.core.replicas[0].mover)

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the size of a number of tokens in a replica's pool; callable from any thread."""
        return num_tokens * self.core.replicas[0].executor.costs.kv_token_bytes

    def close_files(self) -> None:
        """Complete and close the event logs and the files of pages."""
        for log in self._logs:
            log.close()
        for replica in self.core.replicas:
            if replica.mover is not None:
                replica.mover.close()
            if replica.publisher is not None:
                replica.publisher.close()
        if self.core.lookups is not None:
            self.core.lookups.close()

    def close(self) -> None:
        """Abort all requests and free all memory; the ends of requests stay in the outbox."""
        self.devices.close()
        with ExitStack() as stack:  # an error leaves nothing unfreed
            stack.callback(self.close_files)
            for replica in self.core.replicas:
                stack.callback(replica.close)
            self.core.abort_all(RuntimeError("the engine was closed"))

    # Observable state, readable from any thread

    @property
    def memory(self) -> MemoryState:
        """State of the devices' memory: awake, asleep or closed."""
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
        """Reason why no request can be served any more; None if there is none."""
        return "the engine has closed itself after a failure" if self.memory.is_closed else None

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot, including untaken events."""
        return self.core.num_waiting + len(self.core.inbox)

    @property
    def occupancy(self) -> Occupancy:
        """Current requests and pages of all replicas."""
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
        """Step statistics of all replicas; see `EngineCore`."""
        return self.core.last_steps

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared."""
        self.core.check_integrity()


def _open_logs(path: str, schedule: ScheduleConfig, movers: Sequence[PageMover | None]) -> list[EventLog]:
    """Open one event log per replica; the file names of replicas after the first end with the replica's index."""
    return [
        EventLog(f"{path}.{index}" if index else path, schedule, [] if mover is None else mover.new_tiers())
        for index, mover in enumerate(movers)
    ]


def _publishers(
    config: EngineConfig, schedule: ScheduleConfig, num_replicas: int, peers: Leader | Follower | None
) -> list[KVPublisher | None]:
    """Return a publisher of prefix cache changes per replica; None without events, or in a following process."""
    events = config.kv_events
    if events is None or not events.is_on or isinstance(peers, Follower):
        return [None] * num_replicas
    groups = schedule.kv_groups
    publishers: list[KVPublisher | None] = []
    with ExitStack() as stack:  # an address in use leaves no other one in use
        for rank in range(num_replicas):
            publisher = KVPublisher(events, groups.page_size, groups.windows, rank)
            stack.callback(publisher.close)
            publishers.append(publisher)
        stack.pop_all()
    return publishers


def _recorder(peers: Leader | Follower | None, logs: Sequence[EventLog]) -> Record | None:
    """Return a function that passes a replica's events to following processes and logs; None without either."""
    sinks: list[Record] = [] if peers is None else [lambda event: peers.tell(event_to_json(event))]
    sinks += [log.record for log in logs]

    def record(event: ReplicaEvent) -> None:
        for sink in sinks:
            sink(event)

    return record if sinks else None
