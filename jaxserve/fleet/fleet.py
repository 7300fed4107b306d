"""Fleet: several engines that serve as one; assigns requests to engines and recovers them when an engine dies.

The engines run in actors, in other processes. Each gets twice as many sequences as fit in a step, so that its batch
stays full while results are in flight. The router chooses the least loaded actor, or one that has computed a prefix of
the prompt. When the queue is empty, idle actors take over requests that wait in busy ones.

An actor that dies is restarted. Its requests are not lost, but any of them may have killed it: they are served again in
two halves, each by an actor that serves nothing else meanwhile. A half that completes is cleared; if a half kills its
actor, its unfinished requests are halved again. A request fails after MAX_ISOLATED_DEATHS deaths of actors that served
no other request.
"""

import dataclasses
import logging
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestFailure, RequestOutput
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.core.batch_engine import BatchEngine
from jaxserve.errors import ConfigError, EngineDiedError, PromptTooLongError, RequestError
from jaxserve.scheduling.byte_prefix import TOKEN_BYTES, byte_prefix
from jaxserve.scheduling.router import NO_PREFIX, ROW_CHARGE_TOKENS, Prefix, Route, Router, Start
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.text.loading import load_tokenizer

logger = logging.getLogger(__name__)

MAX_ISOLATED_DEATHS = 3
MAX_FAILED_STARTS = 3  # consecutive failed starts per actor
CALL_S = 0.05  # call duration, after which an actor returns finished requests and gets new ones
_CALLS_AHEAD = 2  # the next call is queued when an actor ends one

Ended = list[RequestOutput | RequestFailure]  # answer to a call: requests that ended


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Arguments of `BatchEngine.add_request`.

    Attributes:
        request_id: internal id, not the caller's. It is new each time a request is given to an actor, so that a late
            result of an earlier attempt is not taken for a later one's.
        prompt: text or token ids.
        params: sampling parameters.
        cache_salt: namespace of the prefix cache, as in `BatchEngine.add_request`.
    """

    request_id: str
    prompt: str | TokenIds
    params: SamplingParams | PoolingParams
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Started:
    """Answer from an actor that is ready to serve."""

    schedule: ScheduleConfig
    default_sampling_params: SamplingParams


@dataclass(frozen=True, slots=True)
class Died:
    """Notice that an actor died; its outstanding calls get no answer."""

    cause: str


@runtime_checkable
class Actors(Protocol):
    """Actors that run the engines. An actor keeps its index when it is restarted in another process."""

    count: int

    def start(self, index: int) -> None:
        """Start or restart an actor; it answers `Started` or `Died`."""

    def serve(self, index: int, aborted: Sequence[str], added: Sequence[NewRequest]) -> None:
        """Queue a call to `Server.serve` in an actor; it answers `Ended` or `Died`."""

    def wait(self) -> tuple[int, Started | Ended | Died]:
        """Return the next answer from any actor; ConfigError if an engine cannot start as configured."""


class Server:
    """Engine in an actor's process, which nothing else uses."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._num_sequences: dict[str, int] = {}  # keys: unfinished requests' ids

    def started(self) -> Started:
        """Return the answer that the engine is ready."""
        return Started(self._engine.schedule, self._engine.default_sampling_params)

    def serve(self, aborted: Sequence[str], added: Sequence[NewRequest]) -> Ended:
        """Abort some requests, add others, and run for CALL_S, or until a request has ended and another one fits.

        Args:
            aborted: ids of requests to abort.
            added: requests to add.

        Returns:
            Outputs of the requests that ended, and failures of requests that the engine refused.
        """
        for request_id in aborted:
            self._engine.abort(request_id)
            self._num_sequences.pop(request_id, None)
        ended: Ended = []
        for request in added:
            request_id, salt = request.request_id, request.cache_salt
            try:
                self._engine.add_request(request_id, request.prompt, request.params, cache_salt=salt)
                self._num_sequences[request_id] = request.params.n
            except RequestError as error:
                is_length = isinstance(error, PromptTooLongError)  # clients distinguish it
                ended.append(RequestFailure(request_id, error if is_length else RequestError(str(error))))
        until_s = time.monotonic() + CALL_S
        while self._engine.has_unfinished():
            for output in self._engine.wait():
                del self._num_sequences[output.request_id]
                ended.append(output)
            if time.monotonic() >= until_s:
                break
            if ended and sum(self._num_sequences.values()) < self._engine.schedule.max_num_seqs:
                break
        return ended


