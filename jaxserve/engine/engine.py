"""Engine: frontend, core and devices put together, driven by hand: submit, step, abort."""

import dataclasses
import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version

from jaxserve import distributed
from jaxserve.config import EngineConfig
from jaxserve.engine.batch import MAX_EOS_IDS
from jaxserve.engine.build import (
    Weights,
    build_arch,
    build_runners,
    build_sampling_params,
    check_sizes,
    claim_memory,
    compute_dtype,
    copies,
    prepare_params,
)
from jaxserve.engine.core import EngineCore
from jaxserve.engine.event_log import EventLog
from jaxserve.engine.events import CacheReset, Record, ReplicaEvent, WeightsRead, replay
from jaxserve.engine.executor import Executor
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.plan import StepPlan
from jaxserve.engine.programs import source_digest
from jaxserve.engine.prompt import Prompt
from jaxserve.engine.replica import Replica
from jaxserve.engine.roofline import device_peak_rates
from jaxserve.engine.runner import Runner
from jaxserve.errors import ConfigError, RequestError
from jaxserve.metrics import EngineStats, PeakRates, StepStats
from jaxserve.models.params import Params
from jaxserve.peers import Follower, Leader
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.tokenizer import load_tokenizer

SLEEP_TAGS = ("weights", "kv_cache")  # parts that can be woken separately, by vLLM's names
_OWN = {"model", "tokenizer", "compilation_cache_dir", "event_log"}  # options that each process may have of its own


