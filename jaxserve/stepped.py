"""What batches and fleets ask of engines: to take requests and to go on by a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxserve.config import EngineConfig, ScheduleConfig
from jaxserve.request import RequestFailure, RequestOutput, SamplingParams, TokenIds

if TYPE_CHECKING:
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
