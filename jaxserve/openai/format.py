"""Parsing of request bodies: the fields of all paths, and completions and chats as prompts with sampling parameters.

A body may have the fields of OpenAI's API that this engine supports, and vLLM's further sampling parameters. Labels of
the caller, such as `user`, are ignored, and fields of unsupported features may have the value that switches them off.
Any other field is an error. A null means "not given": then the checkpoint's recommended sampling parameters apply.
"""

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from jaxserve.api import schema
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.schema import FieldType
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import BusyError, FaultError, PromptTooLongError, RequestError, brief
from jaxserve.openai.chats import PROMPT_FIELDS, read_chat
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError, Json, check_output_len, error_in
from jaxserve.openai.fields import (
    ANY,
    DROPPED,
    INTEGER,
    LIST,
    OBJECT,
    SWITCH,
    TEXT,
    BodyField,
    BodyReader,
    ObjectFields,
    each,
    ignored,
    only,
)
from jaxserve.openai.kv_transfer import FIELD as KV_TRANSFER
from jaxserve.openai.kv_transfer import KVTransfer, read_transfer
from jaxserve.openai.prompts import Prompt, read_prompts
from jaxserve.openai.reuse_hints import HINT_FIELDS, read_hint
from jaxserve.openai.tools import MessageForm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, POOLING, CLASSIFICATION = "/v1/embeddings", "/pooling", "/classify"
SCORE_PATHS, RERANK_PATHS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")
SCORING_PATHS = (*SCORE_PATHS, *RERANK_PATHS)

