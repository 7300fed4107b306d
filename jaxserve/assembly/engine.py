"""Engine: frontend, core and devices together, driven by threads (`threads.py`) or by its caller (`driven.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import Occupancy, PeakRates, StepStats
from jaxserve.assembly.device_state import Devices
from jaxserve.assembly.generation_defaults import build_arch, build_sampling_params, output_limits, resolve_quantization
from jaxserve.assembly.host import CoreHost
from jaxserve.assembly.images import build_image_reader
from jaxserve.assembly.parameters import Weights
from jaxserve.core.adapter_names import AdapterNames
from jaxserve.core.core import EngineCore
from jaxserve.core.events import CacheReset
from jaxserve.core.frontend import Frontend
from jaxserve.core.replica import Replica
from jaxserve.core.request_reader import RequestReader
from jaxserve.core.sessions import SavedSession, SessionQuota, Sessions
from jaxserve.core.step_chooser import StepChooser
from jaxserve.errors import ConfigError, RequestError
from jaxserve.execution.batch import MAX_EOS_IDS
from jaxserve.execution.roofline import Device
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.system.collection import collecting_later
from jaxserve.text.loading import load_tokenizer

if TYPE_CHECKING:
    from jaxserve.assembly.client import CoreClient


class Engine:
    """One model, in one or several replicas. Only its frontend is thread-safe; everything else takes one thread at a
    time.

    Args:
        config: model and options.
        executors: devices of the replicas; None for compiled programs according to `config`.
        new_chooser: class of a replica's step chooser.

    Attributes:
        config: engine options.
        arch: sizes of the model.
        adapters: LoRA adapters by name.
        reader: converts user requests into scheduler requests, on any thread.
        frontend: turns requests into events, and deltas into outputs.
        host: core and its devices.
        schedule: resolved sizes of steps and page pool, per replica.
        stats: totals since start, except for steps that ended after the last dispatch.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: sampling parameters recommended by the checkpoint.
        output_limits: output limits on a server.
    """

    @collecting_later()
    def __init__(
        self,
        config: EngineConfig,
        executors: Sequence[Executor] | None = None,
        new_chooser: type[StepChooser] = StepChooser,
    ) -> None:
        self.arch = build_arch(config)
        self.config = config = resolve_quantization(config, self.arch)
        self.tokenizer = (
            None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path, config.chat_options)
        )
        images = build_image_reader(config, self.arch, self.tokenizer)
        self.default_sampling_params = build_sampling_params(config)
        self.output_limits = output_limits(config)
        eos_ids = self.arch.eos_ids | frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ())
        if len(eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"a model may have at most {MAX_EOS_IDS} end-of-sequence ids, got {len(eos_ids)}")
        self.host: CoreHost | CoreClient
        if config.engine_process and (executors is not None or new_chooser is not StepChooser):
            raise ConfigError("engine_process must be False with executors or a chooser, which are of this process")
        if config.engine_process:
            from jaxserve.assembly.client import CoreClient  # noqa: PLC0415 - few engines have another process

            self.host = CoreClient(config, self.arch, eos_ids)
        else:
            self.host = CoreHost(config, self.arch, executors, new_chooser)
        host = self.host
        self.schedule, self.stats = host.schedule, host.stats
        self.adapters = AdapterNames(host.load_adapter, host.unload_adapter, is_enabled=config.enable_lora)
        self.reader = RequestReader(
            config,
            self.schedule,
            self.tokenizer,
            self.arch,
            eos_ids=eos_ids,
            check_fits=host.check_fits,
            is_lock_step=host.peers is not None,
            adapters=self.adapters,
            images=images,
        )
        quota = SessionQuota(config.max_saved_sessions, int(config.saved_sessions_size * 2**30))
        self.sessions = Sessions.at(config.kv_offloading_path, quota, has_prefix_cache=config.enable_prefix_caching)
        self.frontend = Frontend(
            host.send, host.outbox, self.stats, self.arch.pooler, self.sessions.note, config.carbon_intensity
        )

    # Requests

    def advance(self) -> None:
        """Take a step on each replica that can continue, and update outputs."""
        self.host.advance()
        self.settle()

    def settle(self) -> None:
        """Take events and update outputs, without a step; requests ended by stop strings leave the core."""
        self.host.take_events()
        self.frontend.deliver()
        self.host.take_events()

    def reset_prefix_cache(self) -> None:
        """Drop all cached pages: no further request finds them."""
        self.host.memory.check_open()
        self.host.send(CacheReset())
        self.host.take_events()

    def save_session(self, name: str, tenant: str = "", *, saved_as: str | None = None) -> SavedSession:
        """Save the latest turn of a conversation, after its pages; callable from any thread.

        Args:
            name: name of the conversation.
            tenant: its owner.
            saved_as: name to save it under; the conversation's if None.

        Raises:
            RequestError: there is no such conversation, or it cannot be saved.
        """
        saved_as = saved_as or name
        session = self.sessions.latest(name, tenant)
        self.sessions.check_quota(saved_as, tenant)  # before pages are written, and images compressed
        num_stored = self.host.save_pages(session.pages)
        return SavedSession(self.sessions.write(session, saved_as), num_stored)

    # Weights and memory

    def update_weights(self, given: Weights, *, running: str = "finish") -> None:
        """Serve with the `given` weights from now on; see `LLM.update_weights`."""
        if running not in ("finish", "restart"):
            raise ConfigError(f"running must be 'finish' or 'restart', got {running!r}")
        self.host.prepare_weights(given)
        while running == "finish" and self.frontend.has_unfinished():
            self.advance()
        try:
            self.host.replace_weights()
        except BaseException:
            self.settle()
            raise
        self.frontend.restart()

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        self.host.wait_until_warm()

    def close(self) -> None:
        """Abort all requests, stop compiling, and free weights and pools. Nothing can be served any more."""
        self.host.close()
        if self.reader.images is not None:
            self.reader.images.close()
        self.settle()

    def sleep(self, level: int = 1) -> None:
        """Free the device memory until `wake_up`; see `LLM.sleep`."""
        self.host.memory.check_open()
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        if self.host.peers is not None:
            raise ConfigError("an engine of several processes cannot sleep; close it")
        if unfinished := self.frontend.num_unfinished:
            raise RequestError(f"all requests must have ended before sleep, got {unfinished} unfinished")
        self.host.sleep(level)

    # Observable state

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared; for tests and audits."""
        self.host.check_integrity()
        self.frontend.check_integrity()

    def peak_rates(self) -> PeakRates:
        """Return the device's peak rates, by which `stats.split` and `last_step.split` explain wall time.

        The first call measures them, unless the user's cache has them: after all compilation, in under a second.
        """
        return self.host.peak_rates()

    def describe_device(self) -> Device:
        """Return the device that the engine runs on."""
        return self.host.describe_device()

    @property
    def last_steps(self) -> Sequence[StepStats]:
        """Step statistics of all replicas; see `EngineCore`."""
        return self.host.last_steps

    @property
    def occupancy(self) -> Occupancy:
        """Current requests and pages of all replicas."""
        return self.host.occupancy

    # Parts of a core in this process

    @property
    def core(self) -> EngineCore:
        """Core of an engine whose core is in this process."""
        return self._local.core

    @property
    def devices(self) -> Devices:
        """Devices of an engine whose core is in this process."""
        return self._local.devices

    @property
    def _local(self) -> CoreHost:
        """Host of a core in this process."""
        assert isinstance(self.host, CoreHost), "with engine_process, the core is in another process"
        return self.host

    @property
    def replicas(self) -> Sequence[Replica]:
        """Copies of the model."""
        return self.core.replicas

    @property
    def last_step(self) -> StepStats | None:
        """Statistics of the step that ended last, on any replica."""
        return max(self.replicas, key=lambda replica: replica.step_stats.last_end_s).step_stats.last_step
