"""LLM: the offline interface. vLLM's calls: generate and chat over lists, stream for one prompt."""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.build import Weights
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import RequestGroup
from jaxserve.engine.prompt import Prompt
from jaxserve.engine.threads import EngineThreads
from jaxserve.errors import ConfigError, PeerLostError, RequestError
from jaxserve.models.params import Params
from jaxserve.request import RequestOutput, SamplingParams, brief
from jaxserve.tokenizer import Tokenizer, load_hf_tokenizer
from jaxserve.vllm_options import CHAT_ARGUMENTS, GENERATE_ARGUMENTS, check_arguments, engine_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
ProgressBar = Callable[..., Any]  # tqdm, or what makes one: functools.partial(tqdm, leave=False)


class LLM:
    """A model ready to generate.

    In a run over many processes (`jaxserve.distributed.initialize`) the first one gets it. In the others this works for
    the first one until that ends, and then ends the process.

    Args:
        model: directory of a Hugging Face checkpoint; None loads the embedded default.
        tokenizer: directory of the tokenizer; None takes the model's.
        skip_tokenizer_init: work on token ids alone.
        options: any further field of EngineConfig, and vLLM's options where they ask for what jaxserve does anyway (see
            `vllm_options.VLLM_OPTIONS`).

    Raises:
        ConfigError: the checkpoint or an option is not usable.
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        self._drive(Engine(EngineConfig(model, tokenizer, skip_tokenizer_init, **engine_options(options))))

    @classmethod
    def over(cls, engine: Engine) -> "LLM":
        """Return the interface of an engine that nothing else steps."""
        llm = cls.__new__(cls)
        llm._drive(engine)
        return llm

    def _drive(self, engine: Engine) -> None:
        self.engine = engine
        if engine.is_follower:
            engine.follow()
            raise SystemExit(0)
        self._threads = EngineThreads(engine)
        self._ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of weights and KV pool and stop compiling; unfinished calls of other threads fail.

        The same happens when the last reference to an LLM goes. Whatever is asked of a closed one is a RuntimeError.
        """
        with self._threads.paused() as engine:
            engine.close()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer as Hugging Face has it: `transformers`' own class, interface and defaults.

        It is loaded when first asked for, from the directory of the one that the engine uses, and gives the same ids.
        Changes to it do not affect the engine.

        Raises:
            ConfigError: there is none, because of `skip_tokenizer_init`.
        """
        self._engine_tokenizer()
        return self._hf_tokenizer

    @cached_property
    def _hf_tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_hf_tokenizer(self.engine.config.tokenizer_path)

    def _engine_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ConfigError("there is no tokenizer; drop skip_tokenizer_init")
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; returns True, as vLLM does where that succeeds."""
        with self._threads.paused() as engine:
            engine.reset_prefix_cache()
        return True

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json recommends."""
        return self.engine.default_sampling_params.clone()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs in the order of the prompts.

        Args:
            prompts: one or many: text, token ids, {"prompt": ...} or {"prompt_token_ids": [...]}.
            sampling_params: one for all, or one per prompt; default `get_default_sampling_params()`.
            use_tqdm: show a progress bar with tokens per second; a callable with the arguments of `tqdm` makes it.
            vllm_arguments: further arguments of vLLM's, where they ask for what jaxserve does anyway, as
                lora_request=None does.

        Raises:
            RequestError: a prompt or its parameters cannot be served; names it, and none has been started.
        """
        check_arguments(vllm_arguments, GENERATE_ARGUMENTS)
        many = _as_list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        groups = self._prepare(many, _per_prompt(params, len(many)))
        ended: SimpleQueue[RequestGroup] = SimpleQueue()
        try:
            self._threads.submit(groups, lambda group: ended.put(group) if group.output.finished else None)
            self._wait(ended, len(groups), use_tqdm)
        finally:  # an interrupted call must not leave requests behind
            self._cancel(groups)
        return [group.output for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, rendered with the tokenizer's chat template; see `generate`."""
        check_arguments(vllm_arguments, CHAT_ARGUMENTS)
        tokenizer = self._engine_tokenizer()
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise RequestError(f"chat_template_kwargs must be a dict, got {brief(chat_template_kwargs)}")
        variables = {"add_generation_prompt": add_generation_prompt} | ({"tools": tools} if tools else {})
        variables |= chat_template_kwargs or {}
        texts = [tokenizer.render_chat(chat, variables, chat_template) for chat in _as_conversations(messages)]
        prompts = [{"prompt": t, "prompt_token_ids": tokenizer.encode(t, add_special_tokens=False)} for t in texts]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding increments: each output's text and ids hold only what is new.

        The request is queued when the first increment is asked for; closing the iterator early aborts it.

        Raises:
            RequestError: with the first increment, where the prompt or its parameters cannot be served.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (group,) = self._prepare([prompt], _per_prompt(params, 1))
        output, sent = group.output, [_Sent() for _ in group.output.outputs]
        news: SimpleQueue[None] = SimpleQueue()
        try:
            self._threads.submit([group], partial(self._threads.wakes.note, news))
            finished = False
            while not finished:
                news.get()
                with self.engine.frontend.lock:  # the next tokens may be coming
                    _check_served(group)
                    if output.metrics.num_restarts:
                        raise RequestError("the request was restarted with other weights: what was streamed is void")
                    finished = output.finished
                    increment = _increment(output, sent) if finished or _has_news(output, sent) else None
                if increment is not None:
                    yield increment
        finally:
            self._cancel([group])

    @property
    def params(self) -> Params:
        """The weights in use, in the form that programs take them: the one that `update_weights` need not copy."""
        return self.engine.params

    def update_weights(self, weights: Weights, *, running: str = "finish") -> None:
        """Serve with other weights of the same model from now on. Compiles nothing; the prefix cache is emptied.

        Args:
            weights: one of three. A tree of the form of `params`: its arrays are used as they are, where they have the
                same shardings, and must not be donated to anything afterwards. Arrays by the names that they have in a
                checkpoint, or the tree that `weights.load` returns: they are converted as a checkpoint is, while the
                old weights are still there, and stay the caller's. Or a directory; the old weights are let go before
                it is read, so that both never need room.
            running: what becomes of unfinished requests. "finish" completes them with the old weights first; "restart"
                begins them again from their prompts with the new ones, and a `stream` of one ends with an error.

        Raises:
            ConfigError: they are not of this model, and nothing has changed; or, in a run over many processes, it is
                not a directory.
        """
        with self._threads.paused() as engine:
            engine.update_weights(weights, running=running)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV pool, until `wake_up`, for others such as a trainer on the same devices.

        Compiles nothing anew; the prefix cache is emptied.

        Args:
            level: 1 keeps the weights in the host's memory; 2 forgets them, and `update_weights` must follow `wake_up`.

        Raises:
            RequestError: there are unfinished requests.
            ConfigError: there are several processes, or no such level.
        """
        with self._threads.paused() as engine:
            engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serve again after `sleep`.

        Args:
            tags: only this part: "weights", to give others before the pool takes its room, or "kv_cache". None is both.
        """
        with self._threads.paused() as engine:
            engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, so that requests are refused."""
        return self.engine.is_sleeping

    def _prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestGroup]:
        """Read requests; RequestError names the prompt that cannot be served, and then none is queued."""
        self.engine.check_serves()
        groups = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                groups.append(self.engine.frontend.prepare(str(next(self._ids)), prompt, p))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return groups

    def _cancel(self, groups: Sequence[RequestGroup]) -> None:
        for group in groups:
            self.engine.frontend.cancel(group.request_id)

    def _wait(self, ended: "SimpleQueue[RequestGroup]", count: int, use_tqdm: bool | ProgressBar) -> None:
        new_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        tokens_in = tokens_out = 0
        started = time.monotonic()
        with new_bar(total=count, desc="Generating", unit="req") as bar:
            seen: set[str] = set()
            while len(seen) < count:
                group = ended.get()
                if group.request_id in seen:  # an interrupt elsewhere has let it be told twice
                    continue
                seen.add(group.request_id)
                _check_served(group)
                tokens_in += len(group.output.prompt_token_ids)
                tokens_out += sum(len(o.token_ids) for o in group.output.outputs)
                seconds = time.monotonic() - started
                rates = f"in {tokens_in / seconds:.0f} tok/s, out {tokens_out / seconds:.0f} tok/s"
                bar.set_postfix_str(rates, refresh=False)
                bar.update()


def _check_served(group: RequestGroup) -> None:
    """Raise what has ended a request before its time."""
    if isinstance(group.error, PeerLostError):
        raise group.error
    if group.error is not None:
        raise RuntimeError(f"the step that served this request broke off: {group.error!r}") from group.error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, which may itself be a list of ids, or many as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text, token ids, a dict, or a list of such prompts, got {brief(prompts)}")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """Return one conversation or many as a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list of dicts, or a list of such lists, got {brief(messages)}")
    if _are_conversations(messages):
        return messages
    if _is_conversation(messages):
        return [messages]
    raise RequestError(f"messages must be a list of dicts, or a list of such lists, got both in {brief(messages)}")


def _are_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> TypeGuard[Sequence[Sequence[Message]]]:
    return not any(isinstance(entry, Mapping) for entry in messages)


def _is_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> TypeGuard[Sequence[Message]]:
    return all(isinstance(entry, Mapping) for entry in messages)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams(...), or a list of them, got {brief(params)}")
    if len(params) != count:
        raise RequestError(f"sampling_params must be one for all or one per prompt, got {len(params)} for {count}")
    return list(params)


@dataclass(slots=True)
class _Sent:
    """How much of a completion a stream has given."""

    num_chars: int = 0
    num_tokens: int = 0


def _has_news(output: RequestOutput, sent: list[_Sent]) -> bool:
    return any(len(now.token_ids) > before.num_tokens for now, before in zip(output.outputs, sent, strict=True))


def _increment(output: RequestOutput, sent: list[_Sent]) -> RequestOutput:
    """What `output` has beyond `sent`, which is brought up to date."""
    new = []
    for now, before in zip(output.outputs, sent, strict=True):
        text = now.text_since(before.num_chars)
        new.append(
            dataclasses.replace(
                now,
                text=text,
                token_ids=now.token_ids[before.num_tokens :],
                logprobs=None if now.logprobs is None else now.logprobs[before.num_tokens :],
                metrics=copy.copy(now.metrics),
            )
        )
        before.num_chars += len(text)
        before.num_tokens = len(now.token_ids)
    return dataclasses.replace(output, outputs=new)
