"""Engine: schedule, pack, run, update. Everything a request meets between arrival and its last token."""

import contextlib
import dataclasses
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib.metadata import version

import jax

from jaxserve import distributed
from jaxserve.bad_words import encode_bad_words
from jaxserve.config import LARGEST_MAX_LOGPROBS, EngineConfig
from jaxserve.engine.batch import MAX_EOS_IDS
from jaxserve.engine.build import (
    Weights,
    build_arch,
    build_runners,
    build_sampling_params,
    check_sizes,
    claim_memory,
    compute_dtype,
    copies,
    prepare_params,
)
from jaxserve.engine.core import EngineCore, Progress
from jaxserve.engine.lockstep import WeightsRead, follow
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.placement import Placement
from jaxserve.engine.plan import StepPlan, wants_prompt_logprobs
from jaxserve.engine.programs import source_digest
from jaxserve.engine.prompt import Prompt, prompt_limit, read_prompt
from jaxserve.engine.roofline import device_ceilings
from jaxserve.engine.runner import Runner
from jaxserve.errors import ConfigError, RequestError
from jaxserve.metrics import Ceilings, EngineStats, StepStats
from jaxserve.models.params import Params
from jaxserve.peers import Follower, Leader
from jaxserve.request import FinishReason, Request, RequestOutput, RequestStatus, SamplingParams, TokenIds, brief
from jaxserve.sampling import TokenLogprobs
from jaxserve.tokenizer import load_tokenizer

SLEEP_TAGS = ("weights", "kv_cache")  # what can be woken apart from the rest, by vLLM's names
_OWN = {"model", "tokenizer", "compilation_cache_dir"}  # options that each process may have of its own


