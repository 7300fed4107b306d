"""The server's engine for `run_batch`: batch requests run between other clients' requests."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.outputs import RequestFailure, RequestOutput
from jaxserve.core.batch_engine import drain
from jaxserve.errors import EngineDiedError
from jaxserve.openai.errors import BadRequestError
from jaxserve.server.rate_limits import tokens_to_take, tokens_used
from jaxserve.server.request_classes import tenant_salt

if TYPE_CHECKING:
    from jaxserve.api.pooling_params import PoolingParams
    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.api.token_ids import TokenIds
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.server.service import Service
    from jaxserve.server.streams import Streams
    from jaxserve.text.tokenizer import Tokenizer

LOW_PRIORITY = 2**20
_POLL_S = 0.2


class ServedEngine:
    """A server's engine for one batch, to be used by one thread; a `BatchEngine`.

    Requests beyond the tenant's rate wait, in order.

    Args:
        service: the server's engine and state.
        streams: threads that drive the engine.
        name: unique prefix for request ids.
        tenant: tenant that owns the batch. Its prefix cache and rate are separate if the server has keys; without keys
            all clients share both.
        check: function that is called often, and raises an exception to end the batch.
    """

    def __init__(self, service: Service, streams: Streams, name: str, tenant: str, check: Callable[[], None]) -> None:
        engine, self._has_key, self._limits = service.engine, bool(service.keys), service.admission.limits
        self._limited = tenant if self._has_key else ""
        self.config, self.schedule = engine.config, engine.schedule
        self.default_sampling_params = engine.default_sampling_params
        self._engine, self._streams, self._name, self._tenant, self._check = engine, streams, name, tenant, check
        self._priority = LOW_PRIORITY if engine.config.scheduling_policy == "priority" else 0
        self._ended: SimpleQueue[RequestGroup] = SimpleQueue()
        self._waiting: deque[str] = deque()  # ids of requests beyond the rate
        self._groups: dict[str, RequestGroup] = {}  # unfinished requests by id

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of prompts."""
        return self._engine.tokenizer

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of prefix cache and named images, which hides the tenant's prompts from others."""
        return tenant_salt(self._tenant, cache_salt) if self._has_key else cache_salt

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request of the batch.

        Raises:
            RequestError: the engine cannot serve it, or it needs more tokens than the tenant's rate ever allows.
        """
        whose, lora_request = (self._tenant, self._priority), None if adapter is None else LoRARequest(adapter)
        group = self._engine.reader.read(
            f"{self._name}/{request_id}", prompt, params, self.salt(cache_salt), *whose, lora_request=lora_request
        )
        excess = self._limits.excess(self._limited, tokens_to_take(group.requests), time.monotonic())
        if excess is not None and excess.wait_s == math.inf:
            raise BadRequestError(excess.message, None, "rate_limit_exceeded", 429)
        self._groups[request_id] = group
        self._waiting.append(request_id)
        self._start()

    def abort(self, request_id: str) -> None:
        """Abort a request if it is unfinished."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            del self._groups[request_id]
        elif request_id in self._groups:
            self._settle(self._groups.pop(request_id))
        self._engine.frontend.cancel(f"{self._name}/{request_id}")

    def has_unfinished(self) -> bool:
        """Return whether any request has not ended."""
        return bool(self._groups)

    def wait(self) -> Sequence[RequestOutput | RequestFailure]:
        """Return the requests that have ended, after a short wait for one."""
        self._check()
        self._start()
        ended: list[RequestOutput | RequestFailure] = []
        for group in drain(self._ended, _POLL_S):
            request_id = group.request_id.removeprefix(f"{self._name}/")
            if self._groups.pop(request_id, None) is not None:
                self._settle(group)
                ended.append(_result(group, request_id))
        return ended

    def _start(self) -> None:
        """Submit waiting requests to the engine, as far as the tenant's rate allows."""
        while self._waiting:
            group = self._groups[self._waiting[0]]
            if self._limits.take(self._limited, tokens_to_take(group.requests), time.monotonic()) is not None:
                return
            self._waiting.popleft()
            self._streams.submit_quietly([group], self._listen)

    def _settle(self, group: RequestGroup) -> None:
        """Give the tokens that an ended request has taken and not used back to the tenant's rate limit."""
        taken, used = tokens_to_take(group.requests), tokens_used([group])
        self._limits.settle(self._limited, taken, used, time.monotonic())

    def _listen(self, group: RequestGroup) -> None:
        """Queue a request that has ended for `wait`; called on the frontend's thread."""
        if group.output.finished or group.error is not None:
            self._ended.put(group)


def _result(group: RequestGroup, request_id: str) -> RequestOutput | RequestFailure:
    """Return an ended request's output or failure, under its id in the batch."""
    if isinstance(group.error, EngineDiedError):
        return RequestFailure(request_id, group.error)
    if group.error is not None:
        message = f"the step that served this request broke off: {group.error!r}"
        return RequestFailure(request_id, BadRequestError(message, None, "internal_error", 500))
    return dataclasses.replace(group.output, request_id=request_id)
