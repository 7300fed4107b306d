"""Engines as used by batches: requests go in, and come back after they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import LoRARequest
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

WAIT_S = 0.05  # time after which `wait` returns even if no request has ended


@runtime_checkable
class BatchEngine(Protocol):
    """Engine that serves a single caller.

    Attributes:
        config: engine options.
        schedule: resolved sizes of steps and page pool.
        default_sampling_params: sampling parameters recommended by the checkpoint.
    """

    config: EngineConfig
    schedule: ScheduleConfig
    default_sampling_params: SamplingParams

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer for prompts; None if prompts must be token ids."""

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> object:
        """Queue a request; its `request_id` must be unique among unfinished ones.

        Args:
            request_id: name of the request.
            prompt: prompt as text or token ids.
            params: its parameters.
            cache_salt: see `RequestReader.read`.
            adapter: name of a LoRA adapter, given only if it is in the engine's attribute `adapters`.
        """

    def abort(self, request_id: str) -> object:
        """Abort a request if it is unfinished."""

    def has_unfinished(self) -> bool:
        """Return whether any request is unfinished, or has not been returned by `wait`."""

    def wait(self) -> Sequence[RequestOutput | RequestFailure]:
        """Wait briefly for a request to end; return the ended requests."""


class OfflineEngine:
    """Engine of an `LLM` for one batch; errors of steps are raised, and the batch can be resumed.

    Args:
        threads: threads that drive the engine.
    """

    def __init__(self, engine: Engine, threads: EngineThreads) -> None:
        self.config, self.schedule = engine.config, engine.schedule
        self.default_sampling_params = engine.default_sampling_params
        self.tokenizer, self.adapters, self.images = engine.tokenizer, engine.adapters, engine.reader.images
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
        adapter: str | None = None,
    ) -> None:
        """Queue a request; RequestError if it cannot be served."""
        lora_request = None if adapter is None else LoRARequest(adapter)
        group = self._engine.reader.read(request_id, prompt, params, cache_salt, lora_request=lora_request)
        self._unfinished[request_id] = group
        try:
            self._threads.submit([group], lambda each: self._ended.put(each) if each.output.finished else None)
        except BaseException:  # an interrupt may come after queueing
            self.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request if it is unfinished; `wait` will not return it."""
        self._engine.frontend.cancel(request_id)
        self._unfinished.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def wait(self) -> list[RequestOutput]:
        """Wait for a request to end, for at most WAIT_S; return the outputs of ended requests.

        Raises:
            PeerLostError: another process of the run was lost.
            RuntimeError: a step failed.
        """
        served: list[RequestOutput] = []
        groups = drain(self._ended, WAIT_S)
        for index, group in enumerate(groups):
            if self._unfinished.get(group.request_id) is not group:
                continue
            if group.error is not None:
                num_taken = index if served else index + 1  # return served outputs first
                for later in groups[num_taken:]:
                    self._ended.put(later)
                if served:
                    break
            del self._unfinished[group.request_id]
            group.check_served()
            served.append(group.output)
        return served


def drain(queue: SimpleQueue[T], timeout_s: float) -> list[T]:
    """Return the items of a queue, after waiting at most `timeout_s` seconds for the first."""
    found: list[T] = []
    try:
        found.append(queue.get(timeout=timeout_s))
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
