"""Service: an engine and its server's state, shared by all handlers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.openai.chat_formats import chat_format
from jaxserve.openai.context import BodyContext, allow_any
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import prompt_field
from jaxserve.openai.interfaces import parse
from jaxserve.openai.replies import system_fingerprint
from jaxserve.server.adapters import Adapters
from jaxserve.server.admission import Admission
from jaxserve.server.auth import Keys
from jaxserve.server.health import Health
from jaxserve.server.observer import Observer
from jaxserve.server.streams import Streams
from jaxserve.server.traces import Traces
from jaxserve.server.workers import Workers

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.server.call import Call
    from jaxserve.server.config import ServerConfig


class Service:
    """Engine and state of a server.

    Args:
        engine: engine that nothing else drives.
        config: options of the server.

    Attributes:
        engine: the engine.
        config: options of the server.
        model_names: the model's names; replies have the first.
        observer: times and counts.
        traces: request spans; None if they are off.
        health: watch over the engine.
        fingerprint: the engine configuration's name in replies.
        context: the model and the options with which bodies are read.
        keys: API keys.
        adapters: LoRA adapters by name.
        admission: gate of requests.
        is_draining: True once no further requests are served.
        workers: threads for work that would hold the event loop.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine, self.config = engine, config
        own = Path(engine.config.model or engine.config.model_path).name
        self.model_names = tuple(config.served_model_name) or (own,)
        self.fingerprint = system_fingerprint(engine.config)
        self.observer = Observer(engine, self.model_names[0])
        self.traces = Traces.from_endpoint(self.model_names[0], config.otlp_traces_endpoint)
        self.health = Health(engine, config.stuck_after_s)
        self.keys = Keys.read(config.api_key, config.api_key_file)
        self.admission = Admission(engine, config, self.observer, self.keys.limits)
        self.observer.degradations = self.admission.ladder.num_climbs
        self.is_draining = False
        self.workers = Workers()
        templates = engine.tokenizer.chat_template.values() if engine.tokenizer is not None else ()
        form = chat_format(templates, config.tool_call_parser, config.reasoning_parser)
        if config.enable_auto_tool_choice and not form.has_calls:
            raise ConfigError("enable_auto_tool_choice needs a known format of calls; give --tool-call-parser")
        self.context = BodyContext(
            self.model_names[0],
            self.model_names,
            engine.tokenizer,
            engine.default_sampling_params,
            may_stream=True,
            chat_format=form,
            check_prompt=engine.reader.check_text,
            check_len=engine.reader.check_len,
            response_role=config.response_role,
            takes_templates=config.trust_request_chat_template,
            max_model_len=engine.schedule.max_model_len,
            pooler=engine.arch.pooler,
            max_prompts=config.max_prompts,
            adapters=engine.adapters,
            images=engine.reader.images,
        )
        self.adapters = Adapters(engine, config, self.model_names)
        self._streams: Streams | None = None

    def start(self) -> None:
        """Start the engine's threads and the watches; to be called on the event loop."""
        self._streams = Streams(self.engine, self.observer)
        self.health.watch()
        self.admission.start(self._streams)

    def close(self) -> None:
        """Stop the threads and watches that `start` began."""
        self.health.close()
        self.admission.close()
        if self.traces is not None:
            self.traces.close()
        self.streams.close()
        self.workers.close()

    def parse(self, url: str, body: Json, *, call: Call | None = None, is_counted: bool = False) -> ParsedRequest:
        """Return the request in a body as OpenAI has it; RequestError if it cannot be served. On any thread.

        Args:
            url: endpoint, COMPLETIONS, CHAT or one for vectors.
            body: the body.
            call: the HTTP request; None if no client waits for it.
            is_counted: True to count only its prompt tokens, which may be too many.
        """
        context = self.context
        if is_counted:
            context = dataclasses.replace(context, check_prompt=allow_any, check_len=allow_any, max_model_len=None)
        if call is not None:
            context = dataclasses.replace(context, check_len=call.checked(context.check_len), salt=call.salt)
        request = parse(url, body, context)
        return request if request.pooling is not None else self.with_options(request)

    def with_options(self, request: ParsedRequest) -> ParsedRequest:
        """Return a request that generates text with the server's options applied, such as the limit of tokens."""
        limit, params = self.engine.output_limits.limit(request.params.max_tokens), request.params
        forces_usage = self.config.enable_force_include_usage and request.stream
        return dataclasses.replace(
            request,
            params=params if limit == params.max_tokens else params.clone({"max_tokens": limit}),
            tokens_as_ids=request.tokens_as_ids or self.config.return_tokens_as_token_ids,
            include_usage=request.include_usage or forces_usage,
            continuous_usage=request.continuous_usage or forces_usage,
            shows_metrics=self.config.enable_per_request_metrics,
        )

    def for_batch_line(self, request: ParsedRequest) -> ParsedRequest:
        """Return the request in a batch line with the server's options; BadRequestError if it has too many samples."""
        self.check_size(request)
        return request if request.pooling is not None else self.with_options(request)

    def check_size(self, request: ParsedRequest) -> None:
        """Raise BadRequestError for a request with too many prompts or samples."""
        field = prompt_field(request.url)
        if len(request.prompts) > self.config.max_prompts:
            message = f"{field} must be at most {self.config.max_prompts} prompts, got {len(request.prompts)}"
            raise BadRequestError(message, field)
        num_samples = len(request.prompts) * request.params.n
        if num_samples > self.max_samples:
            message = f"a request must have at most {self.max_samples} samples of all its prompts, got {num_samples}"
            raise BadRequestError(message, "n" if request.params.n > 1 else field)

    @property
    def streams(self) -> Streams:
        """The open streams; to be used after `start`."""
        assert self._streams is not None, "the server has begun"
        return self._streams

    @property
    def max_samples(self) -> int:
        """Maximum number of samples that run or wait."""
        return self.num_slots + self.config.max_queued_requests

    @property
    def num_slots(self) -> int:
        """Maximum number of samples that run, in all replicas."""
        return self.engine.schedule.max_num_seqs * self.engine.config.data_parallel_size
