"""LLM: offline interface with vLLM's calls `generate` and `chat` over lists, and `stream` for one prompt."""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.metrics import Metric, vllm_metrics
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.api.vllm_options import GENERATE_ARGUMENTS, check_arguments, engine_options
from jaxserve.assembly.engine import Engine
from jaxserve.assembly.parameters import Weights
from jaxserve.core.batch_engine import OfflineEngine
from jaxserve.core.prompt import Prompt
from jaxserve.core.threads import EngineThreads
from jaxserve.errors import RequestError, brief
from jaxserve.models.params import Params
from jaxserve.offline.beam_search import BeamSearchOutput, BeamSearchParams, search
from jaxserve.offline.offline_calls import (
    Adapters,
    Calls,
    ProgressBar,
    as_list,
    listed,
    lora_requests,
    per_prompt,
    priorities,
)
from jaxserve.offline.pooling_calls import PoolingCalls, require_tokenizer
from jaxserve.offline.saved_sessions import SavedSessions
from jaxserve.text.image_chats import encode_placeholders, split_images
from jaxserve.text.loading import load_hf_tokenizer
from jaxserve.text.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(PoolingCalls):
    """Model that is ready to generate.

    In a run with many processes (`jaxserve.distributed.initialize`) only the first one gets an LLM. In the others the
    constructor serves the first process until that ends, and then ends its own process.

    Args:
        model: directory of a Hugging Face checkpoint; None loads the embedded default.
        tokenizer: tokenizer directory; None for the model's.
        skip_tokenizer_init: accept only token ids as prompts.
        options: further fields of EngineConfig, and vLLM options with values that jaxserve implements anyway (see
            `vllm_options.VLLM_OPTIONS`).

    Raises:
        ConfigError: the checkpoint or an option is not supported.
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
        """Return an LLM that drives an existing engine, which nothing else may step."""
        llm = cls.__new__(cls)
        llm._drive(engine)
        return llm

    def _drive(self, engine: Engine) -> None:
        """Start threads that drive the engine; in a following process, follow the leading one until it ends."""
        self.engine = engine
        engine.host.follow()
        self._threads = EngineThreads(engine)
        self._calls = Calls(engine, self._threads)
        self._hf_tokenizer: PreTrainedTokenizerBase | None = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of weights and KV pool and stop compiling; unfinished calls of other threads fail.

        Dropping the last reference to an LLM does the same. Calls of a closed LLM raise RuntimeError.
        """
        with self._threads.paused(settles=False) as engine:
            engine.close()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the Hugging Face tokenizer, with `transformers`' own class, interface and defaults.

        It is loaded on first use, from the engine's tokenizer directory, and gives the same ids. Changing it does not
        affect the engine.

        Raises:
            ConfigError: there is no tokenizer, because of `skip_tokenizer_init`.
        """
        require_tokenizer(self.engine)
        if self._hf_tokenizer is None:
            self._hf_tokenizer = load_hf_tokenizer(self.engine.config.tokenizer_path)
        return self._hf_tokenizer

    def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; return True, as vLLM does on success."""
        with self._threads.paused() as engine:
            engine.reset_prefix_cache()
        return True

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the defaults in the checkpoint's generation_config.json."""
        return self.engine.default_sampling_params.clone()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        *,
        lora_request: Adapters = None,
        priority: int | Iterable[int] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts and return their outputs in the same order.

        Args:
            prompts: one or many: text, token ids, {"prompt": ...} or {"prompt_token_ids": [...]}. Many come as a list
                or any other ordered iterable, such as a generator or a pandas or datasets column.
            sampling_params: one for all, or one per prompt; default `get_default_sampling_params()`.
            use_tqdm: True to show a progress bar with tokens per second, or a callable with the arguments of `tqdm`.
            lora_request: LoRA adapter for all prompts, or one for each; None for the base model. Needs `enable_lora`.
            priority: class of all prompts or of each, with `scheduling_policy="priority"`; lower numbers go first.
            vllm_arguments: further vLLM arguments with values that jaxserve implements anyway, such as
                tokenization_kwargs=None.

        Raises:
            RequestError: a prompt or its parameters cannot be served; the message names it, and no prompt is started.
        """
        check_arguments(vllm_arguments, GENERATE_ARGUMENTS)
        many = as_list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        all_params = per_prompt(params, SamplingParams, "sampling_params", len(many))
        adapters = lora_requests(lora_request, len(many))
        return self._calls.run(many, all_params, use_tqdm, priorities(priority, len(many)), adapters)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        chat_template_content_format: str | None = None,
        continue_final_message: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        priority: int | Iterable[int] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each in a list, rendered with a chat template.

        Args:
            messages: one conversation or many; contents are strings or lists of text parts.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            chat_template: Jinja source, or the name of one of the tokenizer's templates; None for the engine's.
            add_generation_prompt: True to end the prompt with the header of an answer.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: further template variables.
            chat_template_content_format: "auto", "string" or "openai"; None for the engine's option.
            continue_final_message: True to have the last message continued, with add_generation_prompt=False.
            mm_processor_kwargs: image processor settings for these conversations.
            lora_request: see `generate`.
            priority: see `generate`.
            vllm_arguments: see `generate`.

        Raises:
            RequestError: a conversation or its parameters cannot be served, and none is started.
        """
        check_arguments(vllm_arguments, GENERATE_ARGUMENTS)
        tokenizer = require_tokenizer(self.engine)
        for name, given in (
            ("chat_template_kwargs", chat_template_kwargs),
            ("mm_processor_kwargs", mm_processor_kwargs),
        ):
            if not isinstance(given, Mapping | None):
                raise RequestError(f"{name} must be a dict, got {brief(given)}")
        variables = {"add_generation_prompt": add_generation_prompt} | ({"tools": tools} if tools else {})
        variables |= chat_template_kwargs or {}
        render = partial(
            tokenizer.render_chat,
            variables=variables,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            continue_final_message=continue_final_message,
        )
        reader, prompts = self.engine.reader.images, list[Prompt]()
        for conversation in _as_conversations(messages):
            split = split_images(conversation, reader, mm_processor_kwargs)
            chat = render(split.messages)
            token_ids = encode_placeholders(tokenizer, chat, reader, split.inputs)
            prompts.append({"prompt": chat.text, "prompt_token_ids": token_ids, **split.inputs.in_prompt()})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | ProgressBar = False,
        concurrency_limit: int | None = None,
        lora_request: Adapters = None,
        **vllm_arguments: Any,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, as found by transformers' beam search: see `beam_search`.

        Args:
            prompts: see `generate`.
            params: search parameters for all prompts.
            use_tqdm: see `generate`; the bar counts prompts.
            concurrency_limit: maximum number of prompts searched simultaneously; None for all.
            lora_request: see `generate`.
            vllm_arguments: see `generate`.

        Raises:
            RequestError: a prompt or the parameters cannot be served; the message names it, and no prompt is started.
        """
        check_arguments(vllm_arguments, GENERATE_ARGUMENTS)
        many = as_list(prompts)
        adapters = lora_requests(lora_request, len(many))
        return search(self.engine, self._calls, many, params, concurrency_limit, use_tqdm, adapters)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding increments: each output contains only new text and ids.

        The request is queued when the first increment is requested; closing the iterator early aborts it.

        Raises:
            RequestError: the prompt or its parameters cannot be served; raised with the first increment.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        all_params = per_prompt(params, SamplingParams, "sampling_params", 1)
        (group,) = self._calls.prepare([prompt], all_params, (), lora_requests(lora_request, 1))
        output, reader = group.output, OutputReader(group.output)
        news: SimpleQueue[None] = SimpleQueue()
        try:
            self._threads.submit([group], self._threads.waker.listener(news))
            finished = False
            while not finished:
                news.get()
                with self.engine.frontend.lock:  # excludes concurrent updates of the outputs
                    group.check_served()
                    if output.metrics.num_restarts:
                        raise RequestError("the request was restarted with other weights: what was streamed is void")
                    finished = output.finished
                    increments = reader.read()
                    increment = _with_increments(output, increments) if finished or increments else None
                if increment is not None:
                    yield increment
        finally:
            self._calls.cancel([group])

    # Adapters

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Load a LoRA adapter before the first request that names it.

        Raises:
            RequestError: it cannot be read, or does not fit the model; nothing has changed.
        """
        self.engine.adapters.load(lora_request)

    def update_lora(self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Load a LoRA adapter without files, or replace the one with this name, for example after a training step.

        Unfinished requests continue with the old one; nothing is compiled.

        Args:
            name: name for `LoRARequest`.
            tensors: numpy, jax or torch arrays by the names in adapter_model.safetensors.
            config: content of adapter_config.json, with at least `lora_alpha` and `r`.

        Raises:
            RequestError: it does not fit the model; nothing has changed.
        """
        self.engine.adapters.put(name, config, tensors)

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter, whose name is free again; unfinished requests continue with it.

        Raises:
            RequestError: no adapter has this name.
        """
        if self.engine.adapters.remove(name) is None:
            raise RequestError(f"there is no adapter {name!r}; loaded are {self.list_loras()}")

    def list_loras(self) -> list[str]:
        """Return the names of the loaded LoRA adapters."""
        return list(self.engine.adapters)

    def batch_engine(self) -> OfflineEngine:
        """Return the engine with the interface that `run_batch` uses, which also accepts the LLM itself.

        Other calls of the LLM may run alongside.
        """
        return OfflineEngine(self.engine, self._threads)

    def get_metrics(self) -> list[Metric]:
        """Return counters and gauges under vLLM's names, including speculative decoding."""
        return vllm_metrics(self.engine.stats, self.engine.occupancy)

    @property
    def params(self) -> Params:
        """Weights in use, in the layout of the programs, which `update_weights` need not copy."""
        return self.engine.host.params

    def update_weights(self, weights: Weights, *, running: str = "finish") -> None:
        """Replace the weights by others of the same model. Compiles nothing; the prefix cache is emptied.

        A draft model, draft layer or heads keep their weights, so fewer drafts may be accepted.

        Args:
            weights: one of three types. A tree like `params`: arrays with the same shardings are used without a copy,
                and must not be donated afterwards. Numpy, jax or torch arrays by their names in a checkpoint, or the
                tree returned by `weights.load`: they are converted like a checkpoint while the old weights still take
                memory, and remain the caller's. Or a directory: the old weights are freed before it is read, so that
                both are never in memory simultaneously.
            running: treatment of unfinished requests. "finish" completes them with the old weights first; "restart"
                restarts them from their prompts with the new weights, and ends their `stream`s with an error.

        Raises:
            ConfigError: the weights do not fit the model, and nothing has changed; or, in a run with many processes,
                `weights` is not a directory.
        """
        with self._threads.paused() as engine:
            engine.update_weights(weights, running=running)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV pool until `wake_up`, for example for a trainer on the same devices.

        Nothing is recompiled afterwards; the prefix cache is emptied.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and `update_weights` must follow `wake_up`.

        Raises:
            RequestError: there are unfinished requests.
            ConfigError: the run has several processes, or the level does not exist.
        """
        with self._threads.paused() as engine:
            engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving after `sleep`.

        Args:
            tags: parts to restore: "weights", to update them before the pool takes memory, or "kv_cache". None for
                both.
        """
        with self._threads.paused() as engine:
            engine.host.wake_up(tags)

    @property
    def sessions(self) -> SavedSessions:
        """Conversations that outlive the engine."""
        return SavedSessions(self.engine, self._calls)

    @property
    def is_sleeping(self) -> bool:
        """True if weights or KV pool are asleep, so that requests are refused."""
        return self.engine.host.memory.is_sleeping


def _as_conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[Message]]:
    """Return the conversations as a list; the argument may be a single one."""
    many = listed(messages)
    if many is None:
        raise RequestError(f"messages must be a list of dicts, or a list of such lists, got {brief(messages)}")
    are_messages = [isinstance(entry, Mapping) for entry in many]
    if all(are_messages) and many:
        return [many]
    conversations = [listed(entry) for entry in many]
    if any(are_messages) or None in conversations:
        raise RequestError(f"messages must be a list of dicts, or a list of such lists, got both in {brief(messages)}")
    return [conversation for conversation in conversations if conversation is not None]


def _with_increments(output: RequestOutput, increments: Sequence[Increment]) -> RequestOutput:
    """Return `output` with only the new text and ids of each completion."""
    new = [
        dataclasses.replace(completion, text="", token_ids=[], logprobs=None, metrics=copy.copy(completion.metrics))
        for completion in output.outputs
    ]
    for each in increments:
        part = new[each.completion.index]
        part.text, part.token_ids = each.text, each.token_ids
        part.logprobs = None if each.logprobs is None else list(each.logprobs)
    for part, completion in zip(new, output.outputs, strict=True):
        if part.logprobs is None and completion.logprobs_since(0, 0) is not None:
            part.logprobs = []
    return dataclasses.replace(output, outputs=new)
