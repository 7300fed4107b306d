"""Engines as batches use them: requests go in, and come back when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestFailure, RequestOutput
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.core.threads import EngineThreads
    from jaxserve.text.tokenizer import Tokenizer

T = TypeVar("T")

WAIT_S = 0.05  # time after which a call of `wait` returns although nothing has ended


@runtime_checkable
class BatchEngine(Protocol):
    """Engine that serves the requests of a single caller.

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
        """Return whether any request has not ended, or was not returned by `wait`."""

    def wait(self) -> Sequence[RequestOutput | RequestFailure]:
        """Wait for the end of a request, for a moment at most; return the requests that have ended."""


class OfflineEngine:
    """Engine of an `LLM` for one batch; an error of a step is raised, and the batch can be resumed.

    Args:
        engine: the engine.
        threads: threads that drive it.
    """

    def __init__(self, engine: Engine, threads: EngineThreads) -> None:
        self.config, self.schedule = engine.config, engine.schedule
        self.default_sampling_params = engine.default_sampling_params
        self.tokenizer = engine.tokenizer
        self._engine, self._threads = engine, threads
        self._ended: SimpleQueue[RequestGroup] = SimpleQueue()
        self._unfinished: dict[str, RequestGroup] = {}

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; RequestError if it cannot be served."""
        group = self._engine.reader.read(request_id, prompt, params, cache_salt)
        self._unfinished[request_id] = group
        try:
            self._threads.submit([group], lambda each: self._ended.put(each) if each.output.finished else None)
        except BaseException:  # an interrupt may come after it was queued
            self.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request if it is unfinished."""
        self._engine.frontend.cancel(request_id)
        self._unfinished.pop(request_id, None)

    def has_unfinished(self) -> bool:
        """Return whether any request has not ended, or was not returned by `wait`."""
        return bool(self._unfinished)

    def wait(self) -> list[RequestOutput]:
        """Wait for the end of a request, for WAIT_S at most; return the outputs of those that have ended.

        Raises:
            PeerLostError: another process of the run is lost.
            RuntimeError: a step has failed.
        """
        served: list[RequestOutput] = []
        groups = taken(self._ended, WAIT_S)
        for index, group in enumerate(groups):
            if self._unfinished.get(group.request_id) is not group:
                continue
            if group.error is not None:
                num_taken = index if served else index + 1  # served outputs are returned first
                for later in groups[num_taken:]:
                    self._ended.put(later)
                if served:
                    break
            del self._unfinished[group.request_id]
            group.check_served()
            served.append(group.output)
        return served


def taken(queue: SimpleQueue[T], timeout_s: float) -> list[T]:
    """Return the items of a queue, after waiting for the first for at most `timeout_s` seconds."""
    found: list[T] = []
    try:
        found.append(queue.get(timeout=timeout_s))
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
