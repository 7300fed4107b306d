"""Frontend: from prompts to requests, and from deltas to what users see. It talks to the core through queues alone.

`prepare`, `start` and `cancel` may be called from any thread, `deliver` from one at a time. Whatever becomes of a
request, its end too, comes through there, so that outputs have one writer.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.config import LARGEST_MAX_LOGPROBS, EngineConfig
from jaxserve.engine.core import Delta
from jaxserve.engine.events import Cancelled, Event, Submitted
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.prompt import Prompt, prompt_limit, read_prompt
from jaxserve.engine.replica import StepTokens
from jaxserve.errors import RequestError, brief
from jaxserve.metrics import EngineStats
from jaxserve.pooling import Pooler, PoolingParams
from jaxserve.request import FinishReason, Request, TokenIds
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule_config import ScheduleConfig
from jaxserve.scheduling.plan import StepPlan, wants_prompt_logprobs
from jaxserve.structured_output.grammar import GrammarCompiler, TokenConstraint
from jaxserve.text.bad_words import encode_bad_words
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.sampling import TokenLogprobs

logger = logging.getLogger(__name__)

LARGEST_PRIORITY = 2**31 - 1

Listener = Callable[[RequestGroup], None]


class Frontend:
    """Requests of users, as far as they are unfinished.

    Args:
        config: model and options.
        schedule: resolved sizes of steps and pool.
        tokenizer: None where prompts must be token ids.
        vocab_size: tokens of the model.
        max_position: tokens that the model was made for.
        hidden_size: elements of a hidden state.
        eos_ids: tokens that end an output.
        pooler: pooling of a model that pools; None if it generates.
        inbox: events for the core.
        outbox: deltas from the core, or the exception that has lost it all requests.
        check_fits: function that raises RequestError for a request that could not run to its end even alone.
        stats: totals, to which output tokens and finished requests are added.
        is_lock_step: True if other processes run the same steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        schedule: ScheduleConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_position: int,
        hidden_size: int,
        eos_ids: frozenset[int],
        inbox: deque[Event],
        outbox: deque[Delta | BaseException],
        check_fits: Callable[[Request], None],
        stats: EngineStats,
        pooler: Pooler | None = None,
        is_lock_step: bool = False,
    ) -> None:
        self._pooler, self._hidden_size = pooler, hidden_size
        self._is_lock_step = is_lock_step
        self._grammars: GrammarCompiler | None = None  # made for the first request that needs one
        self._grammars_lock = threading.Lock()
        self._config, self._schedule, self._tokenizer = config, schedule, tokenizer
        self._vocab_size, self._max_position, self._eos_ids = vocab_size, max_position, eos_ids
        self._inbox, self._outbox = inbox, outbox
        self._check_fits, self._stats = check_fits, stats
        self._groups: dict[str, RequestGroup] = {}
        # By each unfinished sample itself: a step in flight may still hold an earlier request of the same id.
        self._group_of: dict[Request, RequestGroup] = {}
        self._taken: Delta | BaseException | None = None  # the last delta that was begun with
        self._untold: dict[str, RequestGroup] = {}  # requests with news, whose listeners are not through
        self._seeds = random.Random(config.seed)
        self._arrivals = itertools.count()
        self.lock = threading.Lock()  # guards all outputs: a reader on another thread finds them between two deltas

    # From users to the core

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        cache_salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
        *,
        shares_last_page: bool = False,
    ) -> RequestGroup:
        """Check a request and read its prompt; nothing is queued.

        Args:
            request_id: name of the request.
            prompt: prompt of the request.
            params: parameters of the request, of the kind that the model needs.
            cache_salt: only requests with the same salt share cached pages.
            tenant: name of whom it is for; tenants get equal service.
            priority: class; requests of a lower number go first.
            shares_last_page: see `Request`.

        Raises:
            RequestError: it cannot be served.
        """
        params, pooling = self._read_params(params)
        limit = prompt_limit(params, self._schedule.max_model_len, self._schedule.max_total_tokens)
        text, token_ids, salt = read_prompt(prompt, cache_salt, self._tokenizer, limit)
        self._check(token_ids, params)
        self._check_priority(priority)
        requests = self._expand(request_id, token_ids, params, salt, tenant, priority)
        for request in requests:
            request.shares_last_page = shares_last_page
        _check_some_allowed(requests[0])
        self._check_fits(requests[0])  # its siblings then fit as well, and any replica has room
        return RequestGroup(request_id, text, requests, self._tokenizer, time.monotonic, pooling)

    def start(self, group: RequestGroup, listener: Listener | None = None) -> None:
        """Queue a request.

        Args:
            group: request from `prepare`.
            listener: function that `deliver` calls when outputs of the request have grown or ended; twice, where an
                interrupt comes. If it raises, the request is cancelled.

        Raises:
            RequestError: the id is in use.
        """
        group.listener = listener
        if self._groups.setdefault(group.request_id, group) is not group:
            raise RequestError(
                f"request_id must be unique among unfinished requests, got {group.request_id!r} again; "
                "choose another one, or wait for the end of the other request"
            )
        self._queue(group)

    def cancel(self, request_id: str) -> RequestGroup | None:
        """End a request if it is unfinished; from anywhere, the garbage collector included, any number of times."""
        group = self._groups.get(request_id)
        if group is not None:
            self._inbox.append(Cancelled(group.requests, FinishReason.ABORT))
        return group

    def restart(self) -> None:
        """Begin all unfinished requests again."""
        for group in list(self._groups.values()):
            for request in group.requests:
                self._group_of.pop(request, None)
            self._inbox.append(Cancelled(group.requests, FinishReason.ABORT))
            with self.lock:
                group.restart()
            self._queue(group)

    def _queue(self, group: RequestGroup) -> None:
        requests = group.requests
        self._group_of.update(dict.fromkeys(requests, group))
        self._inbox.append(Submitted(requests))

    def has_unfinished(self) -> bool:
        """Return whether there is a request whose end its listener has not heard of."""
        return bool(self._groups or self._untold)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        return self._eos_ids

    @property
    def num_unfinished(self) -> int:
        """Requests whose end has not been taken."""
        return len(self._groups)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each unfinished sample is of an unfinished request."""
        assert {id(group) for group in self._group_of.values()} == {id(group) for group in self._groups.values()}

    # From the core to users

    def deliver(self) -> None:
        """Bring outputs up to date with all deltas, and call the listeners of requests that got tokens or ended.

        An interrupt loses no delta and leaves no listener uncalled: the next call goes on.
        """
        self._tell()
        while self._outbox:
            delta = self._outbox[0]
            if isinstance(delta, BaseException):
                self.abandon_all(delta)
            elif delta is not self._taken:
                self._take(delta)
            self._outbox.popleft()

    def _take(self, delta: Delta) -> None:
        try:
            with self.lock:
                self._taken = delta
                for request, num_cached_tokens in delta.admitted:
                    if (group := self._group_of.get(request)) is not None:
                        group.admitted(request, num_cached_tokens, delta.at_s)
                if delta.step is not None:
                    self._take_step(delta.step)
                for request, reason in delta.ended:
                    # By its id, too: an interrupt may have come in `start`.
                    group = self._group_of.get(request) or self._groups.get(request.request_id.rpartition("#")[0])
                    if group is not None and group.has_open(request):
                        group.error = delta.error
                        self._finish(group, request, reason, delta.at_s)
        except BaseException as error:  # outputs may be half written
            rows = delta.step.plan.requests if delta.step is not None else [request for request, _ in delta.ended]
            abandoned = {self._group_of[request] for request in rows if request in self._group_of}
            self.abandon(abandoned, error)
            if not isinstance(error, Exception):
                raise
            logger.exception("requests are ended: their outputs could not be assembled")
        finally:  # callers wait for requests that ended before the error, too
            self._tell()

    def abandon(self, groups: Iterable[RequestGroup], error: BaseException) -> None:
        """End requests at once, whatever their outputs are, because of an error."""
        for group in groups:
            for request in group.requests:
                self._group_of.pop(request, None)
            self._inbox.append(Cancelled(group.requests, FinishReason.ABORT))
            with self.lock:
                group.abandon(error)
            self._untold[group.request_id] = group
            self._groups.pop(group.request_id, None)
        self._tell()

    def abandon_all(self, error: BaseException) -> None:
        """End all requests that are unfinished at once."""
        self.abandon(list(self._groups.values()), error)

    def _take_step(self, step: StepTokens) -> None:
        result, at_s = step.result, step.result.ended_s
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.plan, result.prompt_logprobs)
        logprobs = result.logprobs
        width = 0 if logprobs is None else len(logprobs.logprob) // len(result.token_ids)  # tokens of a row
        ended = set(step.ended)
        num_output_tokens = 0
        for row, (request, token_ids) in enumerate(zip(step.plan.requests, step.token_ids, strict=True)):
            group = self._group_of.get(request) if token_ids else None
            if group is None:  # it has ended: by a stop string or a cancel, of which the core did not know
                continue
            reason = request.finish_reason if request in ended else None
            self._untold[group.request_id] = group
            if self._pooler is not None and group.pooling is not None and result.pooled is not None:
                group.pool(request, self._pooler.finish(result.pooled[row], group.pooling), at_s)
                self._finish(group, request, FinishReason.STOP, at_s)
                continue
            if result.rounds is not None:
                group.count_drafts(request, result.rounds.drafted[row].tolist(), result.rounds.accepted[row].tolist())
            num_kept, stop = group.append(request, token_ids, reason, at_s, logprobs, row * width)
            num_output_tokens += num_kept
            if stop is not None:
                self._inbox.append(Cancelled([request], FinishReason.STOP))
                self._finish(group, request, FinishReason.STOP, at_s, stop)
            elif reason is not None:
                self._finish(group, request, reason, at_s)
        self._stats.num_output_tokens += num_output_tokens

    def _collect_prompt_logprobs(self, plan: StepPlan, logprobs: TokenLogprobs) -> None:
        token = 0  # first of the row on the step's token axis
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            group = self._group_of.get(request)
            if group is not None and wants_prompt_logprobs(request, start):
                ids = request.prompt_token_ids[
                    start + 1 : start + 1 + count
                ]  # the predicted tokens lie one position further
                group.append_prompt_logprobs(start + 1, ids, logprobs, token)
            token += count

    def _finish(
        self, group: RequestGroup, request: Request, reason: FinishReason, at_s: float, stop: str | None = None
    ) -> None:
        """Let go of a sample that has ended."""
        self._untold[group.request_id] = group
        if group.finish(request, reason, at_s, stop):
            del self._groups[group.request_id]
            self._stats.num_finished += 1
        self._group_of.pop(request, None)  # last of all: `_take` looks here for whom an error concerns

    def _tell(self) -> None:
        """Call the listeners of requests with news."""
        for request_id, group in list(self._untold.items()):
            try:
                if group.listener is not None:
                    group.listener(group)
            except BaseException as error:  # a client's error: others must be told too
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise  # it is called again
                logger.exception("request %s is cancelled: what listened to it has failed", request_id)
                group.listener = None
                self.cancel(request_id)
            self._untold.pop(request_id, None)

    # Parts of `prepare`

    def _read_params(self, params: SamplingParams | PoolingParams) -> tuple[SamplingParams, PoolingParams | None]:
        """Return the parameters of the scheduler's request, checked anew as the caller may have changed them.

        Those of a request to a model that pools come with it.
        """
        if isinstance(params, PoolingParams):
            if self._pooler is None:
                raise RequestError(
                    "this engine generates text, and a vector was asked for; "
                    "start one with runner='pooling', which makes embeddings of any model"
                )
            params = dataclasses.replace(params)
            self._pooler.check(params, self._hidden_size)
            return params.sampling_params(), params
        if self._pooler is not None:
            raise RequestError(
                f"this engine pools ({self._pooler.task}), and text was asked for; use its {self._pooler.task}, "
                "or start one with runner='generate' for a model with a matrix of logits"
            )
        return params.clone(), None

    def _check(self, token_ids: TokenIds, params: SamplingParams) -> None:
        longest, vocab = self._schedule.max_total_tokens, self._vocab_size
        if not token_ids:
            raise RequestError("a prompt must have at least 1 token, got 0; begin it with any text or token")
        if len(token_ids) >= longest:
            bound = "fewer than" if self._pooler is None else "at most"
            raise RequestError(
                f"a prompt must have {bound} max_model_len tokens, got {len(token_ids)} with "
                f"max_model_len {self._schedule.max_model_len}; shorten it{self._advice_on_length()}"
            )
        named = {
            "prompt": token_ids,
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise RequestError(f"token ids in {name} must be in [0, {vocab}), got {min(ids)}..{max(ids)}")
        self._check_logprobs(params)
        if params.bad_words and self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer; use logit_bias, or drop skip_tokenizer_init")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids, or drop skip_tokenizer_init")

    def _check_logprobs(self, params: SamplingParams) -> None:
        most, vocab = self._config.max_logprobs, self._vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name) or 0
            if (vocab if asked == -1 else asked) > (vocab if most == -1 else most):
                needed = asked if 0 < asked <= LARGEST_MAX_LOGPROBS else -1
                raise RequestError(
                    f"{name} must be at most max_logprobs of the engine, or the size of the vocabulary, got {asked} "
                    f"with max_logprobs {most} and {vocab} tokens; start the engine with max_logprobs={needed}"
                )

    def _check_priority(self, priority: object) -> None:
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > LARGEST_PRIORITY:
            raise RequestError(
                f"priority must be an integer of at most {LARGEST_PRIORITY} either way, got {priority!r}"
            )
        if priority and self._config.scheduling_policy != "priority":
            raise RequestError(
                f"priority needs an engine with scheduling_policy='priority', got {priority} with "
                f"{self._config.scheduling_policy!r}; start it with that, or drop priority"
            )

    def _advice_on_length(self) -> str:
        most = self._max_position
        return f" or raise max_model_len, {most} at most" if self._schedule.max_model_len < most else ""

    def _expand(
        self,
        request_id: str,
        token_ids: TokenIds,
        params: SamplingParams,
        salt: str | None,
        tenant: str,
        priority: int,
    ) -> list[Request]:
        """Return the `n` requests of the scheduler; siblings find their prompt's pages in the prefix cache."""
        seed, arrival = params.seed if params.seed is not None else self._seeds.getrandbits(63), next(self._arrivals)
        limit = self._schedule.max_total_tokens
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        else:  # all that there is room for; the last token is never computed, and so needs none
            most = self._schedule.kv_groups.most_tokens(self._schedule.num_pages)
            limit = limit if most is None else min(limit, most + 1)
        form = params.structured_outputs
        eos = frozenset() if params.ignore_eos and form is None else self._eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids or ())
        bad_sequences: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self._tokenizer:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            bad_sequences = encode_bad_words(params.bad_words, encode)
        reads_cache = self._pooler is None or self._pooler.reads_prefix_cache
        namespace = f"user:{salt or ''}" if self._config.enable_prefix_caching else f"private:{arrival}"
        return [
            Request(
                request_id=f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=params,
                seed=seed + index,
                max_total_tokens=limit,
                stop_ids=stop_ids,
                bad_sequences=bad_sequences,
                salt=namespace.encode(errors="surrogatepass"),
                tenant=tenant,
                priority=priority,
                arrival_s=time.monotonic(),
                read_prefix_cache=reads_cache and (index > 0 or params.prompt_logprobs is None),
                waits_for_tokens=form is not None,
                may_be_extended=form is not None and form.append_forced_tokens,
                constraint=self._constraint(params, stop_ids),
                arrival=arrival,
            )
            for index in range(params.n)
        ]

    def _constraint(self, params: SamplingParams, stop_ids: frozenset[int]) -> TokenConstraint | None:
        """Return the constraint of a sample; RequestError where its form is refused."""
        form = params.structured_outputs
        if form is None:
            return None
        if form.append_forced_tokens and (params.logprobs is not None or params.has_penalties or params.bad_words):
            message = "append_forced_tokens cannot be combined with logprobs, penalties or bad_words; drop one"
            raise RequestError(message)
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = self._new_grammars()
        return self._grammars.constraint(
            form,
            allowed_token_ids=params.allowed_token_ids,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
        )

    def _new_grammars(self) -> GrammarCompiler:
        if self._is_lock_step:
            raise RequestError(
                "structured_outputs need an engine of one process, got one of several in lock-step; drop them, or "
                "serve the model from one process"
            )
        if self._tokenizer is None or self._tokenizer.json_text is None:
            raise RequestError(
                "structured_outputs need a tokenizer with a tokenizer.json, got none; convert the tokenizer, or drop "
                "skip_tokenizer_init"
            )
        if not self._eos_ids:
            raise RequestError(
                "structured_outputs need a model with an end-of-sequence id, got none; give its files one"
            )
        return GrammarCompiler(self._tokenizer.json_text(), self._vocab_size, self._eos_ids)


def _check_some_allowed(request: Request) -> None:
    """RequestError where every token may be forbidden, so that there would be none to sample."""
    p = request.params
    if p.allowed_token_ids is None:
        return
    forbidden = {sequence[-1] for sequence in request.bad_sequences} | (request.stop_ids if p.min_tokens else set())
    if forbidden.issuperset(p.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids must have an id that neither ends the output, where min_tokens forbids that, nor a bad "
            f"word, got {brief(p.allowed_token_ids)}; allow more"
        )
