"""Frontend: from requests to events, and from deltas to what users see. It talks to the core through queues alone.

`start` and `cancel` may be called from any thread, `deliver` from one at a time. Whatever becomes of a request, its end
too, comes through there, so that outputs have one writer.
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
from jaxserve.core.deltas import (
    Delta,
    Ended,
    PromptShare,
    StepDelta,
)
from jaxserve.core.events import Cancelled, Event, Submitted
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.errors import RequestError
from jaxserve.scheduling.request import FinishReason

if TYPE_CHECKING:
    from jaxserve.execution.sampling import TokenLogprobs

logger = logging.getLogger(__name__)

Listener = Callable[[RequestGroup], None]


class Frontend:
    """Requests of users, as far as they are unfinished.

    Args:
        send: leaves an event for the core.
        outbox: deltas from the core, or the exception that has lost it all requests.
        stats: totals, to which output tokens and finished requests are added.
        pooler: pooling of a model that pools; None if it generates.
    """

    def __init__(
        self,
        send: Callable[[Event], None],
        outbox: deque[Delta | BaseException],
        stats: EngineStats,
        pooler: Pooler | None = None,
    ) -> None:
        self._send, self._outbox, self._stats, self._pooler = send, outbox, stats, pooler
        self._groups: dict[str, RequestGroup] = {}
        # Each unfinished sample by its key: a step in flight may still hold an earlier request of the same id.
        self._samples: dict[int, tuple[RequestGroup, int]] = {}
        self._keys = itertools.count(1)
        self._untold: dict[str, RequestGroup] = {}  # requests with news, whose listeners are not through
        self.lock = threading.Lock()  # guards all outputs: a reader on another thread finds them between two deltas

    # From users to the core

    def start(self, group: RequestGroup, listener: Listener | None = None) -> None:
        """Queue a request.

        Args:
            group: request from `RequestReader.read`.
            listener: function that `deliver` calls when outputs of the request have grown or ended. If it raises, the
                request is cancelled.

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
            self._let_go(group)
            if self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
            raise

    def cancel(self, request_id: str) -> RequestGroup | None:
        """End a request if it is unfinished; from anywhere, the garbage collector included, any number of times."""
        group = self._groups.get(request_id)
        if group is not None:
            self._send(Cancelled(_keys(group), FinishReason.ABORT))
        return group

    def restart(self) -> None:
        """Begin all unfinished requests again."""
        for group in list(self._groups.values()):
            self._let_go(group)
            with self.lock:
                group.restart()
            self._register(group)
            self._send(Submitted(group.requests))

    def _register(self, group: RequestGroup) -> None:
        """Give the samples of a request keys that none had before."""
        for index, request in enumerate(group.requests):
            request.key = next(self._keys)
            self._samples[request.key] = (group, index)

    def _let_go(self, group: RequestGroup) -> None:
        """Have the core end the samples of a request, and nobody hear of it."""
        keys = _keys(group)
        for key in keys:
            self._samples.pop(key, None)
        self._send(Cancelled(keys, FinishReason.ABORT))

    def has_unfinished(self) -> bool:
        """Return whether there is a request whose end its listener has not heard of."""
        return bool(self._groups or self._untold)

    @property
    def num_unfinished(self) -> int:
        """Requests whose end has not been taken."""
        return len(self._groups)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each unfinished sample is of an unfinished request."""
        assert {id(group) for group, _ in self._samples.values()} == {id(group) for group in self._groups.values()}

    # From the core to users

    def deliver(self) -> None:
        """Bring outputs up to date with all deltas, and call the listeners of requests that got tokens or ended."""
        while self._outbox:
            delta = self._outbox.popleft()
            if isinstance(delta, BaseException):
                self.abandon_all(delta)
            else:
                self._take(delta)

    def _take(self, delta: Delta) -> None:
        try:
            with self.lock:
                for key, num_cached_tokens, num_preemptions in delta.admitted:
                    if (sample := self._samples.get(key)) is not None:
                        group, index = sample
                        group.admitted(index, num_cached_tokens, num_preemptions, delta.at_s)
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
        finally:  # callers wait for requests that ended before the error, too
            self._tell()

    def abandon(self, groups: Iterable[RequestGroup], error: BaseException) -> None:
        """End requests at once, whatever their outputs are, because of an error."""
        for group in groups:
            self._let_go(group)
            with self.lock:
                group.abandon(error)
            self._untold[group.request_id] = group
            self._groups.pop(group.request_id, None)
        self._tell()

    def abandon_all(self, error: BaseException) -> None:
        """End all requests that are unfinished at once."""
        self.abandon(list(self._groups.values()), error)

    def _take_step(self, step: StepDelta) -> None:
        result, at_s = step.result, step.result.ended_s
        logprobs = result.logprobs
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.prompt_shares, result.prompt_logprobs)
        width = 0 if logprobs is None else len(logprobs.logprob) // len(result.token_ids)  # tokens of a row
        num_output_tokens = num_in_first = 0
        iterations: Counter[int] = Counter()  # tokens by the round that gave them
        samples, untold, ended = self._samples, self._untold, step.ended
        for row, (key, token_ids) in enumerate(zip(step.keys, step.token_ids, strict=True)):
            sample = samples.get(key) if token_ids else None
            if sample is None:  # it has ended: by a stop string or a cancel, of which the core did not know
                continue
            group, index = sample
            reason = ended[row].reason if row in ended else None
            untold[group.request_id] = group
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
                if reason is None:  # the core goes on with it
                    self._send(Cancelled([key], FinishReason.STOP))
                self._finish(group, index, FinishReason.STOP, at_s, stop)
            elif reason is not None:
                self._finish(group, index, reason, at_s)
        self._stats.num_output_tokens += num_output_tokens
        iterations[0] += num_in_first
        self._stats.add_iterations(iterations.values())

    def _collect_prompt_logprobs(self, shares: Sequence[PromptShare], logprobs: TokenLogprobs) -> None:
        for key, start, count, first in shares:
            if (sample := self._samples.get(key)) is not None:
                group, _ = sample
                group.append_prompt_logprobs(start + 1, count, logprobs, first)  # of the tokens that these predict

    def _take_end(self, ended: Ended, delta: Delta) -> None:
        if (sample := self._samples.get(ended.key)) is None:  # it has ended
            return
        group, index = sample
        group.error = group.error or delta.error
        group.preempted(index, ended.num_preemptions)
        self._finish(group, index, ended.reason, delta.at_s)

    def _finish(
        self, group: RequestGroup, index: int, reason: FinishReason, at_s: float, stop: str | None = None
    ) -> None:
        """Let go of a sample that has ended."""
        self._untold[group.request_id] = group
        if group.finish(index, reason, at_s, stop):
            del self._groups[group.request_id]
            self._stats.num_finished += 1
        # Last of all: `_take` looks here for whom an error concerns.
        self._samples.pop(group.requests[index].key, None)

    def _tell(self) -> None:
        """Call the listeners of requests with news."""
        for request_id, group in list(self._untold.items()):
            try:
                if group.listener is not None:
                    group.listener(group)
            except BaseException as error:  # a client's error: others must be told too
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                logger.exception("request %s is cancelled: what listened to it has failed", request_id)
                group.listener = None
                self.cancel(request_id)
            self._untold.pop(request_id, None)


def _keys(group: RequestGroup) -> list[int]:
    return [request.key for request in group.requests]