class Engine:
    """One model, in one or several replicas. Not thread-safe but for its frontend: one thread steps and aborts.

    Args:
        config: model and options.
        executor: the device of the only replica; compiled programs as `config` says unless given.

    Attributes:
        config: configuration of the engine.
        arch: sizes of the model.
        frontend: way from prompts to requests, and from deltas to outputs.
        core: the replicas and what comes to them.
        schedule: resolved sizes of steps and pool, of each replica.
        stats: totals since start, of all steps but those that may have ended since the last dispatch.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: parameters that the checkpoint recommends.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.config = config
        self.arch = build_arch(config)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path)
        self.default_sampling_params = build_sampling_params(config)
        claim_memory(config)
        check_sizes(config, self.arch)
        eos_ids = self.arch.eos_ids | frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ())
        if len(eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"a model may have at most {MAX_EOS_IDS} end-of-sequence ids, got {len(eos_ids)}")
        self.stats = EngineStats()
        self._peers = distributed.peers() if executor is None else None
        if self._peers is not None:
            self._peers.claim()
            self._require_same_options(self._peers)
        executors: Sequence[Executor] = [executor] if executor else build_runners(config, self.arch, self._peers)
        self._runners = [executor for executor in executors if isinstance(executor, Runner)]
        self.schedule = executors[0].schedule
        self._logs: list[EventLog] = []
        replicas = [Replica(config, self.arch, e, self.stats, self._recorder(i)) for i, e in enumerate(executors)]
        self.core = EngineCore(replicas, step_ahead=config.step_ahead, on_failure=partial(_tell_others, self._peers))
        self.frontend = Frontend(
            config,
            self.schedule,
            self.tokenizer,
            vocab_size=self.arch.vocab_size,
            max_position=self.arch.max_position,
            eos_ids=eos_ids,
            inbox=self.core.inbox,
            outbox=self.core.outbox,
            check_fits=replicas[0].scheduler.check_fits,
            stats=self.stats,
        )
        self._progressed: dict[str, RequestGroup] = {}  # requests that were added by hand
        self._until_idle: Callable[[], Callable[[], None] | None] = lambda: None
        self._peak_rates: PeakRates | None = None
        self._is_closed = False
        self._asleep: set[str] = set()  # subset of SLEEP_TAGS
        self._has_weights = True

    def _recorder(self, index: int) -> Record | None:
        """Return what is to be called with the events of a replica; None where nobody wants them."""
        sinks: list[Record] = [] if self._peers is None else [self._peers.tell]
        if self.config.event_log is not None:
            path = f"{self.config.event_log}.{index}" if index else self.config.event_log
            self._logs.append(EventLog(path, self.schedule))
            sinks.append(self._logs[-1].record)

        def record(event: ReplicaEvent) -> None:
            for sink in sinks:
                sink(event)

        return record if sinks else None

    def _require_same_options(self, peers: Leader | Follower) -> None:
        """ConfigError, in all processes, unless they have the same options and versions."""
        own = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config) if f.name not in _OWN}
        own["versions of jaxserve and jax"] = version("jaxserve"), version("jax")
        own["files of jaxserve"] = source_digest("py", "json")
        first, *others = peers.exchange(own)
        for index, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise ConfigError(
                        f"all processes must have the same {name}, got {value!r} in process 0 and {other[name]!r} in "
                        f"another ({index} of those that came)"
                    )

    # Requests

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> RequestOutput:
        """Queue a request; returns its output, empty now and filled by `step`.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or {"prompt": ...} or {"prompt_token_ids": [...]}, with "cache_salt" if wanted.
            params: sampling parameters; default `default_sampling_params`.
            cache_salt: only requests with the same salt share cached pages.

        Raises:
            RequestError: the request cannot be served; nothing has changed.
            RuntimeError: the engine is closed, or calls of an `LLM` do not leave it alone.
        """
        if (until_idle := self._until_idle()) is not None:
            until_idle()
        self.check_serves()
        group = self.frontend.prepare(request_id, prompt, params or self.default_sampling_params, cache_salt)
        self.frontend.start(group, self._note_progress)
        return group.output

    def driven_by(self, until_idle: Callable[[], None]) -> None:
        """Have whoever adds a request by hand wait for this method, which waits until no thread steps the engine."""
        self._until_idle = weakref.WeakMethod(until_idle)  # weak, as the method's object has the engine

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what there is of it, None if it is not unfinished."""
        group = self.frontend.cancel(request_id)
        if group is None:
            return None
        self.settle()
        self._progressed.pop(request_id, None)
        return group.output

    def has_unfinished(self) -> bool:
        """Return whether any request needs further steps."""
        return self.frontend.has_unfinished() or bool(self._progressed)

    def step(self) -> list[RequestOutput]:
        """Plan and dispatch one step, and collect the one before it (or this one, without `step_ahead`).

        With several replicas, of each that need not wait for its devices. Returns the requests that progressed:
        cumulative outputs, final where `finished`. Raises what broke a step off, whose requests it has ended; the next
        call returns the others.
        """
        try:
            try:
                self.core.step(time.monotonic())
            finally:  # an interrupted step, too, has ended its requests
                self._deliver()
            for group in self._progressed.values():
                if group.error is not None:
                    raise group.error
        except BaseException as error:
            self._progressed = {name: g for name, g in self._progressed.items() if g.error is not error}
            raise
        outputs = [group.output for group in self._progressed.values()]
        self._progressed.clear()
        return outputs

    def settle(self) -> None:
        """Do what was asked of the engine, without a step."""
        self.core.take_events()
        self._deliver()

    def _deliver(self) -> None:
        """Bring outputs up to date, and let the core know of those that stop strings have ended."""
        self.frontend.deliver()
        self.core.take_events()

    def _note_progress(self, group: RequestGroup) -> None:
        self._progressed[group.request_id] = group

    def check_serves(self) -> None:
        """Raise RequestError, or RuntimeError of a closed engine, where no request can be served now."""
        self._check_open()
        if self._asleep:
            raise RequestError("the engine must be awake to serve requests; call wake_up first")
        if not self._has_weights:
            raise RequestError(
                "the engine has no weights: the last could not be read, or sleep(level=2) let them go; update_weights"
            )

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self._check_open()
        self.core.inbox.append(CacheReset())
        self.core.take_events()

    # Weights and memory

    @property
    def params(self) -> Params:
        """The weights in use, of the first replica, in the form that its programs take."""
        self._check_open()
        return self._runners[0].params

    def update_weights(self, given: Weights, *, running: str = "finish") -> list[RequestOutput]:
        """Serve with other weights from now on; see `LLM.update_weights`. Returns the requests that progressed."""
        self._check_open()
        if "weights" in self._asleep:
            raise ConfigError('the engine must be awake to take weights; call wake_up, or wake_up(tags=["weights"])')
        if running not in ("finish", "restart"):
            raise ConfigError(f"running must be 'finish' or 'restart', got {running!r}")
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if self._peers is not None and path is None:
            raise ConfigError("weights must be a directory that all processes can read, got arrays of one; save them")
        make = prepare_params(self.config, self.arch, given, self._runners[0].param_shapes)
        progressed: dict[str, RequestOutput] = {}
        while running == "finish" and self.has_unfinished():
            progressed |= {output.request_id: output for output in self.step()}
        self.frontend.restart()
        self.core.take_events()
        if self._peers is not None and path is not None:
            self._peers.tell(WeightsRead(path))
        self._replace_weights(make)
        for replica in self.replicas:
            replica.reset_prefix_cache()
        return list(progressed.values())

    def _read_weights(self, path: str) -> None:
        self._replace_weights(prepare_params(self.config, self.arch, path, self._runners[0].param_shapes))

    def _replace_weights(self, make: Callable[[], Params]) -> None:
        self._has_weights = False
        try:
            for runner in self._runners:
                runner.params = {}  # there may not be room for both
            replicas = copies(make(), [runner.mesh for runner in self._runners])
        except BaseException as error:
            self.core.abort_all(error)
            self._deliver()
            self._progressed.clear()
            raise
        for runner, params in zip(self._runners, replicas, strict=True):
            runner.params = params
        self._has_weights = True

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        for runner in self._runners:
            runner.programs.wait_until_warm()

    def close(self) -> None:
        """Abort all requests, stop compiling, and free weights and pools. Nothing can be served any more."""
        self._is_closed = True
        with ExitStack() as stack:  # an error leaves nothing unfreed
            for log in self._logs:
                stack.callback(log.close)
            for replica in self.replicas:
                stack.callback(replica.close)
            self.core.abort_all(RuntimeError("the engine was closed"))
            self._deliver()

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLM.sleep`."""
        self._check_open()
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        if self._peers is not None:
            raise ConfigError("an engine of several processes cannot sleep; close it")
        if unfinished := self.frontend.num_unfinished:
            raise RequestError(f"all requests must have ended before sleep, got {unfinished} unfinished")
        for replica in self.replicas:
            replica.drop_in_flight()
            replica.reset_prefix_cache()
        for runner in self._runners:
            runner.sleep(keep_weights=level == 1 and self._has_weights)
        self._has_weights = self._has_weights and level == 1
        self._asleep = set(SLEEP_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the devices' memory again; see `LLM.wake_up`."""
        self._check_open()
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if isinstance(tags, str) or not wanted <= set(SLEEP_TAGS):
            raise ConfigError(f"tags must be a list of some of {list(SLEEP_TAGS)}, got {tags!r}")
        for runner in self._runners:
            if "weights" in wanted & self._asleep:
                runner.wake_weights()
            if "kv_cache" in wanted & self._asleep:
                runner.wake_state()
        self._asleep -= wanted

    @property
    def is_sleeping(self) -> bool:
        """Return True while memory that `sleep` has freed is not all taken again."""
        self._check_open()
        return bool(self._asleep)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed: its weights and pools are freed; start another one")

    # Several processes

    @property
    def is_follower(self) -> bool:
        """True if another process leads: this one then only has to `follow`."""
        return isinstance(self._peers, Follower)

    def follow(self) -> None:
        """Do what the leading process does, until that ends. Ends the process where that cannot go on."""
        assert isinstance(self._peers, Follower), "the first process leads"
        runner = self._runners[0]

        def launch(plan: StepPlan, bucket: int) -> None:
            runner.wait_for(bucket, multi_step=plan.num_steps > 1)
            runner.launch(plan, bucket)

        try:
            replay(self._peers.events(), self.replicas[0].scheduler, launch, self._read_weights)
        except Exception as error:
            traceback.print_exc()
            self._peers.fail(repr(error))

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
        if self._peak_rates is None:
            self.wait_until_warm()  # compiling beside it would make the device look slower
            self._peak_rates = device_peak_rates(compute_dtype(self.config, self.arch))
        return self._peak_rates

    @property
    def last_steps(self) -> list[StepStats]:
        """Statistics of steps, of any replica, that the last call of `step` has written."""
        return self.core.last_steps

    @property
    def last_step(self) -> StepStats | None:
        """Statistics of the step that ended last, of any replica."""
        return max(self.replicas, key=lambda replica: replica.step_stats.last_end_s).step_stats.last_step

    @property
    def num_running(self) -> int:
        """Requests that have pages and a slot."""
        return sum(replica.scheduler.num_running for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Requests that have no pages and no slot, new or preempted."""
        return self.core.num_waiting

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests hold."""
        return sum(replica.scheduler.num_pages_used for replica in self.replicas)

    @property
    def num_pages(self) -> int:
        """Pages in the pools of all replicas."""
        return sum(replica.scheduler.num_pages for replica in self.replicas)


def _tell_others(peers: Leader | Follower | None, error: BaseException) -> None:
    """The other processes have done what this one broke off, and cannot go on; PeerLostError if one is lost."""
    if isinstance(peers, Leader):
        peers.fail(repr(error))