@dataclass(eq=False)
class _Job:
    """A request of the fleet until it ends, whichever actors try to serve it."""

    request_id: str  # the caller's
    request: NewRequest
    num_isolated_deaths: int = 0  # deaths of actors that served only this job
    seat: "_Seat | None" = None  # the actor that serves it; None while it waits
    load: int = 0  # load that this job adds to its seat, in tokens

    @property
    def num_sequences(self) -> int:
        """Number of samples, each a row of the engine."""
        return self.request.params.n

    @property
    def num_tokens(self) -> int:
        """Prompt length in tokens, estimated for text."""
        prompt = self.request.prompt
        return len(prompt) // TOKEN_BYTES + 1 if isinstance(prompt, str) else len(prompt)

    def load_with(self, num_shared_tokens: int) -> int:
        """Return the load in tokens that the job adds to an actor with `num_shared_tokens` of its prompt computed."""
        return max(self.num_tokens - num_shared_tokens, 0) + ROW_CHARGE_TOKENS * self.num_sequences

    @cached_property
    def prefix(self) -> Prefix:
        """Hashes of prompt prefixes before tokenisation."""
        prompt = self.request.prompt
        try:
            is_text = isinstance(prompt, str)
            data = prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else array("i", prompt).tobytes()
        except (TypeError, OverflowError):  # the engine will refuse the prompt
            return NO_PREFIX
        salt = (self.request.cache_salt or "").encode(errors="surrogatepass")
        return byte_prefix(data, salt, b"text" if is_text else b"ids")


@dataclass(slots=True, eq=False)
class _Seat:
    """The fleet's record of an actor: its jobs, and the items for its next call."""

    index: int
    ready: bool = False
    num_failed_starts: int = 0
    num_calls: int = 0  # outstanding calls
    jobs: dict[str, _Job] = field(default_factory=dict)  # keys: `NewRequest.request_id`, the newest last
    num_sequences: int = 0  # sum over its jobs
    load: int = 0  # sum over its jobs, in tokens
    has_suspects: bool = False  # no other jobs are assigned until these have ended
    added: list[NewRequest] = field(default_factory=list)  # requests to add in the next call
    aborted: list[str] = field(default_factory=list)  # ids to abort first in the next call

    def give(self, job: _Job) -> None:
        """Add a job, to be sent with the next call."""
        job.seat = self
        self.jobs[job.request.request_id] = job
        self.num_sequences += job.num_sequences
        self.load += job.load
        self.added.append(job.request)

    def end(self, job: _Job) -> None:
        """Remove a job that has ended."""
        job.seat = None
        del self.jobs[job.request.request_id]
        self.num_sequences -= job.num_sequences
        self.load -= job.load

    def abort(self, job: _Job) -> None:
        """Remove a job, and abort its request in the actor if it was sent already."""
        self.end(job)
        if job.request in self.added:
            self.added.remove(job.request)
        else:
            self.aborted.append(job.request.request_id)


