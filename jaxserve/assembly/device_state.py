"""Devices: all replicas' runners, with their weights and memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import PeakRates
from jaxserve.assembly.parameters import Weights, compute_dtype, copies, prepare_params
from jaxserve.assembly.weights_content import WeightsContent
from jaxserve.core.status import SLEEP_TAGS, MemoryState
from jaxserve.errors import ConfigError
from jaxserve.execution.roofline import device_peak_rates
from jaxserve.execution.runner import Runner
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params


class NewWeights(NamedTuple):
    """Weights that can replace those in use.

    Attributes:
        make: creates weights for the first replica's stages, in its programs' layout.
        content: their content; None if no tier needs it.
    """

    make: Callable[[], list[Params]]
    content: WeightsContent | None


class Devices:
    """All replicas' runners in an engine, which share their weights and sleep together.

    Args:
        config: model and options.
        arch: the model's sizes.
        replicas: runners for each replica's pipeline stages; empty if the engine has another kind of executor.
        content: their weights' content; None if no tier needs it.

    Attributes:
        replicas: runners for each replica's pipeline stages.
        memory: state of their memory.
        content: digest of the weights in use; empty if no tier needs it.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        replicas: Sequence[Sequence[Runner]],
        content: WeightsContent | None = None,
    ) -> None:
        self._config, self._arch, self.replicas = config, arch, replicas
        self._runners = [runner for stages in replicas for runner in stages]
        self.content = b"" if content is None else content.loaded()
        self._peak_rates: PeakRates | None = None
        self.memory = MemoryState()

    @property
    def params(self) -> Params:
        """Weights in use in the first replica's first stage, in its programs' layout."""
        self.memory.check_open()
        return self._runners[0].params

    def prepare(self, given: Weights) -> NewWeights:
        """Return weights for `replace`, created from `given` ones; ConfigError if they do not fit."""
        if "weights" in self.memory.asleep:
            raise ConfigError('the engine must be awake to take weights; call wake_up, or wake_up(tags=["weights"])')
        first = self.replicas[0]
        stages = [runner.arch for runner in first]
        make = prepare_params(self._config, self._arch, given, stages, [runner.param_shapes for runner in first])
        return NewWeights(make, WeightsContent(given) if self.content else None)

    def replace(self, new: NewWeights) -> None:
        """Free the weights in use, create new ones, and copy them to all replicas."""
        self.memory = self.memory._replace(has_weights=False)
        for runner in self._runners:
            runner.params = {}  # memory may not suffice for both
        for params, runners in zip(new.make(), zip(*self.replicas, strict=True), strict=True):
            for runner, copy in zip(runners, copies(params, [runner.mesh for runner in runners]), strict=True):
                runner.params = copy
        self.content = b"" if new.content is None else new.content.loaded()
        self.memory = self.memory._replace(has_weights=True)

    def sleep(self, *, keep_weights: bool) -> None:
        """Free weights and pools; the weights are kept in host memory, or dropped."""
        keep_weights = keep_weights and self.memory.has_weights
        for runner in self._runners:
            runner.sleep(keep_weights=keep_weights)
        self.memory = self.memory._replace(asleep=frozenset(SLEEP_TAGS), has_weights=keep_weights)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory freed by `sleep`; see `LLM.wake_up`."""
        self.memory.check_open()
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if isinstance(tags, str) or not wanted <= set(SLEEP_TAGS):
            raise ConfigError(f"tags must be a list of some of {list(SLEEP_TAGS)}, got {tags!r}")
        for runner in self._runners:
            if "weights" in wanted & self.memory.asleep:
                runner.wake_weights()
            if "kv_cache" in wanted & self.memory.asleep:
                runner.wake_state()
        self.memory = self.memory._replace(asleep=self.memory.asleep - wanted)

    @property
    def is_warm(self) -> bool:
        """True once every program is compiled."""
        return all(runner.programs.is_warm for runner in self._runners)

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        for runner in self._runners:
            runner.programs.wait_until_warm()

    def peak_rates(self) -> PeakRates:
        """Return a device's peak rates; see `Engine.peak_rates`."""
        if self._peak_rates is None:
            self.wait_until_warm()  # concurrent compilation would make the device look slower
            self._peak_rates = device_peak_rates(compute_dtype(self._config, self._arch))
        return self._peak_rates

    def close(self) -> None:
        """Refuse further use; executors free their own memory."""
        self.memory = self.memory._replace(is_closed=True)
