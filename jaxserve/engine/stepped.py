"""Protocols of engines for their callers: batches, fleets, and benchmarks and monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxserve.config import EngineConfig
from jaxserve.metrics import EngineStats, Occupancy, PeakRates, StepStats
from jaxserve.outputs import RequestFailure, RequestOutput
from jaxserve.pooling import PoolingParams
from jaxserve.request import TokenIds
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from jaxserve.models.arch import ArchConfig
    from jaxserve.text.tokenizer import Tokenizer


@runtime_checkable
class BatchEngine(Protocol):
    """Engine that serves requests step by step, for a single caller.

    Attributes:
        config: options of the engine.
        schedule: resolved sizes of steps and pool.
        default_sampling_params: sampling parameters that the checkpoint recommends.
    """

    config: EngineConfig
    schedule: ScheduleConfig
    default_sampling_params: SamplingParams

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of prompts; None if prompts must be token ids."""

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
    ) -> object:
        """Queue a request."""

    def abort(self, request_id: str) -> object:
        """Abort a request if it is unfinished."""

    def has_unfinished(self) -> bool:
        """Return whether any request has not ended."""

    def step(self) -> Sequence[RequestOutput | RequestFailure]:
        """Run a step and return the requests that progressed or ended."""


@runtime_checkable
class SteppedEngine(BatchEngine, Protocol):
    """Engine that refuses invalid requests in `add_request`, so that `step` returns only outputs."""

    def step(self) -> Sequence[RequestOutput]:
        """Run a step and return the requests that progressed."""


@runtime_checkable
class MeasuredEngine(SteppedEngine, Protocol):
    """Engine that counts its work.

    Attributes:
        stats: totals since start.
    """

    stats: EngineStats

    @property
    def arch(self) -> ArchConfig:
        """Sizes of the model."""

    @property
    def last_steps(self) -> Sequence[StepStats]:
        """Statistics of the steps whose results the last call of `step` read."""

    @property
    def occupancy(self) -> Occupancy:
        """Requests and pages now."""

    def peak_rates(self) -> PeakRates:
        """Return the peak rates of the device."""

    def wait_until_warm(self) -> None:
        """Block until every program is compiled."""

    def reset_prefix_cache(self) -> None:
        """Drop all cached pages."""