class Fleet:
    """Fleet of engines that is a `BatchEngine`.

    A request that an engine refuses is accepted first and comes back from `wait` as a RequestFailure.

    Args:
        config: options for each engine.
        actors: actors to start; the constructor returns when one of them is ready.

    Attributes:
        config: options for each engine.
        schedule: sizes summed over the engines.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: sampling parameters that the checkpoint recommends.

    Raises:
        ConfigError: engines cannot start; from `wait` as well.
    """

    def __init__(self, config: EngineConfig, actors: Actors) -> None:
        self.config = config
        self.tokenizer = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(config.tokenizer_path, config.chat_options)
        self._actors = actors
        self._seats = [_Seat(index) for index in range(actors.count)]
        self._jobs: dict[str, _Job] = {}  # unfinished jobs, by request id
        self._router = Router(actors.count)
        self._queue: OrderedDict[str, _Job] = OrderedDict()  # jobs not given to an actor, by request id
        self._num_given = 0
        # Not given to an actor either; each group needs an actor without other jobs. Aborted jobs are dropped when due.
        self._suspects: deque[list[_Job]] = deque()
        self._idle: dict[int, _Seat] = {}  # ready seats without jobs
        self._due: dict[int, _Seat] = {}  # seats that may need a call
        self._may_even_out = False  # False after `_even_out` found nothing to move, until something changes
        self._capacity = self._max_rows = 0  # maximum sequences per actor and per step
        for seat in self._seats:
            actors.start(seat.index)
        while not isinstance(first := self._next_answer(), Started):
            pass
        s, n = first.schedule, actors.count
        self._capacity, self._max_rows = 2 * s.max_num_seqs, s.max_num_seqs
        for seat in self._seats:
            self._note(seat)
        self.default_sampling_params = first.default_sampling_params
        self.schedule = dataclasses.replace(
            s,
            max_num_seqs=n * s.max_num_seqs,
            max_num_batched_tokens=n * s.max_num_batched_tokens,
            num_pages=n * s.num_pages,
        )

    def add_request(
        self,
        request_id: str,
        prompt: str | TokenIds,
        params: SamplingParams | PoolingParams,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request; `request_id` must be unique among unfinished ones. A fleet has no LoRA adapters."""
        assert adapter is None, "requests name only adapters that an engine has"
        job = _Job(request_id, NewRequest(request_id, prompt, params, cache_salt))
        self._jobs[request_id] = self._queue[request_id] = job

    def abort(self, request_id: str) -> None:
        """Abort a request if it is unfinished; `wait` will not return it."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        if job.seat is None:
            self._queue.pop(request_id, None)
        else:
            seat = job.seat
            seat.abort(job)
            self._note(seat)

    def has_unfinished(self) -> bool:
        return bool(self._jobs)

    def wait(self) -> Ended:
        """Assign waiting requests to actors, send the due calls, and wait for the next answer of any actor.

        Returns:
            The requests that ended, by this answer.
        """
        self._give_suspects()
        self._give_queue()
        self._even_out()
        for seat in self._due.values():
            while seat.ready and seat.num_calls < _CALLS_AHEAD and (seat.jobs or seat.aborted):
                self._actors.serve(seat.index, seat.aborted, seat.added)
                seat.num_calls += 1
                seat.aborted, seat.added = [], []
        self._due.clear()
        answer = self._next_answer()
        return [] if isinstance(answer, Started) else answer

    def _note(self, seat: _Seat) -> None:
        """Update the router, the idle and the due seats after a seat has changed."""
        if not seat.jobs:
            seat.has_suspects = False
        self._due[seat.index] = seat
        if seat.ready and not seat.jobs:
            self._may_even_out |= seat.index not in self._idle
            self._idle[seat.index] = seat
        else:
            self._idle.pop(seat.index, None)
        self._may_even_out |= seat.num_sequences > self._max_rows
        is_open = seat.ready and not seat.has_suspects and (seat.num_sequences < self._capacity or not seat.jobs)
        self._router.set_load(seat.index, seat.load, is_open=is_open)

    def _give(self, seat: _Seat, job: _Job, num_shared_tokens: int = 0) -> None:
        """Assign a job to an actor, which is expected to have computed `num_shared_tokens` of its prompt."""
        job.load = job.load_with(num_shared_tokens)
        job.request = dataclasses.replace(job.request, request_id=str(self._num_given))
        self._num_given += 1
        seat.give(job)
        self._router.note(seat.index, job.prefix)
        self._note(seat)

    def _give_suspects(self) -> None:
        """Assign each group of suspects to an idle actor, as long as there is one."""
        while self._suspects and self._idle:
            seat = next(iter(self._idle.values()))
            for job in self._suspects.popleft():
                if self._jobs.get(job.request_id) is job:
                    seat.has_suspects = True
                    self._give(seat, job)

    def _give_queue(self) -> None:
        """Assign queued jobs, in order, to the actors that the router chooses; idle actors get one in any case."""
        given: list[str] = []
        for job, route in self._router.assign(
            self._queue.values(),
            prefix_of=lambda job: job.prefix,
            could_start=self._could_start,
            load_of=lambda job, route: job.load_with(route.num_shared_tokens),
        ):
            if route.is_open:
                self._give(self._seats[route.replica], job, route.num_shared_tokens)
                given.append(job.request_id)
        for request_id in given:
            del self._queue[request_id]
        while self._queue and self._idle:  # no actor may idle while a job waits for another's prefix
            self._give(next(iter(self._idle.values())), self._queue.popitem(last=False)[1])

    def _could_start(self, job: _Job, route: Route) -> Start:
        """Return Start.NOW if a route's actor has capacity for a job, else Start.FULL."""
        seat = self._seats[route.replica]
        fits = not seat.jobs or seat.num_sequences + job.num_sequences <= self._capacity
        return Start.NOW if fits else Start.FULL

    def _even_out(self) -> None:
        """Move the newest jobs of busy actors, which exceed a step's rows and so have not started, to idle actors."""
        while self._may_even_out and self._idle and not self._queue:
            idle = next(iter(self._idle.values()))
            others = (seat for seat in self._seats if seat.ready and not seat.has_suspects)
            busiest = max(others, key=lambda seat: seat.num_sequences)
            for job in list(reversed(busiest.jobs.values())):
                rest = busiest.num_sequences - job.num_sequences
                if rest < max(self._max_rows, idle.num_sequences + job.num_sequences):
                    break
                busiest.abort(job)
                self._give(idle, job)
            self._note(busiest)
            self._may_even_out = bool(idle.jobs)

    def _next_answer(self) -> Started | Ended:
        """Wait for the next answer and record it; ended requests are returned with the caller's ids."""
        index, answer = self._actors.wait()
        seat = self._seats[index]
        if isinstance(answer, Started):
            seat.ready, seat.num_failed_starts = True, 0
            self._note(seat)
            return answer
        if isinstance(answer, Died):
            return self._bury(seat, answer.cause)
        seat.num_calls -= 1
        ended: Ended = []
        for output in answer:
            job = seat.jobs.get(output.request_id)
            if job is not None:  # None if it was aborted, or moved to another actor since
                seat.end(job)
                del self._jobs[job.request_id]
                ended.append(dataclasses.replace(output, request_id=job.request_id))
        self._note(seat)
        return ended

    def _bury(self, seat: _Seat, cause: str) -> Ended:
        """Restart an actor that died, and make its jobs suspects; return those that fail because of it, at most one.

        Args:
            seat: record of the actor.
            cause: cause of its death.
        """
        logger.warning("engine %d of the fleet died: %s", seat.index, cause)
        jobs = list(seat.jobs.values())
        seat.num_failed_starts += not seat.ready
        self._seats[seat.index] = _Seat(seat.index, num_failed_starts=seat.num_failed_starts)
        self._router.forget(seat.index)
        self._note(self._seats[seat.index])
        if seat.num_failed_starts < MAX_FAILED_STARTS:
            self._actors.start(seat.index)
        elif all(other.num_failed_starts == MAX_FAILED_STARTS for other in self._seats):
            raise ConfigError(f"no engine of the fleet starts, in {MAX_FAILED_STARTS} attempts each; the last: {cause}")
        for job in jobs:
            job.seat = None
        if len(jobs) == 1:
            jobs[0].num_isolated_deaths += 1
            if jobs[0].num_isolated_deaths == MAX_ISOLATED_DEATHS:
                del self._jobs[jobs[0].request_id]
                message = f"{MAX_ISOLATED_DEATHS} engines died while they served only this request; the last: {cause}"
                return [RequestFailure(jobs[0].request_id, EngineDiedError(message))]
        middle = -(-len(jobs) // 2)
        self._suspects.extend(half for half in (jobs[:middle], jobs[middle:]) if half)
        return []
