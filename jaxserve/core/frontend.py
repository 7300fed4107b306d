"""Frontend: turns requests into events for the core, and its deltas into the outputs that users see.

It talks to the core only through queues. `start` and `cancel` may be called from any thread, `deliver` from one thread
at a time. Every change of a request, including its end, passes through `deliver`, so that outputs have a single writer.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.api.metrics import EngineStats
from jaxserve.api.pooling_params import Pooler
from jaxserve.core.deltas import Delta, Ended, PromptChunk, StepDelta
from jaxserve.core.events import Cancelled, Event, Submitted
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.errors import RequestError
from jaxserve.scheduling.request import FinishReason

if TYPE_CHECKING:
    from jaxserve.execution.sampling import TokenLogprobs

logger = logging.getLogger(__name__)

Listener = Callable[[RequestGroup], None]


class Frontend:
    """Users' unfinished requests: sends them to the core, and updates their outputs.

    Args:
        send: sends an event to the core.
        outbox: deltas from the core, or the exception by which it lost all requests.
        stats: totals, updated with output tokens and finished requests.
        pooler: pooler of a pooling model; None if it generates.
        on_end: called with each request that has ended.
        carbon_intensity: grams of CO2 per kWh; None if unknown.
    """

    def __init__(
        self,
        send: Callable[[Event], None],
        outbox: deque[Delta | BaseException],
        stats: EngineStats,
        pooler: Pooler | None,
        on_end: Callable[[RequestGroup], None] = lambda _: None,
        carbon_intensity: int | float | None = None,
    ) -> None:
        self._send, self._outbox, self._stats, self._pooler = send, outbox, stats, pooler
        self._on_end, self._carbon_intensity = on_end, carbon_intensity
        self._groups: dict[str, RequestGroup] = {}
        # Unfinished samples by key: a step in flight may still hold an earlier request with the same id.
        self._samples: dict[int, tuple[RequestGroup, int]] = {}
        self._keys = itertools.count(1)
        self._changed: dict[str, RequestGroup] = {}  # requests whose listeners must still be called
        self.lock = threading.Lock()  # guards all outputs, so that readers on other threads see them between two deltas

    # From users to the core

    def start(self, group: RequestGroup, listener: Listener | None = None) -> None:
        """Send a request to the core.

        Args:
            group: request returned by `RequestReader.read`.
            listener: called by `deliver` after outputs of the request have grown or ended. If it raises, the request is
                cancelled.

        Raises:
            RequestError: the id is in use.
        """
        group.listener = listener
        try:
            self._register(group)
            if self._groups.setdefault(group.request_id, group) is not group:
                raise RequestError(
                    f"request_id must be unique among unfinished requests, got {group.request_id!r} again; "
                    "choose another one, or wait for the end of the other request"
                )
            self._send(Submitted(group.requests))
        except BaseException:  # an interrupt of the caller's thread may come anywhere
            self._detach(group)
            if self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
            raise

    def cancel(self, request_id: str) -> RequestGroup | None:
        """Make the core end a request, and return it; None if no unfinished request has the id.

        Callable from anywhere (even the garbage collector) and repeatedly.
        """
        group = self._groups.get(request_id)
        if group is not None:
            self._send(Cancelled(_keys(group), FinishReason.ABORT))
        return group

    def restart(self) -> None:
        """Begin all unfinished requests again, with empty outputs."""
        for group in list(self._groups.values()):
            self._detach(group)
            with self.lock:
                group.restart()
            self._register(group)
            self._send(Submitted(group.requests))

    def _register(self, group: RequestGroup) -> None:
        """Assign new keys to the samples of a request."""
        for index, request in enumerate(group.requests):
            request.key = next(self._keys)
            self._samples[request.key] = (group, index)

    def _detach(self, group: RequestGroup) -> None:
        """Make the core end the samples of a request without reporting it."""
        keys = _keys(group)
        for key in keys:
            self._samples.pop(key, None)
        self._send(Cancelled(keys, FinishReason.ABORT))

    def has_unfinished(self) -> bool:
        """Return whether a request is unfinished, or has ended but its listener has not been called yet."""
        return bool(self._groups or self._changed)

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose end `deliver` has not applied yet."""
        return len(self._groups)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the unfinished requests are exactly the requests of the unfinished samples."""
        assert {id(group) for group, _ in self._samples.values()} == {id(group) for group in self._groups.values()}

    # From the core to users

    def deliver(self) -> None:
        """Apply all deltas to the outputs, and call the listeners of requests with new tokens or an end."""
        while self._outbox:
            delta = self._outbox.popleft()
            if isinstance(delta, BaseException):
                self.abandon_all(delta)
            else:
                self._take(delta)

    def _take(self, delta: Delta) -> None:
        """Apply a delta to the outputs and call the listeners; end the requests whose outputs cannot be updated."""
        try:
            with self.lock:
                for key, cached_tokens, num_preemptions in delta.admitted:
                    if (sample := self._samples.get(key)) is not None:
                        group, index = sample
                        group.admitted(index, cached_tokens, num_preemptions, delta.at_s)
                if delta.step is not None:
                    self._take_step(delta.step)
                for ended in delta.ended:
                    self._take_end(ended, delta)
        except BaseException as error:  # outputs may be half written
            keys = delta.step.keys if delta.step is not None else [ended.key for ended in delta.ended]
            abandoned = {self._samples[key][0] for key in keys if key in self._samples}
            self.abandon(abandoned, error)
            if not isinstance(error, Exception):
                raise
            logger.exception("requests are ended: their outputs could not be assembled")
        finally:  # callers also wait for requests that ended before the error
            self._notify()

    def abandon(self, groups: Iterable[RequestGroup], error: BaseException) -> None:
        """End requests immediately because of `error`, with their outputs so far, and call their listeners."""
        for group in groups:
            self._detach(group)
            with self.lock:
                group.abandon(error)
            self._changed[group.request_id] = group
            self._groups.pop(group.request_id, None)
        self._notify()

    def abandon_all(self, error: BaseException) -> None:
        """End all unfinished requests immediately because of `error`."""
        self.abandon(list(self._groups.values()), error)

    def _take_step(self, step: StepDelta) -> None:
        """Append a step's tokens to the outputs, end samples at stop strings or as the core did, and count tokens."""
        result, at_s = step.result, step.result.ended_s
        logprobs = result.logprobs
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.prompt_chunks, result.prompt_logprobs)
        width = 0 if logprobs is None else len(logprobs.logprob) // len(result.token_ids)  # tokens per row
        num_output_tokens = num_in_first = 0
        iterations: Counter[int] = Counter()  # number of tokens by round
        samples, changed, ended = self._samples, self._changed, step.ended
        for row, (key, token_ids) in enumerate(zip(step.keys, step.token_ids, strict=True)):
            sample = samples.get(key) if token_ids else None
            if sample is None:  # already ended by a stop string or a cancel unknown to the core
                continue
            group, index = sample
            reason = ended[row].reason if row in ended else None
            changed[group.request_id] = group
            if step.energy_j:
                group.consumed(index, step.energy_j[row], self._carbon_intensity)
            if self._pooler is not None and group.pooling is not None and result.pooled is not None:
                group.pool(index, self._pooler.finish(result.pooled[row], group.pooling), at_s)
                self._finish(group, index, FinishReason.STOP, at_s)
                continue
            if result.rounds is not None:
                group.count_drafts(index, result.rounds.drafted[row].tolist(), result.rounds.accepted[row].tolist())
            num_in_first += group.num_prompt_tokens_computed(index)
            num_kept, stop = group.append(index, token_ids, reason, at_s, logprobs, row * width)
            num_output_tokens += num_kept
            if num_kept == 1:  # nearly always
                num_in_first += 1
            elif result.rounds is None:
                iterations.update(range(num_kept))
            else:
                rounds = np.repeat(np.arange(result.rounds.sampled.shape[1]), result.rounds.sampled[row])
                iterations.update(rounds[:num_kept].tolist())
            if stop is not None:
                if reason is None:  # the core would continue it
                    self._send(Cancelled([key], FinishReason.STOP))
                self._finish(group, index, FinishReason.STOP, at_s, stop)
            elif reason is not None:
                self._finish(group, index, reason, at_s)
        self._stats.num_output_tokens += num_output_tokens
        iterations[0] += num_in_first
        self._stats.add_iterations(iterations.values())

    def _collect_prompt_logprobs(self, chunks: Sequence[PromptChunk], logprobs: TokenLogprobs) -> None:
        """Append the log probabilities of each chunk's next tokens to the outputs.

        Args:
            chunks: prompt tokens in a step.
            logprobs: log probabilities for the step's token axis.
        """
        for key, start, count, first in chunks:
            if (sample := self._samples.get(key)) is not None:
                group, _ = sample
                group.append_prompt_logprobs(start + 1, count, logprobs, first)

    def _take_end(self, ended: Ended, delta: Delta) -> None:
        """End a sample as `ended` reports, with the time and error of the delta that reports it."""
        if (sample := self._samples.get(ended.key)) is None:  # already ended
            return
        group, index = sample
        group.error = group.error or delta.error
        group.preempted(index, ended.num_preemptions)
        self._finish(group, index, ended.reason, delta.at_s)

    def _finish(
        self, group: RequestGroup, index: int, reason: FinishReason, at_s: float, stop: str | None = None
    ) -> None:
        """Complete the output of a sample that has ended, and forget the sample."""
        self._changed[group.request_id] = group
        if group.finish(index, reason, at_s, stop):
            del self._groups[group.request_id]
            self._stats.num_finished += 1
            self._on_end(group)
        # Last of all: `_take` looks here for the requests that an error concerns.
        self._samples.pop(group.requests[index].key, None)

    def _notify(self) -> None:
        """Call the listeners of changed requests."""
        for request_id, group in list(self._changed.items()):
            try:
                if group.listener is not None:
                    group.listener(group)
            except BaseException as error:  # a client's error: other listeners must still be called
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                logger.exception("request %s is cancelled: its listener has failed", request_id)
                group.listener = None
                self.cancel(request_id)
            self._changed.pop(request_id, None)


def _keys(group: RequestGroup) -> list[int]:
    return [request.key for request in group.requests]
