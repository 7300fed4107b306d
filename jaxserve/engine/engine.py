"""Engine: schedule, pack, run, update. Everything a request meets between arrival and its last token."""

import contextlib
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.accounts import Accounts, InFlight
from jaxserve.engine.batch import MAX_EOS_IDS, BatchPacker
from jaxserve.engine.build import (
    build_arch,
    build_params,
    build_runner,
    build_sampling_params,
    check_sizes,
    compute_dtype,
)
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.pacer import Pacer
from jaxserve.engine.plan import StepPlan, wants_prompt_logprobs
from jaxserve.engine.roofline import device_ceilings
from jaxserve.engine.runner import Runner, StepResult, compile_counter
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError, RequestError
from jaxserve.metrics import Ceilings, EngineStats, StepStats
from jaxserve.request import FinishReason, Request, RequestOutput, RequestStatus, SamplingParams, TokenIds
from jaxserve.sampling import TokenLogprobs
from jaxserve.tokenizer import load_tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(slots=True)
class _Progress:
    """A step that was read: the scheduler knows its tokens, the user does not."""

    plan: StepPlan
    result: StepResult
    progressed: dict[Request, int]  # new tokens of each


class Engine:
    """One model behind one scheduler. Not thread-safe: one thread adds, steps and aborts.

    Args:
        config: what to serve and how.
        runner: the device; built from `config` unless given.

    Attributes:
        config: as given.
        arch: sizes of the model.
        schedule: resolved sizes of steps and pool.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: what the checkpoint recommends.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        self.config = config
        self.arch = build_arch(config)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path)
        self.default_sampling_params = build_sampling_params(config)
        check_sizes(config, self.arch)
        tokenizer_eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._eos_ids = self.arch.eos_ids | frozenset(tokenizer_eos)
        if len(self._eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"a model may have at most {MAX_EOS_IDS} end-of-sequence ids, got {len(self._eos_ids)}")
        self._runner = runner or build_runner(config, self.arch, build_params(config, self.arch))
        self.schedule = s = self._runner.schedule
        self._scheduler = Scheduler(
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            page_size=s.page_size,
            num_pages=s.num_pages,
            max_model_len=s.max_model_len,
        )
        self._packer = BatchPacker(s, config.seed)
        self._in_flight: deque[InFlight] = deque()
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[str, RequestGroup] = {}  # by the id of each sample
        self._seeds = random.Random(config.seed)
        self._num_groups = 0
        self._pacer = Pacer(config.burst)
        self._accounts = Accounts(self.arch.local(config.tensor_parallel_size), self._packer, self._runner)

    # Requests

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> RequestOutput:
        """Queue a request; returns its output, empty now and filled by `step`.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or {"prompt": ...} or {"prompt_token_ids": [...]}, with "cache_salt" if wanted.
            params: how to sample; default `default_sampling_params`.
            cache_salt: only requests with the same salt share cached pages.

        Raises:
            RequestError: the request cannot be served; nothing has changed.
        """
        params = (params or self.default_sampling_params).clone()  # checked anew: the caller may have changed it
        text, token_ids, salt = self._read_prompt(prompt, cache_salt)
        self._check(request_id, token_ids, params)
        requests = self._samples(request_id, token_ids, params, salt)
        self._scheduler.add(requests[0])  # refuses what can never fit; then its siblings fit as well
        for request in requests[1:]:
            self._scheduler.add(request)
        group = RequestGroup(request_id, text, requests, self.tokenizer, time.monotonic)
        self._groups[request_id] = group
        self._group_of.update({r.request_id: group for r in requests})
        self._num_groups += 1
        return group.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what there is of it, None if it is not unfinished."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            if request.request_id in self._group_of:  # one that just ended may not have been told so yet
                self._scheduler.abort(request.request_id)
                self._finish(request)
        return group.output

    def has_unfinished(self) -> bool:
        """Whether any request still needs steps."""
        return bool(self._groups)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self._scheduler.reset_prefix_cache()

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        self._runner.wait_until_warm()

    def close(self) -> None:
        """Stop compiling in the background."""
        self._runner.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if a page or slot is lost or shared; for tests and audits."""
        self._scheduler.check_integrity()

    @cached_property
    def ceilings(self) -> Ceilings:
        """The limits of the device in use, by which `stats.split` and `last_step.split` account for wall time.

        Measured when first asked for, unless the user's cache has them: after all compiling, in under a second.
        """
        self.wait_until_warm()  # compiling beside it would make the device look slower
        return device_ceilings(compute_dtype(self.config, self.arch))

    @property
    def stats(self) -> EngineStats:
        """Totals since start, of all steps but one that may have ended since the last dispatch."""
        return self._accounts.stats

    @property
    def last_step(self) -> StepStats | None:
        """Account of the last of those steps."""
        return self._accounts.last_step

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests hold."""
        return self._scheduler.num_pages_used

    def _read_prompt(self, prompt: Prompt, cache_salt: str | None) -> tuple[str | None, TokenIds, str | None]:
        if isinstance(prompt, Mapping):
            if unknown := sorted(map(str, prompt.keys() - _PROMPT_KEYS)):
                raise RequestError(f"a prompt takes the keys {sorted(_PROMPT_KEYS)}, got also {unknown}")
            if not prompt.keys() & {"prompt", "prompt_token_ids"}:
                raise RequestError("a prompt needs prompt or prompt_token_ids, got neither")
            salt = prompt.get("cache_salt", cache_salt)
            content = prompt.get("prompt_token_ids", prompt.get("prompt"))  # ids win: the text then is their source
            text = prompt.get("prompt")
        else:
            content, salt, text = prompt, cache_salt, None
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be a string, got {type(text).__name__}")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt must be a string, got {salt!r}")
        if isinstance(content, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; pass token ids, or drop skip_tokenizer_init")
            return content, self.tokenizer.encode(content), salt
        return text, self._read_token_ids(content), salt

    def _read_token_ids(self, content: object) -> TokenIds:
        if isinstance(content, np.ndarray):
            content = content.tolist()
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise RequestError(f"a prompt must be a string or a list of token ids, got {type(content).__name__}")
        if set(map(type, content)) <= {int}:  # the usual case, ten times faster than looking at each
            return list(content)
        for position, token_id in enumerate(content):
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise RequestError(f"token ids must be integers, got {token_id!r} at {position}")
        return [int(token_id) for token_id in content]

    def _check(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> None:
        if request_id in self._groups:
            raise RequestError(f"request_id must be unique among unfinished requests, got {request_id!r} again")
        longest, vocab = self.schedule.max_model_len, self.arch.vocab_size
        if not 0 < len(token_ids) < longest:
            raise RequestError(
                f"a prompt must have at least 1 and fewer than max_model_len tokens, got {len(token_ids)} with "
                f"max_model_len {longest}; shorten it{self._advice_on_length()}"
            )
        named = {
            "prompt": token_ids,
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
        }
        for name, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise RequestError(f"token ids in {name} must be in [0, {vocab}), got {min(ids)}..{max(ids)}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids, or drop skip_tokenizer_init")

    def _advice_on_length(self) -> str:
        most = self.arch.max_position
        return f" or raise max_model_len, {most} at most" if self.schedule.max_model_len < most else ""

    def _samples(self, request_id: str, token_ids: TokenIds, params: SamplingParams, salt: str | None) -> list[Request]:
        """The `n` requests of the scheduler; siblings find their prompt's pages in the prefix cache like any others."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        limit = self.schedule.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        else:  # as many as there is room for; the last token is never computed, and so needs none
            limit = min(limit, self.schedule.num_pages * self.schedule.page_size + 1)
        eos = frozenset() if params.ignore_eos else self._eos_ids
        shared = self.config.enable_prefix_caching
        namespace = f"user:{salt or ''}" if shared else f"private:{self._num_groups}"
        return [
            Request(
                request_id=f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=params,
                seed=seed + index,
                max_total_tokens=limit,
                stop_ids=eos | frozenset(params.stop_token_ids or ()),
                salt=namespace.encode(errors="surrogatepass"),
                read_prefix_cache=index > 0 or params.prompt_logprobs is None,
            )
            for index in range(params.n)
        ]

    # Steps

    def step(self) -> list[RequestOutput]:
        """Plan and dispatch one step or burst, and collect the one before it (or this one, without `step_ahead`).

        Returns the requests that progressed: cumulative outputs, final where `finished`.
        """
        known = self._read(0) if self._scheduler.must_update_first(self._max_steps()) else []
        with self._aborting_on_failure():
            try:
                planned = self._plan_and_dispatch()
            finally:  # while the device runs what was just dispatched
                self._accounts.write(self._scheduler.num_waiting)
                progressed = self._deliver(known)
        known = self._read(1 if planned and self.config.step_ahead else 0)
        with self._aborting_on_failure():
            progressed |= self._deliver(known)
        if not self._groups:
            self._drop_in_flight()
        if not self._in_flight:
            self._accounts.write(self._scheduler.num_waiting)
        return list(progressed.values())

    def _burst_bucket(self, plan: StepPlan) -> int | None:
        return self._runner.burst_bucket_for(plan.num_rows)

    def _max_steps(self) -> int:
        """Steps that the next dispatch may have, as far as programs and their speed go."""
        bucket = self._runner.burst_bucket_for(self._scheduler.num_running)
        return 1 if bucket is None else self._pacer.max_steps(bucket)

    @contextlib.contextmanager
    def _aborting_on_failure(self) -> Iterator[None]:
        """End all requests when a step breaks off: plans, pages and device no longer agree on what was computed."""
        try:
            yield
        except BaseException:
            for request_id in list(self._groups):
                self.abort(request_id)
            self._in_flight.clear()
            self._scheduler.reset_prefix_cache()
            self._runner.restore_state()
            raise

    def _plan_and_dispatch(self) -> bool:
        started = time.monotonic()
        plan = self._scheduler.schedule(self._max_steps())
        if plan is None:
            return False
        self._in_flight.append(self._dispatch(plan, started))
        return True

    def _read(self, keep: int) -> list[_Progress]:
        """Wait for all steps in flight but the last `keep`, and let the scheduler know their tokens."""
        steps = [self._in_flight[index] for index in range(len(self._in_flight) - keep)]
        results = [self._fetch(step) for step in steps]
        with self._aborting_on_failure():
            return [self._update(self._in_flight.popleft(), out) for out in results]

    def _fetch(self, step: InFlight) -> StepResult:
        """Wait for a step. Interrupted here, nothing is lost: the next call waits again."""
        try:
            return step.handle.fetch()
        except Exception:  # whatever the device reports; KeyboardInterrupt passes
            with self._aborting_on_failure():
                raise

    def _drop_in_flight(self) -> None:
        """Forget steps whose requests have all ended: nobody waits for their tokens, or for how long they take."""
        while self._in_flight:
            step = self._in_flight.popleft()
            self._accounts.ended(step, step.plan.num_steps, time.monotonic())
            self._scheduler.update(step.plan, *[[0] * step.plan.num_rows] * step.plan.num_steps)
        self._pacer.pause()
        self.stats.num_wasted_tokens = self._scheduler.num_wasted_tokens

    def _dispatch(self, plan: StepPlan, started: float) -> InFlight:
        compiles = compile_counter.count
        for request in plan.admitted:
            self._group_of[request.request_id].admitted(request)
            if (slot_row := self._packer.pack_slot(request)) is not None:
                self._runner.set_slot(request.slot, slot_row)
        burst = plan.num_steps > 1
        bucket = self._burst_bucket(plan) if burst else self._runner.bucket_for(plan.num_tokens)
        assert bucket is not None, "bursts are planned where there is a program for them"
        blob = self._packer.pack(plan, bucket)
        handle = self._runner.run(
            blob,
            bucket,
            wants_logprobs=plan.wants_logprobs,
            wants_prompt_logprobs=plan.wants_prompt_logprobs,
            burst=burst,
        )
        self._count_compiles(compile_counter.count - compiles)
        now = time.monotonic()
        return InFlight(plan, blob, handle, bucket, now - started, now)

    def _count_compiles(self, count: int) -> None:
        self.stats.num_compiles += count
        if count and self.config.forbid_compiles:
            raise RuntimeError(f"a step compiled {count} programs after warm-up; every shape must be known beforehand")

    def _update(self, step: InFlight, out: StepResult) -> _Progress:
        self._note_end(step, len(out.token_ids))
        progressed = self._scheduler.update(step.plan, *out.token_ids[:, : step.plan.num_rows].tolist())
        return _Progress(step.plan, out, progressed)

    def _note_end(self, step: InFlight, num_steps: int) -> None:
        now_s = time.monotonic()
        self._accounts.ended(step, num_steps, now_s)
        if num_steps:  # else its time belongs to what comes next
            self._pacer.ended(None if step.plan.num_prefill_tokens else self._burst_bucket(step.plan), num_steps, now_s)

    def _deliver(self, known: Sequence[_Progress]) -> dict[str, RequestOutput]:
        """Hand out what was read: text, log probabilities, ends. By the id of the request."""
        outputs: dict[str, RequestOutput] = {}
        for step in known:
            outputs |= self._deliver_step(step)
        self.stats.num_wasted_tokens = self._scheduler.num_wasted_tokens
        return outputs

    def _deliver_step(self, step: _Progress) -> dict[str, RequestOutput]:
        result, now_s = step.result, time.monotonic()
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.plan, result.prompt_logprobs)
        row_of = {} if result.logprobs is None else {request: row for row, request in enumerate(step.plan.requests)}
        outputs, num_output_tokens = {}, 0
        for request, num_tokens in step.progressed.items():
            group = self._group_of.get(request.request_id)
            if group is None:  # a stop string of a step read together with this one has ended it
                continue
            stop = group.append(request, num_tokens, now_s, result.logprobs, row_of.get(request, -1))
            if request.status is RequestStatus.FINISHED or stop is not None:
                self._finish(request, stop)
            outputs[group.output.request_id] = group.output
            num_output_tokens += num_tokens
        self.stats.num_output_tokens += num_output_tokens
        return outputs

    def _collect_prompt_logprobs(self, plan: StepPlan, logprobs: TokenLogprobs) -> None:
        token = 0  # first of the row on the step's token axis
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            group = self._group_of.get(request.request_id)
            if group is not None and wants_prompt_logprobs(request, start):
                ids = request.prompt_token_ids[start + 1 : start + 1 + count]  # what is predicted lies one further
                group.append_prompt_logprobs(start + 1, ids, logprobs, token)
            token += count

    def _finish(self, request: Request, stop_string: str | None = None) -> None:
        if stop_string is not None:
            self._scheduler.finish(request, FinishReason.STOP)
        group = self._group_of.pop(request.request_id)
        if group.finish(request, stop_string):
            del self._groups[group.output.request_id]
            self.stats.num_finished += 1
