"""DrivenEngine: an engine driven by its caller's thread, step by step, for benchmarks and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.api.pooling_params import PoolingParams
from jaxserve.assembly.engine import Engine

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.core.prompt import Prompt


class DrivenEngine(Engine):
    """Engine whose requests advance while its only caller calls `step`; neither an `LLM` nor a server may use it.

    An interrupt between two steps loses nothing; after an interrupt within a step the engine is unusable.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._progressed: dict[str, RequestGroup] = {}

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Queue a request; return its output, empty now and filled by `step`.

        Args:
            request_id: unique id among unfinished requests.
            params: sampling parameters, or pooling parameters for a pooling model; by default the engine's.
            options: cache_salt, tenant and priority; see `RequestReader.read`.

        Raises:
            RequestError: the request cannot be served; nothing has changed.
            RuntimeError: the engine is closed.
        """
        self.host.check_serve()
        default = self.default_sampling_params if self.arch.pooler is None else PoolingParams()
        group = self.reader.read(request_id, prompt, params or default, **options)
        self.frontend.start(group, self._note)
        return group.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return its output so far; None if there is no unfinished request with this id."""
        group = self.frontend.cancel(request_id)
        if group is None:
            return None
        self.settle()
        self._progressed.pop(request_id, None)
        return group.output

    def has_unfinished(self) -> bool:
        """Return whether any request needs further steps, or has ended since the last step."""
        return self.frontend.has_unfinished() or bool(self._progressed)

    def step(self) -> list[RequestOutput]:
        """Take a step; return the requests that progressed: cumulative outputs, final if `finished`.

        Raises the error of a failed step, which has ended its requests; the next call returns the other requests, or
        raises another replica's error.
        """
        self.advance()
        error = next((group.error for group in self._progressed.values() if group.error is not None), None)
        if error is not None:
            self._progressed = {name: each for name, each in self._progressed.items() if each.error is not error}
            raise error
        outputs = [group.output for group in self._progressed.values()]
        self._progressed.clear()
        return outputs

    def _note(self, group: RequestGroup) -> None:
        """Add a request to those that have progressed since the last step."""
        self._progressed[group.request_id] = group
