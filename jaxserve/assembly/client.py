"""CoreClient: a core in another process, with the interface of `CoreHost`.

Frontend --> CoreClient --> Link --pipe--> CoreProcess --> CoreHost
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve import weights
from jaxserve.api.metrics import Occupancy, PeakRates, StepStats
from jaxserve.core.link import Link
from jaxserve.core.process_messages import Reply, Start
from jaxserve.core.wait_estimator import prefill_s
from jaxserve.distributed import processes
from jaxserve.errors import ConfigError, EngineDiedError
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.wait_estimate import OutputLengths, Wait

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.assembly.parameters import Weights
    from jaxserve.core.adapter_names import AdapterSource, LoadedAdapter
    from jaxserve.core.status import MemoryState
    from jaxserve.execution.roofline import Device
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params
    from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence

CLOSE_S = 30.0  # time for the core to end its requests before its process is killed
ESTIMATE_S = 0.5  # time limit for a wait estimate, which blocks a server's event loop


class CoreClient:
    """A core in another process, which ends at the latest with this object. See `CoreHost`.

    Args:
        config: model and options.
        arch: sizes of the model.

    Raises:
        ConfigError: the engine cannot start there, or not in a separate process.
        EngineDiedError: the process ended while starting.
    """

    peers = None

    def __init__(self, config: EngineConfig, arch: ArchConfig, eos_ids: frozenset[int]) -> None:
        if sys.platform == "win32":
            raise ConfigError("engine_process must be False on Windows, got True")
        if processes.is_joined():
            raise ConfigError("engine_process must be False in a run of several processes, got True; drop it")
        self.driver = link = Link()
        self._end = weakref.finalize(self, link.end)
        # The model is read here; `hf_overrides` may not be picklable and is not needed there.
        sent = dataclasses.replace(config, engine_process=False, hf_overrides=None)
        level = logging.getLogger("jaxserve").getEffectiveLevel()
        try:
            link.launch(Start(sent, arch, eos_ids, _settings(), level))
        except BaseException:
            self._end()
            raise
        self.stats, self.outbox = link.stats, link.outbox
        self._last_steps: list[StepStats] = []
        self.schedule, self.send = link.started.schedule, link.send
        self.check_fits = Scheduler(self.schedule).check_fits
        self.wait_estimator = ClientWaitEstimator(link, self.schedule.shard_config.max_num_batched_tokens)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the CoreHost in the other process, wait, and return its result or raise its error."""
        return self.driver.call(name, *args)

    # Steps

    def advance(self) -> None:
        """Wait until the core has sent new deltas, or has no work left."""
        self._last_steps = []
        while self.driver.has_work() and not self.outbox:
            self.driver.wait(None)

    def take_events(self) -> None:
        """Make the core take its events now, without a step."""
        if self.problem is None:
            self._call("take_events")

    def follow(self) -> None:
        """Do nothing: this process does not follow another one."""

    # Weights and memory

    @property
    def params(self) -> Params:
        """Raise ConfigError: device arrays stay in their process."""
        raise ConfigError(
            "params are arrays on devices of the engine's own process, which no other can have; give update_weights "
            "other arrays or a directory, or start the engine with engine_process=False"
        )

    def prepare_weights(self, given: Weights) -> None:
        """Prepare new weights for `replace_weights`; ConfigError if they do not fit the model."""
        self.memory.check_open()
        sent = os.fspath(given) if isinstance(given, os.PathLike) else given
        self._call("prepare_weights", _on_host(sent) if isinstance(sent, Mapping) else sent)

    def replace_weights(self) -> None:
        """Serve with the prepared weights."""
        self._call("replace_weights")

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Read a LoRA adapter in the core's process; see `CoreHost.load_adapter`."""
        tensors = None if source.tensors is None else _on_host(source.tensors)
        loaded: LoadedAdapter = self._call("load_adapter", source._replace(tensors=tensors))
        return loaded

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the digests of adapters of running requests, and of waiting ones."""
        in_use: tuple[set[str], set[str]] = self._call("adapters_in_use")
        return in_use

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's memory in the core's process."""
        self._call("unload_adapter", digest)

    def sleep(self, level: int) -> None:
        """Free the device memory until `wake_up`."""
        self._call("sleep", level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate the memory that `sleep` has freed; see `LLM.wake_up`."""
        self.memory.check_open()
        self._call("wake_up", tags)

    def wait_until_warm(self) -> None:
        """Block until every program is compiled."""
        self._call("wait_until_warm")

    def peak_rates(self) -> PeakRates:
        """Return the device's peak rates, measured in the core's process."""
        rates: PeakRates = self._call("peak_rates")
        return rates

    def describe_device(self) -> Device:
        """Return the device that the core runs on."""
        device: Device = self._call("describe_device")
        return device

    def save_pages(self, sequence: CachedSequence) -> int:
        """Write the stored pages durably, and return how many tokens of a sequence have theirs on disk."""
        num_tokens: int = self._call("save_pages", sequence)
        return num_tokens

    def shared_pages(self) -> str:
        """Return the identity of the pages in the shared store; empty without one."""
        pages: str = self._call("shared_pages")
        return pages

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the size of keys and values for this number of tokens in a replica's pool."""
        num_bytes: int = self._call("kv_bytes", num_tokens)
        return num_bytes

    def close(self) -> None:
        """Abort all requests, free all memory and end the process."""
        if not self.driver.status.memory.is_closed:
            with contextlib.suppress(EngineDiedError, Empty):
                self.driver.ask("close").get(timeout=CLOSE_S)  # a stopped process does not answer
        self._end()

    # Observable state

    @property
    def memory(self) -> MemoryState:
        """State of the devices' memory: awake, asleep or closed."""
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
        """Reason why no request can be served any more; None if there is none."""
        if self.driver.status.memory.is_closed:
            return "the engine has closed itself after a failure"
        return None if self.driver.error is None else str(self.driver.error)

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot, including untaken events."""
        return self.occupancy.num_waiting + self.driver.num_untaken

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages of all replicas."""
        return self.driver.status.occupancy

    @property
    def last_steps(self) -> Sequence[StepStats]:
        """Statistics of steps received since the last `advance`."""
        steps = self.driver.steps
        self._last_steps += [steps.popleft() for _ in range(len(steps))]
        return self._last_steps

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared."""
        self._call("check_integrity")


class ClientWaitEstimator:
    """Wait estimates for a core in another process, with the interface of `WaitEstimator`.

    Args:
        link: connection to the process.
        max_step_tokens: maximum prompt tokens per step.

    Attributes:
        lengths: distribution of output lengths.
    """

    def __init__(self, link: Link, max_step_tokens: int) -> None:
        self._link, self._max_step_tokens = link, max_step_tokens
        self._late: SimpleQueue[Reply] | None = None  # queue for the latest estimate, until it has arrived
        self.lengths = OutputLengths()

    def num_waiting_tokens(self) -> int:
        """Return the number of tokens known to be uncomputed in waiting requests, including untaken events."""
        return self._link.status.num_waiting_tokens + self._link.num_untaken_tokens

    def wait(self, num_tokens: int = 1, priority: int | None = None) -> Wait | None:
        """Return the wait of a request with `num_tokens` prompt tokens if it arrived now; None if unknown."""
        if self._late is not None and self._late.empty():  # the process may be stopped, and a server asks often
            return None
        try:
            self._late = reply = self._link.ask("estimate", num_tokens, priority, self.lengths)
            wait: Wait | None = reply.get(timeout=ESTIMATE_S).value
        except (EngineDiedError, Empty):
            return None
        self._late = None
        return wait

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time in seconds that a prompt of `num_tokens` adds to one single-token step of an idle engine."""
        return prefill_s(num_tokens, self._link.status.rates, self._max_step_tokens)


def _settings() -> dict[str, Any]:
    """Return jax's settings in this process, by name, to be applied in the core's process."""
    kinds = bool | int | float | str | None
    return {name: value for name, value in jax.config.values.items() if isinstance(value, kinds)}


def _on_host(given: Mapping[str, Any]) -> Any:
    """Return weights, in a tree or by name, as host arrays; leaves that are no arrays stay as they are."""

    def array(value: Any) -> Any:
        found = weights.from_torch(value)
        return np.asarray(found) if hasattr(found, "dtype") else found

    return jax.tree.map(array, dict(given))
