"""Protocols of engines, by what their callers use: batches and fleets, and those who measure or watch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxserve.config import EngineConfig, ScheduleConfig
from jaxserve.metrics import EngineStats, PeakRates, StepStats
from jaxserve.request import RequestFailure, RequestOutput, SamplingParams, TokenIds

if TYPE_CHECKING:
    from jaxserve.models.arch import ArchConfig
    from jaxserve.tokenizer import Tokenizer


@runtime_checkable
class BatchEngine(Protocol):
    """Serves requests, a step at a time, for a caller that has it for itself.

    Attributes:
        config: what is served and how.
        schedule: resolved sizes of steps and pool.
        default_sampling_params: what the checkpoint recommends.
    """

    config: EngineConfig
    schedule: ScheduleConfig
    default_sampling_params: SamplingParams

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of prompts; None where they must be token ids."""

    def add_request(
        self, request_id: str, prompt: str | TokenIds, params: SamplingParams, *, cache_salt: str | None = None
    ) -> object:
        """Queue a request."""

    def abort(self, request_id: str) -> object:
        """End a request, if it is unfinished."""

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""

    def step(self) -> Sequence[RequestOutput | RequestFailure]:
        """Go on by a step; returns the requests that progressed or ended."""


@runtime_checkable
class SteppedEngine(BatchEngine, Protocol):
    """One that refuses a request at once, and so has outputs alone."""

    def step(self) -> Sequence[RequestOutput]:
        """Go on by a step; returns the requests that progressed."""


@runtime_checkable
class MeasuredEngine(SteppedEngine, Protocol):
    """An engine that counts its work.

    Attributes:
        stats: totals since start.
    """

    stats: EngineStats

    @property
    def arch(self) -> ArchConfig:
        """Sizes of the model."""

    @property
    def last_steps(self) -> Sequence[StepStats]:
        """Statistics of the steps that the last call of `step` has read."""

    @property
    def num_running(self) -> int:
        """Number of requests with pages and a slot."""

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages and slot."""

    @property
    def num_pages_used(self) -> int:
        """Number of pages of running requests."""

    @property
    def num_pages(self) -> int:
        """Number of pages in all pools."""

    def peak_rates(self) -> PeakRates:
        """Return the peak rates of the device."""

    def wait_until_warm(self) -> None:
        """Block until every program is compiled."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
