"""The server's engine as `run_batch` takes it: its requests run between those of other clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jaxserve.openai.errors import BadRequestError
from jaxserve.outputs import RequestFailure, RequestOutput
from jaxserve.server.classes import tenant_salt

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.outputs import RequestGroup
    from jaxserve.pooling import PoolingParams
    from jaxserve.request import TokenIds
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.server.streams import Streams
    from jaxserve.text.tokenizer import Tokenizer

LOW_PRIORITY = 2**20
_POLL_S = 0.2


class ServedEngine:
    """Engine of a server for one batch, to be used by one thread; a `BatchEngine`.

    Args:
        engine: engine of the server.
        streams: threads that drive it.
        name: beginning of request ids, unique among batches.
        tenant: tenant that owns the batch.
        check: function that is called often, and raises an exception to end the batch.
        has_own_cache: True to share no prefix cache with other tenants, as requests with keys do.
    """

    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        name: str,
        tenant: str,
        check: Callable[[], None],
        *,
        has_own_cache: bool,
    ) -> None:
        self._has_own_cache = has_own_cache
        self.config, self.schedule = engine.config, engine.schedule
        self.default_sampling_params = engine.default_sampling_params
        self._engine, self._streams, self._name, self._tenant, self._check = engine, streams, name, tenant, check
        self._priority = LOW_PRIORITY if engine.config.scheduling_policy == "priority" else 0
        self._ended: SimpleQueue[RequestGroup] = SimpleQueue()
        self._open: set[str] = set()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of prompts."""
        return self._engine.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request."""
        salt = tenant_salt(self._tenant, cache_salt) if self._has_own_cache else cache_salt
        group = self._engine.reader.read(
            f"{self._name}/{request_id}", prompt, params, salt, self._tenant, self._priority
        )
        self._open.add(request_id)
        self._streams.submit_quietly([group], self._listen)

    def abort(self, request_id: str) -> None:
        """Abort a request if it is unfinished."""
        self._open.discard(request_id)
        self._engine.frontend.cancel(f"{self._name}/{request_id}")

    def has_unfinished(self) -> bool:
        """Return whether any request has not ended."""
        return bool(self._open)

    def step(self) -> Sequence[RequestOutput | RequestFailure]:
        """Wait for the end of a request, for a moment at most; return what has ended."""
        self._check()
        ended: list[RequestOutput | RequestFailure] = []
        try:
            group = self._ended.get(timeout=_POLL_S)
            while True:
                request_id = group.request_id.removeprefix(f"{self._name}/")
                if request_id in self._open:
                    self._open.discard(request_id)
                    ended.append(_result(group, request_id))
                group = self._ended.get_nowait()
        except Empty:
            return ended

    def _listen(self, group: RequestGroup) -> None:
        """Take the news of a request, on the frontend's thread."""
        if group.output.finished or group.error is not None:
            self._ended.put(group)


def _result(group: RequestGroup, request_id: str) -> RequestOutput | RequestFailure:
    if group.error is not None:
        message = f"the step that served this request broke off: {group.error!r}"
        return RequestFailure(request_id, BadRequestError(message, None, "internal_error", 500))
    return dataclasses.replace(group.output, request_id=request_id)
