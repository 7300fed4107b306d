"""Engine: frontend, core and devices put together. Threads drive it (`threads.py`), or its caller (`driven.py`)."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from jaxserve.config import EngineConfig
from jaxserve.distributed import processes
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.engine.build import build_runners, check_sizes, naming_exhaustion
from jaxserve.engine.checkpoint import build_arch, build_sampling_params, output_limits, resolve_quantization
from jaxserve.engine.core import EngineCore
from jaxserve.engine.devices import Devices
from jaxserve.engine.event_log import EventLog, event_to_json
from jaxserve.engine.events import CacheReset, Record, ReplicaEvent, WeightsRead
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.lock_step import fail_others, require_same_options
from jaxserve.engine.memory import claim_memory
from jaxserve.engine.parameters import Weights
from jaxserve.engine.replica import Replica
from jaxserve.engine.request_reader import RequestReader
from jaxserve.engine.step_chooser import NewChooser, StepChooser
from jaxserve.errors import ConfigError, RequestError
from jaxserve.execution.batch import MAX_EOS_IDS
from jaxserve.execution.executor import Executor
from jaxserve.execution.runner import Runner
from jaxserve.metrics import EngineStats, Occupancy, PeakRates, StepStats
from jaxserve.schedule_config import ScheduleConfig
from jaxserve.text.loading import load_tokenizer

POLL_S = 5e-5  # time between two looks at the devices of several replicas


class Engine:
    """One model, in one or several replicas. Only its frontend is thread-safe: one thread at a time does all else.

    Args:
        config: model and options.
        executors: devices of the replicas; None for compiled programs, as `config` says.
        new_chooser: makes the chooser of a replica's steps.

    Attributes:
        config: configuration of the engine.
        arch: sizes of the model.
        reader: way from what users ask for to requests, for any thread.
        frontend: way from requests to events, and from deltas to outputs.
        core: the replicas and their inputs.
        devices: weights and memory of all replicas.
        peers: the other processes of the run; None if there are none.
        schedule: resolved sizes of steps and pool, of each replica.
        stats: totals since start, of all steps but those that may have ended since the last dispatch.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: parameters that the checkpoint recommends.
        output_limits: limits of outputs on a server.
    """

    def __init__(
        self,
        config: EngineConfig,
        executors: Sequence[Executor] | None = None,
        new_chooser: NewChooser = StepChooser,
    ) -> None:
        self.arch = build_arch(config)
        self.config = config = resolve_quantization(config, self.arch)
        self.tokenizer = (
            None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path, config.chat_options)
        )
        self.default_sampling_params = build_sampling_params(config)
        self.output_limits = output_limits(config)
        claim_memory(config)
        check_sizes(config, self.arch)
        eos_ids = self.arch.eos_ids | frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ())
        if len(eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"a model may have at most {MAX_EOS_IDS} end-of-sequence ids, got {len(eos_ids)}")
        self.stats = EngineStats()
        self.peers = processes.own_role() if executors is None else None
        if self.peers is not None:
            self.peers.require_free()
            require_same_options(config, self.peers)
            self.peers.claim()
        if executors is None:
            with naming_exhaustion(config):
                executors = build_runners(config, self.arch, self.peers)
        self.devices = Devices(config, self.arch, [e for e in executors if isinstance(e, Runner)])
        self.schedule = executors[0].schedule
        self._logs = [] if config.event_log is None else _open_logs(config.event_log, self.schedule, len(executors))
        records = [_recorder(self.peers, self._logs[i : i + 1]) for i in range(len(executors))]
        replicas = [
            Replica(config, self.arch, each, self.stats, record, new_chooser)
            for each, record in zip(executors, records, strict=True)
        ]
        self.core = EngineCore(replicas, step_ahead=config.step_ahead, on_failure=partial(fail_others, self.peers))
        self.reader = RequestReader(
            config,
            self.schedule,
            self.tokenizer,
            vocab_size=self.arch.vocab_size,
            max_position=self.arch.max_position,
            hidden_size=self.arch.hidden_size,
            eos_ids=eos_ids,
            check_fits=replicas[0].scheduler.check_fits,
            pooler=self.arch.pooler,
            is_lock_step=self.peers is not None,
        )
        self.frontend = Frontend(self.core.inbox, self.core.outbox, self.stats, self.arch.pooler)

    # Requests

    def advance(self) -> None:
        """Take a step, of the first replica that can go on, and bring outputs up to date."""
        while not self.core.step(time.monotonic()) and self.core.has_work():
            time.sleep(POLL_S)
        self.settle()

    def settle(self) -> None:
        """Take events and bring outputs up to date, without a step; requests that stop strings end leave the core."""
        self.core.take_events()
        self.frontend.deliver()
        self.core.take_events()

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self.devices.check_open()
        self.core.inbox.append(CacheReset())
        self.core.take_events()

    # Weights and memory

    def update_weights(self, given: Weights, *, running: str = "finish") -> None:
        """Serve with other weights from now on; see `LLM.update_weights`."""
        self.devices.check_open()
        if running not in ("finish", "restart"):
            raise ConfigError(f"running must be 'finish' or 'restart', got {running!r}")
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if self.peers is not None and path is None:
            raise ConfigError("weights must be a directory that all processes can read, got arrays of one; save them")
        make = self.devices.prepare(given)
        while running == "finish" and self.frontend.has_unfinished():
            self.advance()
        self.frontend.restart()
        self.core.take_events()
        if self.peers is not None and path is not None:
            self.peers.tell(event_to_json(WeightsRead(path)))
        try:
            self.devices.replace(make)
        except BaseException as error:
            self.core.abort_all(error)
            self.settle()
            raise
        for replica in self.replicas:
            replica.reset_prefix_cache()

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        self.devices.wait_until_warm()

    def close(self) -> None:
        """Abort all requests, stop compiling, and free weights and pools. Nothing can be served any more."""
        self.free()
        self.settle()

    def free(self) -> None:
        """Abort all requests and free everything, as `close` does; their ends stay in the outbox."""
        self.devices.close()
        with ExitStack() as stack:  # an error leaves nothing unfreed
            for log in self._logs:
                stack.callback(log.close)
            for replica in self.replicas:
                stack.callback(replica.close)
            self.core.abort_all(RuntimeError("the engine was closed"))

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLM.sleep`."""
        self.devices.check_open()
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        if self.peers is not None:
            raise ConfigError("an engine of several processes cannot sleep; close it")
        if unfinished := self.frontend.num_unfinished:
            raise RequestError(f"all requests must have ended before sleep, got {unfinished} unfinished")
        for replica in self.replicas:
            replica.drop_in_flight()
            replica.reset_prefix_cache()
        self.devices.sleep(keep_weights=level == 1)

    # What there is to see

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared; for tests and audits."""
        self.core.check_integrity()
        self.frontend.check_integrity()

    @property
    def replicas(self) -> Sequence[Replica]:
        """The copies of the model."""
        return self.core.replicas

    def peak_rates(self) -> PeakRates:
        """Return the peak rates of the device, by which `stats.split` and `last_step.split` account for wall time.

        They are measured by the first call, unless the user's cache has them: after all compiling, in under a second.
        """
        return self.devices.peak_rates()

    @property
    def last_steps(self) -> list[StepStats]:
        """Statistics of steps, of any replica; see `EngineCore`."""
        return self.core.last_steps

    @property
    def last_step(self) -> StepStats | None:
        """Statistics of the step that ended last, of any replica."""
        return max(self.replicas, key=lambda replica: replica.step_stats.last_end_s).step_stats.last_step

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages of all replicas now."""
        schedulers = [replica.scheduler for replica in self.replicas]
        return Occupancy(
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=self.core.num_waiting,
            num_pages_used=sum(scheduler.num_pages_used for scheduler in schedulers),
            num_pages=sum(scheduler.num_pages for scheduler in schedulers),
            num_deferred=sum(scheduler.num_deferred for scheduler in schedulers),
        )


def _open_logs(path: str, schedule: ScheduleConfig, num_replicas: int) -> list[EventLog]:
    """Return the event log of each replica; all but the first have their number behind the name."""
    return [EventLog(f"{path}.{index}" if index else path, schedule) for index in range(num_replicas)]


def _recorder(peers: Leader | Follower | None, logs: Sequence[EventLog]) -> Record | None:
    """Return a function to call with the events of a replica; None where nobody wants them."""
    sinks: list[Record] = [] if peers is None else [lambda event: peers.tell(event_to_json(event))]
    sinks += [log.record for log in logs]

    def record(event: ReplicaEvent) -> None:
        for sink in sinks:
            sink(event)

    return record if sinks else None