SAMPLING = (  # fields that SamplingParams checks, under the same names
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
    *("truncate_prompt_tokens", "truncation_side"),
)
_MAX_LISTED = 8  # adapters named in an error
_REQUEST_ID = FieldType(
    "up to 128 letters, digits, dots and dashes",
    lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]{1,128}", value, re.ASCII) is not None,
)
_COMMON: ObjectFields = {  # fields of all bodies
    "model": TEXT,
    "user": ignored(TEXT),
    "priority": INTEGER,
    "cache_salt": BodyField(replace(schema.FILLED_TEXT, advice="; leave it out to share cached pages")),
    "request_id": BodyField(_REQUEST_ID, "unsupported_value"),
    "timeout": ANY,  # the server reads it
}
_IN_BATCHES: ObjectFields = {  # fields without effect in batch files
    "stream": only(False, why="a line of a batch file has a whole reply"),
    "stream_options": only(why="a line of a batch file has a whole reply"),
    "priority": only(0, why="all lines of a batch file are of one batch"),
    "request_id": only(why="a line of a batch file has custom_id"),
    KV_TRANSFER: only({}, why="a batch is computed by one server"),
}
_GENERATION: ObjectFields = {  # fields of both completions and chats
    **_COMMON,
    **each(ANY, *SAMPLING, "max_tokens"),
    **each(OBJECT, "response_format", "structured_outputs", "stream_options"),
    **each(SWITCH, "stream", "return_token_ids", "return_tokens_as_token_ids"),
    "safety_identifier": ignored(TEXT),
    **HINT_FIELDS,
    "metadata": ignored(OBJECT),
    "store": ignored(only(False)),
    "service_tier": ignored(only("auto", "default")),
    # vLLM's defaults, which some clients spell out
    **each(only(False), "use_beam_search", "watermarking", "return_token_offsets", "return_weight_versions"),
    **each(only({}), "vllm_xargs", "media_io_kwargs", "mm_processor_kwargs"),
    KV_TRANSFER: OBJECT,
    **each(only(True), "detokenize", "spaces_between_special_tokens"),
    **each(only(1), "length_penalty", "stream_interval"),
    "thinking_token_budget": only(-1),
    "routed_experts_prompt_start": only(0),
}
CHAT_FIELDS: ObjectFields = {
    **_GENERATION,
    **PROMPT_FIELDS,
    **each(ANY, "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
    **each(SWITCH, "logprobs", "echo", "return_prompt_text", "parallel_tool_calls", "include_reasoning"),
    "documents": LIST,
    "modalities": only(["text"]),
    "verbosity": ignored(TEXT),
    "prediction": ignored(OBJECT),
    "reasoning_effort": replace(TEXT, is_ignored=True),  # unless the template reads it
}
_VECTORS: ObjectFields = {**_COMMON, **PROMPT_FIELDS, "input": ANY, "padding": only("do_not_pad")}
_ENCODED: ObjectFields = {
    **_VECTORS,
    "encoding_format": BodyField(schema.one_of(("float", "base64"))),
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
}
POOLING_PARAMETERS = {  # fields that PoolingParams checks
    EMBEDDINGS: ("dimensions", "normalize", "use_activation", "truncate_prompt_tokens", "truncation_side"),
    POOLING: ("dimensions", "normalize", "use_activation", "truncate_prompt_tokens", "truncation_side", "task"),
    CLASSIFICATION: ("use_activation", "truncate_prompt_tokens", "truncation_side"),
}
_NUM_KEPT = BodyField(schema.integer(0, words="a non-negative integer, where 0 is no limit"))
_SCORES: ObjectFields = {
    **_COMMON,
    **each(ANY, "use_activation", "truncate_prompt_tokens", "documents"),
    **each(_NUM_KEPT, "max_tokens_per_query", "max_tokens_per_doc"),
}
_PAIRS: ObjectFields = {**_SCORES, **each(ANY, "queries", "items", "text_1", "text_2", "data_1", "data_2")}
_RANKED: ObjectFields = {**_SCORES, "query": ANY, "top_n": _NUM_KEPT, "return_documents": SWITCH}
_FIELDS: dict[str, ObjectFields] = {
    COMPLETIONS: {
        **_GENERATION,
        **each(ANY, "prompt", "logprobs"),
        **each(SWITCH, "echo", "add_special_tokens"),
        "suffix": only(""),
        "best_of": DROPPED,
    },
    CHAT: CHAT_FIELDS,
    EMBEDDINGS: {**_ENCODED, **each(ANY, *POOLING_PARAMETERS[EMBEDDINGS])},
    POOLING: {**_ENCODED, **each(ANY, *POOLING_PARAMETERS[POOLING])},
    CLASSIFICATION: {**_VECTORS, **each(ANY, *POOLING_PARAMETERS[CLASSIFICATION])},
    **dict.fromkeys(SCORE_PATHS, _PAIRS),
    **dict.fromkeys(RERANK_PATHS, _RANKED),
}
_STREAM_OPTIONS = {
    "include_usage": SWITCH,
    "continuous_usage_stats": SWITCH,
    "include_obfuscation": replace(SWITCH, is_kept=False),
}
_FORM_WORDS = frozenset(each.name for each in dataclasses.fields(StructuredOutputsParams))


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Prompts and parameters from a valid body.

    Attributes:
        url: path whose fields the body had.
        model: requested name of the model.
        prompts: prompts as text or token ids; a chat has one, rendered and encoded.
        params: sampling parameters.
        cache_salt: secret that restricts cached pages to requests with the same one; None for the common cache.
        top_logprobs: requested alternatives per chat token, -1 for all; None without log probabilities.
        echo: True if a completion's text begins with its prompt.
        has_output: False if only the prompt is wanted, with its log probabilities.
        return_token_ids: True to return token ids alongside the text.
        shows_prompt_logprobs: True to return prompt log probabilities in a field of their own.
        shows_metrics: True to return a completion's times.
        tokens_as_ids: True if log probabilities name tokens by their ids.
        request_id: requested name of the reply; empty for a generated one.
        stream: True to stream the reply.
        include_usage: True to end a stream with token counts.
        continuous_usage: True to send token counts with every chunk.
        tenant: name of the sender; empty if unknown.
        priority: scheduling class, lower numbers first; None if not given.
        form: format and tools with which a chat's generated text is read.
        role: role of a chat's generated message.
        echoed: text before the generated text in a chat's message.
        prompt_text: rendered prompt of a chat to return; None to leave it out.
        form_field: body field that constrains the output's structure, for error messages.
        pooling: pooling parameters; None if text is generated.
        is_base64: True if vectors are wanted as bytes in base64.
        labels: names of the classification head's labels.
        adapter: name of the LoRA adapter; None for the base model.
        reuse: expected next use of the prompt; None if the body has no hint.
        transfer: transfer of the prompt's pages between servers; None without one.
        ignored: accepted body fields without effect.
    """

    url: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    cache_salt: str | None = None
    top_logprobs: int | None = None
    echo: bool = False
    has_output: bool = True
    return_token_ids: bool = False
    shows_prompt_logprobs: bool = False
    shows_metrics: bool = False
    tokens_as_ids: bool = False
    request_id: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tenant: str = ""
    priority: int | None = None
    form: MessageForm = field(default_factory=MessageForm)
    role: str = "assistant"
    echoed: str = ""
    prompt_text: str | None = None
    form_field: str = "structured_outputs"
    pooling: PoolingParams | None = None
    is_base64: bool = False
    labels: tuple[str, ...] = ()
    adapter: str | None = None
    reuse: ReuseHint | None = None
    transfer: KVTransfer | None = None
    ignored: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_chat(self) -> bool:
        """True if the request is a chat, not a completion or a request for vectors."""
        return self.url == CHAT


def parse_body(url: str, body: object, context: BodyContext) -> ParsedRequest:
    """Parse the body of a completion or a chat; `url` is COMPLETIONS or CHAT.

    Raises:
        RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
    """
    given, common = read_fields(url, body, context)
    is_chat = url == CHAT
    with naming_fields(url, _form_field(given)):
        params = (_chat_params if is_chat else _completion_params)(given, context.defaults)
        check_output_len(given, context.max_model_len)
        chat = read_chat(given, context, params) if is_chat else None
    if chat is not None:
        common["ignored"] = tuple(sorted(({*common["ignored"]} - chat.prompt.honoured) | chat.prompt.ignored))
    options = _stream_options(given)
    if given.get("stream") and given.get("prompt_logprobs"):
        message = "prompt_logprobs must be left out, or 0, with stream: true, as only whole replies have them, got "
        raise BadRequestError(f"{message}{given['prompt_logprobs']}", "prompt_logprobs", "unsupported_value")
    return ParsedRequest(
        url,
        prompts=[chat.prompt.token_ids] if chat else read_prompts(given, "prompt", context),
        params=chat.params if chat else params,
        top_logprobs=params.logprobs if is_chat else None,
        echo=given.get("echo", False) and not is_chat,
        has_output=given.get("max_tokens") != 0,
        return_token_ids=given.get("return_token_ids", False),
        shows_prompt_logprobs="prompt_logprobs" in given or (is_chat and given.get("echo", False)),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("include_usage", False) and options.get("continuous_usage_stats", False),
        form=chat.form if chat else MessageForm(),
        role=chat.role if chat else "assistant",
        echoed=chat.echoed if chat else "",
        prompt_text=chat.prompt.rendered.text if chat and given.get("return_prompt_text") else None,
        form_field="tools" if chat and chat.form.tools.are_forced else _form_field(given),
        **common,
    )


def read_fields(url: str, body: Any, context: BodyContext) -> tuple[Json, Json]:
    """Check a body against the fields of its path.

    Returns:
        The body's fields that have an effect, and the values of `ParsedRequest` that all paths read alike, by name.

    Raises:
        BadRequestError: a field is unknown or has a wrong type.
    """
    fields = _FIELDS[url]
    if not context.may_stream:
        fields = {name: _IN_BATCHES.get(name, field) for name, field in fields.items() if name != "timeout"}
    reader = BodyReader()
    given = reader.read(body, fields)
    if url == COMPLETIONS and not schema.is_one_of(body.get("best_of"), (None, 1, given.get("n", 1))):
        message = f"best_of must be 1 or n, got {brief(body['best_of'])}: all samples are returned"
        raise BadRequestError(message, "best_of", "unsupported_value")
    model = given.setdefault("model", context.default_name)
    is_adapter = model in context.adapters
    if not is_adapter:
        check_model(model, context.model_names, context.adapters)
    common: Json = {name: given[name] for name in ("model", "cache_salt", "request_id", "priority") if name in given}
    common |= {"adapter": model} if is_adapter else {}
    common["reuse"] = read_hint(given, reader)
    common["transfer"] = read_transfer(given, reader)
    return given, {**common, "ignored": tuple(sorted(reader.ignored))}


def check_model(model: object, model_names: Sequence[str], adapters: Collection[str] = ()) -> None:
    """Raise BadRequestError unless `model` is one of the names, or an adapter's; without names, any is accepted."""
    if model_names and model not in model_names and model not in adapters:
        num_more = max(len(adapters) - _MAX_LISTED, 0)
        names = f"{[*model_names, *islice(adapters, _MAX_LISTED)]}{f' or {num_more} more adapters' * bool(num_more)}"
        message = f"model must be one of {names}, got {brief(model)}"
        raise BadRequestError(message, "model", "model_not_found", 404)


def prompt_field(url: str) -> str:
    """Return the name of the body field that has the prompts of requests to the path `url`."""
    others = "documents" if url in SCORING_PATHS else "input"
    return {COMPLETIONS: "prompt", CHAT: "messages"}.get(url, others)


@contextlib.contextmanager
def naming_fields(url: str, form_field: str | None = None) -> Iterator[None]:
    """Turn each RequestError inside the context into a BadRequestError that names the wrong body field.

    It is the first field of the path `url` in the message, or `form_field` if the message is about structured outputs.
    """
    try:
        yield
    except BadRequestError:
        raise
    except RequestError as error:
        if isinstance(error, PromptTooLongError | BusyError | FaultError):
            raise error_in(prompt_field(url), error) from error
        words = [prompt_field(url) if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
        named = next((word for word in words if word in _FIELDS[url]), None)
        if named is None and any(word in _FORM_WORDS for word in words):
            named = form_field
        raise BadRequestError(str(error), named) from error


def _form_field(given: Json) -> str:
    """Return the `given` body field that constrains the output's structure."""
    if (given.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
        return "response_format"
    return "tools" if given.get("tools") and "structured_outputs" not in given else "structured_outputs"


def _stream_options(given: Json) -> Json:
    """Return the checked fields of a body's `stream_options`; empty if there are none."""
    if "stream_options" not in given:
        return {}
    if not given.get("stream"):
        raise BadRequestError("stream_options need stream: true", "stream_options")
    return BodyReader().read(given["stream_options"], _STREAM_OPTIONS, "stream_options", "stream_options")


def _completion_params(given: Json, defaults: SamplingParams) -> SamplingParams:
    """Return a completion's sampling parameters: the body's `given` fields, and `defaults` for the others."""
    limits = {name: given.get(name, getattr(SamplingParams, name)) for name in ("max_tokens", "logprobs")}
    if given.get("echo"):
        if limits["max_tokens"] == 0:
            limits["max_tokens"] = 1  # a prompt is not computed without a token after it
        if limits["logprobs"] is not None:
            limits.setdefault("prompt_logprobs", limits["logprobs"])
    return defaults.clone(limits | _sampling_fields(given))


def _sampling_fields(given: Json) -> Json:
    """Return the `given` body fields that are parameters of SamplingParams, by name."""
    return {name: given[name] for name in SAMPLING if name in given} | _structured_outputs(given)


def _structured_outputs(given: Json) -> Json:
    """Return the parameter `structured_outputs` by name, from `response_format` or vLLM's field; {} for free text."""
    wanted = given.get("response_format", {"type": "text"})
    kind, form = wanted.get("type"), given.get("structured_outputs")
    if kind not in ("text", "json_object", "json_schema"):
        message = f"response_format must have the type text, json_object or json_schema, got {brief(kind)}"
        raise BadRequestError(message, "response_format")
    if kind == "text":
        return {} if form is None else {"structured_outputs": form}
    if form is not None:
        raise BadRequestError("response_format and structured_outputs cannot both be given", "response_format")
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        message = f"response_format must have a schema in json_schema, got {brief(described)}"
        raise BadRequestError(message, "response_format")
    return {"structured_outputs": {"json": described["schema"]}}


def _chat_params(given: Json, defaults: SamplingParams) -> SamplingParams:
    """Return a chat's sampling parameters: the body's `given` fields, and `defaults` for the others."""
    wanted = given.get("logprobs", False)
    if given.get("top_logprobs", 0) != 0 and not wanted:
        raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRequestError("max_tokens and max_completion_tokens must agree; give one", "max_completion_tokens")
    own = {
        "max_tokens": limits[0] if limits else None,  # up to the model's length, OpenAI's default for chats
        "logprobs": given.get("top_logprobs", 0) if wanted else None,
    }
    if given.get("echo"):  # log probabilities of the whole prompt, as in vLLM
        own["prompt_logprobs"] = given.get("prompt_logprobs", given.get("top_logprobs", 0))
    return defaults.clone(_sampling_fields(given) | own)