class Engine:
    """One model, in one or several replicas. Not thread-safe: one thread adds, steps and aborts.

    Args:
        config: what to serve and how.
        runner: the device of the only replica; built from `config` unless given.

    Attributes:
        config: as given.
        arch: sizes of the model.
        cores: the replicas.
        schedule: resolved sizes of steps and pool, of each replica.
        stats: totals since start, of all steps but those that may have ended since the last dispatch.
        tokenizer: None with `skip_tokenizer_init`.
        default_sampling_params: what the checkpoint recommends.
        last_steps: accounts, of any replica, that the last call of `step` has written.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        self.config = config
        self.arch = build_arch(config)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path)
        self.default_sampling_params = build_sampling_params(config)
        claim_memory(config)
        check_sizes(config, self.arch)
        tokenizer_eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._eos_ids = self.arch.eos_ids | frozenset(tokenizer_eos)
        if len(self._eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"a model may have at most {MAX_EOS_IDS} end-of-sequence ids, got {len(self._eos_ids)}")
        self.stats = EngineStats()
        self.last_steps: list[StepStats] = []
        self._peers = distributed.peers() if runner is None else None
        if self._peers is not None:
            self._peers.claim()
            self._require_same_options(self._peers)
        runners = [runner] if runner is not None else build_runners(config, self.arch, self._peers)
        tell = self._peers.tell if self._peers is not None else None
        self.cores = [EngineCore(config, self.arch, r, self.stats, tell) for r in runners]
        self.schedule = runners[0].schedule
        self._is_closed = False
        self._asleep: set[str] = set()  # of SLEEP_TAGS
        self._has_weights = True
        self._placement = Placement(self.cores)
        self._groups: dict[str, RequestGroup] = {}
        # By each unfinished sample itself: a step in flight may still hold an earlier request of the same id.
        self._group_of: dict[Request, RequestGroup] = {}
        self._seeds = random.Random(config.seed)
        self._num_groups = 0

    def _require_same_options(self, peers: Leader | Follower) -> None:
        """ConfigError, in all processes, unless they have the same options and versions."""
        own = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config) if f.name not in _OWN}
        own["versions of jaxserve and jax"] = version("jaxserve"), version("jax")
        own["files of jaxserve"] = source_digest("py", "json")
        first, *others = peers.exchange(own)
        for index, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise ConfigError(
                        f"all processes must have the same {name}, got {value!r} in process 0 and {other[name]!r} in "
                        f"another ({index} of those that came)"
                    )

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
        self._check_open()
        if self._asleep:
            raise RequestError("the engine must be awake to serve requests; call wake_up first")
        if not self._has_weights:
            raise RequestError(
                "the engine has no weights: the last could not be read, or sleep(level=2) let them go; update_weights"
            )
        limit = prompt_limit(params, self.schedule.max_model_len)
        text, token_ids, salt = read_prompt(prompt, cache_salt, self.tokenizer, limit)
        self._check(request_id, token_ids, params)
        requests = self._samples(request_id, token_ids, params, salt)
        _check_some_allowed(requests[0])
        self.cores[0].scheduler.check_fits(requests[0])  # then its siblings fit as well, and any replica has room
        group = RequestGroup(request_id, text, requests, self.tokenizer, time.monotonic)
        self._groups[request_id] = group
        self._group_of.update(dict.fromkeys(requests, group))
        self._num_groups += 1
        self._placement.add(requests)
        return group.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what there is of it, None if it is not unfinished."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            if request in self._group_of:  # one that just ended may not have been told so yet
                self._finish(request, FinishReason.ABORT)
        self._groups.pop(request_id, None)  # an abort that was interrupted may have left it
        return group.output

    def has_unfinished(self) -> bool:
        """Whether any request still needs steps."""
        return bool(self._groups)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self._check_open()
        for core in self.cores:
            core.reset_prefix_cache()

    @property
    def params(self) -> Params:
        """The weights in use, of the first replica, in the form that its programs take."""
        self._check_open()
        return self.cores[0].runner.params

    def update_weights(self, given: Weights, *, running: str = "finish") -> list[RequestOutput]:
        """Serve with other weights from now on; see `LLM.update_weights`. Returns the requests that progressed."""
        self._check_open()
        if "weights" in self._asleep:
            raise ConfigError('the engine must be awake to take weights; call wake_up, or wake_up(tags=["weights"])')
        if running not in ("finish", "restart"):
            raise ConfigError(f"running must be 'finish' or 'restart', got {running!r}")
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if self._peers is not None and path is None:
            raise ConfigError("weights must be a directory that all processes can read, got arrays of one; save them")
        make = prepare_params(self.config, self.arch, given, self.cores[0].runner.param_shapes)
        progressed: dict[str, RequestOutput] = {}
        while running == "finish" and self.has_unfinished():
            progressed |= {output.request_id: output for output in self.step()}
        for group in self._groups.values():
            self._restart(group)
        if self._peers is not None and path is not None:
            self._peers.tell(WeightsRead(path))
        self._replace_weights(make)
        return list(progressed.values())

    def _restart(self, group: RequestGroup) -> None:
        for request in group.requests:
            if request in self._group_of:
                self._let_go(request, FinishReason.ABORT)
        requests = group.restart()
        self._group_of.update(dict.fromkeys(requests, group))
        self._placement.add(requests)

    def _read_weights(self, path: str) -> None:
        self._replace_weights(prepare_params(self.config, self.arch, path, self.cores[0].runner.param_shapes))

    def _replace_weights(self, make: Callable[[], Params]) -> None:
        self._has_weights = False
        try:
            for core in self.cores:
                core.replace_weights({})  # there may not be room for both
            replicas = copies(make(), [core.runner.mesh for core in self.cores])
        except BaseException:
            for request_id in list(self._groups):
                self.abort(request_id)
            raise
        for core, params in zip(self.cores, replicas, strict=True):
            core.replace_weights(params)
        self._has_weights = True

    def wait_until_warm(self) -> None:
        """Block until every program is compiled (see EngineConfig.compile_ahead)."""
        for core in self.cores:
            core.runner.programs.wait_until_warm()

    def close(self) -> None:
        """Abort all requests, stop compiling, and free weights and pools. Nothing can be served any more."""
        self._is_closed = True
        for request_id in list(self._groups):
            self.abort(request_id)
        for core in self.cores:
            core.close()

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLM.sleep`."""
        self._check_open()
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        if self._peers is not None:
            raise ConfigError("an engine of several processes cannot sleep; close it")
        if self.has_unfinished():
            raise RequestError(f"all requests must have ended before sleep, got {len(self._groups)} unfinished")
        for core in self.cores:
            core.sleep(keep_weights=level == 1 and self._has_weights)
        self._has_weights = self._has_weights and level == 1
        self._asleep = set(SLEEP_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the devices' memory again; see `LLM.wake_up`."""
        self._check_open()
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if isinstance(tags, str) or not wanted <= set(SLEEP_TAGS):
            raise ConfigError(f"tags must be a list of some of {list(SLEEP_TAGS)}, got {tags!r}")
        for core in self.cores:
            if "weights" in wanted & self._asleep:
                core.runner.wake_weights()
            if "kv_cache" in wanted & self._asleep:
                core.runner.wake_state()
        self._asleep -= wanted

    @property
    def is_sleeping(self) -> bool:
        """Return True while memory that `sleep` has freed is not all taken again."""
        self._check_open()
        return bool(self._asleep)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed: its weights and pools are freed; start another one")

    @property
    def is_follower(self) -> bool:
        """Whether another process leads: all that there is to do then is to `follow`."""
        return isinstance(self._peers, Follower)

    def follow(self) -> None:
        """Do what the leading process does, until that ends. Ends the process where that cannot go on."""
        assert isinstance(self._peers, Follower), "the first process leads"
        try:
            follow(self.cores[0], self._peers.events(), self._read_weights)
        except Exception as error:
            traceback.print_exc()
            self._peers.fail(repr(error))

    def check_integrity(self) -> None:
        """Raise AssertionError if a page, slot or request is lost or shared; for tests and audits."""
        for core in self.cores:
            core.scheduler.check_integrity()
        self._placement.check_integrity(request.request_id for request in self._group_of)

    @cached_property
    def ceilings(self) -> Ceilings:
        """The limits of the device in use, by which `stats.split` and `last_step.split` account for wall time.

        Measured when first asked for, unless the user's cache has them: after all compiling, in under a second.
        """
        self.wait_until_warm()  # compiling beside it would make the device look slower
        return device_ceilings(compute_dtype(self.config, self.arch))

    @property
    def last_step(self) -> StepStats | None:
        """Account of the step that ended last, of any replica."""
        return max(self.cores, key=lambda core: core.accounts.last_end_s).accounts.last_step

    @property
    def num_running(self) -> int:
        """Requests that have pages and a slot."""
        return sum(core.scheduler.num_running for core in self.cores)

    @property
    def num_waiting(self) -> int:
        """Requests that have no pages and no slot, new or preempted."""
        return self._placement.num_queued + sum(core.scheduler.num_waiting for core in self.cores)

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests hold."""
        return sum(core.scheduler.num_pages_used for core in self.cores)

    @property
    def num_pages(self) -> int:
        """Pages in the pools of all replicas."""
        return sum(core.scheduler.num_pages for core in self.cores)

    def _check(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> None:
        if request_id in self._groups:
            raise RequestError(f"request_id must be unique among unfinished requests, got {request_id!r} again")
        longest, vocab = self.schedule.max_model_len, self.arch.vocab_size
        if not token_ids:
            raise RequestError("a prompt must have at least 1 token, got 0; begin it with any text or token")
        if len(token_ids) >= longest:
            raise RequestError(
                f"a prompt must have fewer than max_model_len tokens, got {len(token_ids)} with "
                f"max_model_len {longest}; shorten it{self._advice_on_length()}"
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
        if params.bad_words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer; use logit_bias, or drop skip_tokenizer_init")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids, or drop skip_tokenizer_init")

    def _check_logprobs(self, params: SamplingParams) -> None:
        most, vocab = self.config.max_logprobs, self.arch.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name) or 0
            if (vocab if asked == -1 else asked) > (vocab if most == -1 else most):
                needed = asked if 0 < asked <= LARGEST_MAX_LOGPROBS else -1
                raise RequestError(
                    f"{name} must be at most max_logprobs of the engine, or the size of the vocabulary, got {asked} "
                    f"with max_logprobs {most} and {vocab} tokens; start the engine with max_logprobs={needed}"
                )

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
        bad_sequences: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self.tokenizer:
            bad_sequences = encode_bad_words(params.bad_words, partial(self.tokenizer.encode, add_special_tokens=False))
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
                bad_sequences=bad_sequences,
                salt=namespace.encode(errors="surrogatepass"),
                read_prefix_cache=index > 0 or params.prompt_logprobs is None,
                arrival=self._num_groups,
            )
            for index in range(params.n)
        ]

    # Steps

    def step(self) -> list[RequestOutput]:
        """Plan and dispatch one step, and collect the one before it (or this one, without `step_ahead`).

        With several replicas, of each that need not wait for its devices. Returns the requests that progressed:
        cumulative outputs, final where `finished`.
        """
        self._placement.place()
        self.last_steps = []
        progressed: dict[str, RequestOutput] = {}
        while cores := self._placement.next_cores():
            worked = [self._step(core, progressed) for core in cores]
            if any(worked) or self._placement.is_lone:
                break
        return list(progressed.values())

    def _step(self, core: EngineCore, progressed: dict[str, RequestOutput]) -> bool:
        """One step of one replica, which adds to `progressed`; whether anything was dispatched or read."""
        with self._aborting_on_failure(core):
            try:
                planned = core.dispatch()
                self._note_admitted(planned)
            finally:  # while the device runs what was just dispatched
                self.last_steps += core.accounts.write(self.num_waiting)
        keep = 1 if planned and self.config.step_ahead else 0
        if not self._placement.is_lone:  # others need not wait for it
            keep = max(keep, core.num_running_steps)
        read = self._read(core) if len(core.in_flight) > keep else None
        if read is not None:
            with self._aborting_on_failure(core):
                progressed |= self._deliver(read)
        if not core.scheduler.has_unfinished():
            core.drop_in_flight()
        if not core.in_flight:
            self.last_steps += core.accounts.write(self.num_waiting)
        return bool(planned or read)

    def _note_admitted(self, plan: StepPlan | None) -> None:
        for request in plan.admitted if plan is not None else ():
            if (group := self._group_of.get(request)) is not None:
                group.admitted(request)

    @contextlib.contextmanager
    def _aborting_on_failure(self, core: EngineCore) -> Iterator[None]:
        """End a replica's requests when a step breaks off: plans, pages and device then differ in what was computed."""
        try:
            yield
        except BaseException:
            samples = set(self._placement.ids_on(core))
            groups = [group for request, group in self._group_of.items() if request.request_id in samples]
            for request_id in {group.output.request_id for group in groups}:
                self.abort(request_id)
            self._recover(core)
            raise

    def _recover(self, core: EngineCore) -> None:
        if isinstance(self._peers, Leader):  # the others have done what this process broke off
            self._peers.fail(repr(sys.exception()))
        core.recover()

    def _read(self, core: EngineCore) -> Progress:
        """Wait for the oldest step in flight, and let the scheduler know its tokens."""
        try:
            result = core.wait()
        except Exception:  # whatever the device reports; KeyboardInterrupt passes
            with self._aborting_on_failure(core):
                raise
        with self._aborting_on_failure(core):
            return core.update(result)

    def _deliver(self, step: Progress) -> dict[str, RequestOutput]:
        """Hand out what was read: text, log probabilities, ends. By the id of the request."""
        result, now_s = step.result, time.monotonic()
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.plan, result.prompt_logprobs)
        logprobs = None if result.logprobs is None else _by_token(result.logprobs)
        width = 0 if result.logprobs is None else result.logprobs.logprob.shape[1]
        row_of = {} if logprobs is None else {request: row for row, request in enumerate(step.plan.requests)}
        outputs, num_output_tokens = {}, 0
        for request, num_tokens in step.progressed.items():
            group = self._group_of.get(request)
            if group is None:  # a stop string has ended it
                continue
            first = row_of.get(request, 0) * width
            num_before = group.num_output_tokens(request)
            stop = group.append(request, num_tokens, now_s, logprobs, range(first, first + num_tokens))
            num_new = group.num_output_tokens(request) - num_before
            self.stats.num_wasted_tokens += num_tokens - num_new  # those behind a stop string
            if stop is not None:
                self._finish(request, FinishReason.STOP, stop)
            elif request.status is RequestStatus.FINISHED:
                self._finish(request)
            outputs[group.output.request_id] = group.output
            num_output_tokens += num_new
        self.stats.num_output_tokens += num_output_tokens
        return outputs

    def _collect_prompt_logprobs(self, plan: StepPlan, logprobs: TokenLogprobs) -> None:
        token = 0  # first of the row on the step's token axis
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            group = self._group_of.get(request)
            if group is not None and wants_prompt_logprobs(request, start):
                ids = request.prompt_token_ids[start + 1 : start + 1 + count]  # what is predicted lies one further
                group.append_prompt_logprobs(start + 1, ids, logprobs, token)
            token += count

    def _finish(self, request: Request, reason: FinishReason | None = None, stop_string: str | None = None) -> None:
        """Let go of a sample that has ended, or ends now for `reason`."""
        group = self._let_go(request, reason)
        if group.finish(request, stop_string):
            del self._groups[group.output.request_id]
            self.stats.num_finished += 1

    def _let_go(self, request: Request, reason: FinishReason | None) -> RequestGroup:
        self._placement.finish(request, reason)
        return self._group_of.pop(request)


def _by_token(logprobs: TokenLogprobs) -> TokenLogprobs:
    """Log probabilities of rows and rounds, on one axis of tokens."""
    num_axes, num_tokens = logprobs.logprob.ndim, logprobs.logprob.size
    return jax.tree.map(lambda x: x.reshape(num_tokens, *x.shape[num_axes:]), logprobs)


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
