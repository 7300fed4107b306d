"""Conversion of OpenAI's request and response bodies, for /v1/completions and /v1/chat/completions.

A body may have the fields of OpenAI's API that this engine supports, and vLLM's further sampling parameters. Labels of
the caller, such as `user`, are ignored, and fields of unsupported features may have the value that switches them off.
Any other field is an error. A null means "not given": then the checkpoint's recommended sampling parameters apply.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import PromptTooLongError, RequestError, brief
from jaxserve.openai.chat_formats import ChatFormat
from jaxserve.openai.chats import PROMPT_FIELDS, allow_any, read_chat
from jaxserve.openai.errors import BadRequestError, Json, as_bad_request, check_output_len, check_type
from jaxserve.openai.prompts import Prompt, completion_prompts, plain_prompts
from jaxserve.openai.refusals import refuse_features, refuse_unknown
from jaxserve.openai.tools import MessageForm
from jaxserve.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, POOLING, CLASSIFICATION = "/v1/embeddings", "/pooling", "/classify"
SCORE_PATHS, RERANK_PATHS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")

_SAMPLING_FIELDS = {  # fields with the same name and meaning in SamplingParams
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
    *("truncate_prompt_tokens", "truncation_side"),
}
_LABELS = {
    "user": str,
    "session_id": str,
    "safety_identifier": str,
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
}
_PREFERENCES = {
    "verbosity": str,
    "prediction": dict,
    "reasoning_effort": str,
}  # fields of chats; templates may have one
_TYPES = {
    "cache_salt": str,
    "priority": int,
    "echo": bool,
    "add_special_tokens": bool,
    "return_prompt_text": bool,
    "model": str,
    "response_format": dict,
    "return_token_ids": bool,
    "stream": bool,
    "stream_options": dict,
    "structured_outputs": dict,
    "include_reasoning": bool,
    "request_id": str,
    "return_tokens_as_token_ids": bool,
    "stop": str | list,
    "stop_token_ids": list,
    "allowed_token_ids": list,
    "bad_words": list,
    "top_n": int,
    "return_documents": bool,
}
_NEUTRAL_SHARED = {"store": ["false"], "service_tier": ['"auto"', '"default"']}
_NEUTRAL_SHARED |= {"detokenize": ["true"], "spaces_between_special_tokens": ["true"], "use_beam_search": ["false"]}
_NEUTRAL_SHARED |= {  # vLLM's defaults, which some clients spell out
    **{name: ["false"] for name in ("watermarking", "return_token_offsets", "return_weight_versions")},
    **{name: ["{}"] for name in ("vllm_xargs", "media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params")},
    "length_penalty": ["1.0", "1"],
    "stream_interval": ["1"],
    "thinking_token_budget": ["-1"],
    "routed_experts_prompt_start": ["0"],
}
_NEUTRAL = {  # values, as JSON, that switch off unsupported features
    COMPLETIONS: _NEUTRAL_SHARED | {"suffix": ['""'], "best_of": ["1", "n"]},
    CHAT: _NEUTRAL_SHARED | {"modalities": ['["text"]']},
}
_SHARED_FIELDS = {
    "priority",
    "model",
    "max_tokens",
    "logprobs",
    "cache_salt",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
}
_SHARED_FIELDS |= _SAMPLING_FIELDS | _LABELS.keys() | {"response_format", "structured_outputs"}
_FIELDS = {
    COMPLETIONS: _SHARED_FIELDS | _NEUTRAL[COMPLETIONS].keys() | {"prompt", "echo", "add_special_tokens"},
    CHAT: _SHARED_FIELDS
    | _NEUTRAL[CHAT].keys()
    | _PREFERENCES.keys()
    | PROMPT_FIELDS
    | {"max_completion_tokens", "top_logprobs", "echo", "documents", "return_prompt_text"}
    | {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"},
}
_WAITING = {"timeout"}  # fields of clients that wait; the server reads them
_CHECKED = _TYPES | _LABELS | _PREFERENCES
POOLING_PARAMETERS = {  # fields of requests for vectors that are parameters of their own
    EMBEDDINGS: {"dimensions", "normalize", "use_activation", "truncate_prompt_tokens", "truncation_side"},
    POOLING: {"dimensions", "normalize", "use_activation", "truncate_prompt_tokens", "truncation_side", "task"},
    CLASSIFICATION: {"use_activation", "truncate_prompt_tokens", "truncation_side"},
}
_INPUT_FIELDS = {"input", "model", "user", "priority", "request_id", "cache_salt"}
_NEUTRAL |= {
    url: {"embed_dtype": ['"float32"'], "endianness": ['"native"', '"little"'], "padding": ['"do_not_pad"']}
    for url in (EMBEDDINGS, POOLING)
}
_NEUTRAL[CLASSIFICATION] = {"padding": ['"do_not_pad"']}
_FIELDS |= {
    url: _INPUT_FIELDS | PROMPT_FIELDS | _NEUTRAL[url].keys() | names for url, names in POOLING_PARAMETERS.items()
}
_FIELDS[EMBEDDINGS] |= {"encoding_format"}
_SCORING_FIELDS = (_INPUT_FIELDS - {"input"}) | {
    *("use_activation", "truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc"),
}
_PAIRS = {"queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}
_FIELDS |= dict.fromkeys(SCORE_PATHS, _SCORING_FIELDS | _PAIRS)
_FIELDS |= dict.fromkeys(RERANK_PATHS, _SCORING_FIELDS | {"query", "documents", "top_n", "return_documents"})
_FIELDS[POOLING] |= {"encoding_format"}
_PROMPT_FIELDS = {
    COMPLETIONS: "prompt",
    CHAT: "messages",
    **dict.fromkeys((*SCORE_PATHS, *RERANK_PATHS), "documents"),
}  # field of the prompt; "input" elsewhere
_IGNORED = _LABELS.keys() | _PREFERENCES.keys() | {"store", "service_tier"}
_NOT_IN_BATCHES = {"priority", "request_id", "stream", "stream_options"}
WITHOUT_EFFECT = {  # fields that are accepted as long as they ask for nothing, by endpoint; errors do not advise them
    url: frozenset((_IGNORED | _NEUTRAL.get(url, {}).keys()) - {"reasoning_effort"}) for url in _FIELDS
}
_FORM_WORDS = frozenset(each.name for each in fields(StructuredOutputsParams))
_STREAM_OPTIONS = {"include_usage", "continuous_usage_stats"}
_IDLE_STREAM_OPTIONS = {"include_obfuscation"}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Request from a valid body.

    Attributes:
        prompts: prompts as text or token ids; a chat has one, rendered and encoded.
        top_logprobs: requested alternatives per token of a chat, -1 for all; None without log probabilities.
        echo: True if the text of a completion begins with its prompt.
        has_output: False if only the prompt is wanted, with its log probabilities.
        return_token_ids: True if token ids are wanted beside the text.
        shows_prompt_logprobs: True if log probabilities of the prompt are wanted apart from those of an echo.
        shows_metrics: True if the times of a completion are wanted.
        tokens_as_ids: True if log probabilities name tokens by their ids.
        request_id: name that the reply is to have; empty if the body does not say.
        stream: True if increments are wanted as they come.
        include_usage: True if the counts of tokens are wanted at the end of a stream.
        continuous_usage: True if they are wanted with every increment too.
        tenant: name of whoever has sent it; empty if nobody says.
        priority: class, of which lower numbers go first; None if the body does not say.
        form: form of a chat's message.
        role: role of a chat's message.
        echoed: text with which a chat's message begins, before what is generated.
        prompt_text: text of a chat's prompt, with which the reply is to come; None to leave it out.
        form_field: field that says which form the output must have.
        pooling: parameters of a request for vectors; None of one for text.
        is_base64: True if vectors are wanted as bytes in base64.
        labels: names of the labels that a model gives probabilities of.
        ignored: fields that were accepted and changed nothing.
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
    ignored: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_chat(self) -> bool:
        """True for a chat."""
        return self.url == CHAT


def parse_body(
    url: str,
    body: object,
    own_name: str,
    model_names: Sequence[str],
    tokenizer: Tokenizer | None,
    defaults: SamplingParams,
    *,
    may_stream: bool = False,
    chat_format: ChatFormat | None = None,
    check_prompt: Callable[[str], None] = allow_any,
    response_role: str = "assistant",
    takes_templates: bool = True,
    max_model_len: int | None = None,
) -> ParsedRequest:
    """Check a request body and convert it to prompts and sampling parameters.

    Args:
        url: endpoint, COMPLETIONS or CHAT.
        body: request body, parsed from JSON.
        own_name: name of the model if a request gives none.
        model_names: accepted values of `model`; if empty, any name is accepted.
        tokenizer: tokenizer that renders and encodes chats.
        defaults: recommended parameters of the checkpoint, for all fields not given except the length.
        may_stream: False where there is no one to stream to, as in a batch file.
        chat_format: format of the model's messages; by default what its chat templates show.
        check_prompt: function that raises RequestError for a chat that is too long, before it is encoded.
        response_role: role of a chat's message that is not the continuation of another.
        takes_templates: False to refuse chat templates in bodies.
        max_model_len: maximum of `max_tokens`, see `check_output_len`; None for any number.

    Raises:
        RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
    """
    given = check_fields(url, body, own_name, model_names, may_stream=may_stream)
    is_chat = url == CHAT
    with naming_fields(url, _form_field(given)):
        params = _chat_params(given, defaults) if is_chat else _completion_params(given, defaults)
        check_output_len(given, max_model_len)
        read = partial(read_chat, response_role=response_role, takes_templates=takes_templates)
        chat = read(given, tokenizer, chat_format, params, check_prompt=check_prompt) if is_chat else None
    options = _stream_options(given, may_stream=may_stream)
    if given.get("stream") and given.get("prompt_logprobs"):
        message = "prompt_logprobs must be left out, or 0, with stream: true, as only whole replies have them, got "
        raise BadRequestError(f"{message}{given['prompt_logprobs']}", "prompt_logprobs", "unsupported_value")
    return ParsedRequest(
        url,
        given["model"],
        [chat.prompt] if chat else _prompts(given, tokenizer, check_prompt),
        chat.params if chat else params,
        given.get("cache_salt"),
        params.logprobs if is_chat else None,
        echo=given.get("echo", False) and not is_chat,
        has_output=given.get("max_tokens") != 0,
        return_token_ids=given.get("return_token_ids", False),
        shows_prompt_logprobs="prompt_logprobs" in given or (is_chat and given.get("echo", False)),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        request_id=given.get("request_id", ""),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("include_usage", False) and options.get("continuous_usage_stats", False),
        priority=given.get("priority"),
        form=chat.form if chat else MessageForm(),
        role=chat.role if chat else "assistant",
        echoed=chat.echoed if chat else "",
        prompt_text=chat.text if chat and given.get("return_prompt_text") else None,
        form_field="tools" if chat and chat.form.tools.are_forced else _form_field(given),
        ignored=tuple(sorted((_IGNORED & given.keys()) - (chat.honoured if chat else set()))),
    )


def _prompts(given: Json, tokenizer: Tokenizer | None, check_prompt: Callable[[str], None]) -> list[Prompt]:
    prompts = completion_prompts(given.get("prompt"))
    if given.get("add_special_tokens", True):
        return prompts
    return plain_prompts(prompts, tokenizer, allow_any if "truncate_prompt_tokens" in given else check_prompt)


def check_fields(
    url: str, body: object, own_name: str, model_names: Sequence[str], *, may_stream: bool = False
) -> Json:
    """Return the fields of a body that are given, and the name of the model; the arguments are those of `parse_body`.

    Raises:
        BadRequestError: a field is not known, or of another type.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"body must be an object, got {brief(body)}", "body")
    given = {name: value for name, value in body.items() if value is not None}
    without_effect = WITHOUT_EFFECT[url] if may_stream else WITHOUT_EFFECT[url] | _NOT_IN_BATCHES
    refuse_unknown("body", given, _FIELDS[url] | (_WAITING if may_stream else set()), without_effect)
    refuse_features(given, _NEUTRAL.get(url, {}))
    for name, wanted in _CHECKED.items():
        if name in given:
            check_type(given, name, wanted)
    if given.get("priority") and not may_stream:
        message = "a line of a batch file must have priority 0, as all lines are of one batch"
        raise BadRequestError(message, "priority", "unsupported_value")
    if "request_id" in given and not (may_stream and re.fullmatch(r"[\w.-]{1,128}", given["request_id"], re.ASCII)):
        message = "request_id must be up to 128 letters, digits, dots and dashes; a line of a batch file has custom_id"
        raise BadRequestError(message, "request_id", "unsupported_value")
    if given.get("cache_salt") == "":
        raise BadRequestError(
            "cache_salt must be at least one character; leave it out to share cached pages", "cache_salt"
        )
    check_model(given.setdefault("model", own_name), model_names)
    return given


def check_model(model: object, model_names: Sequence[str]) -> None:
    """Raise BadRequestError unless a model is one of the names; if there are none, any name is accepted."""
    if model_names and model not in model_names:
        message = f"model must be one of {list(model_names)}, got {brief(model)}"
        raise BadRequestError(message, "model", "model_not_found", 404)


def prompt_field(url: str) -> str:
    """Return the field of a body that has the prompts."""
    return _PROMPT_FIELDS.get(url, "input")


@contextlib.contextmanager
def naming_fields(url: str, form_field: str | None = None) -> Iterator[None]:
    """Add the field to errors of values: the first that the message names, or `form_field` to those of forms."""
    try:
        yield
    except BadRequestError:
        raise
    except RequestError as error:
        own = prompt_field(url)
        if isinstance(error, PromptTooLongError):
            known = as_bad_request(error)
            known.param = own
            raise known from error
        words = [own if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
        named = next((word for word in words if word in _FIELDS[url]), None)
        if named is None and any(word in _FORM_WORDS for word in words):
            named = form_field
        raise BadRequestError(str(error), named) from error


def _form_field(given: Json) -> str:
    """Return the field that says which form the output must have, if one does."""
    if (given.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
        return "response_format"
    return "tools" if given.get("tools") and "structured_outputs" not in given else "structured_outputs"


def _stream_options(given: Json, *, may_stream: bool) -> Json:
    stream, options = given.get("stream", False), given.get("stream_options", {})
    options = {name: value for name, value in options.items() if value is not None}
    if stream and not may_stream:
        raise BadRequestError("stream is not supported: it must be false, got True", "stream", "unsupported_value")
    if "stream_options" in given and not stream:
        raise BadRequestError("stream_options need stream: true", "stream_options")
    if unknown := sorted(options.keys() - _STREAM_OPTIONS - _IDLE_STREAM_OPTIONS):
        message = f"stream_options must be of {sorted(_STREAM_OPTIONS)}, got {unknown}"
        raise BadRequestError(message, "stream_options", "unsupported_parameter")
    for name, value in options.items():
        if not isinstance(value, bool):
            raise BadRequestError(f"{name} must be a bool, got {brief(value)}", "stream_options")
    return options


def _completion_params(given: Json, defaults: SamplingParams) -> SamplingParams:
    limits = {name: given.get(name, getattr(SamplingParams, name)) for name in ("max_tokens", "logprobs")}
    if given.get("echo"):
        if limits["max_tokens"] == 0:
            limits["max_tokens"] = 1  # a prompt is not computed without a token behind it
        if limits["logprobs"] is not None:
            limits.setdefault("prompt_logprobs", limits["logprobs"])
    return defaults.clone(limits | _sampling_fields(given))


def _sampling_fields(given: Json) -> Json:
    return {name: given[name] for name in _SAMPLING_FIELDS & given.keys()} | _output_form(given)


def _output_form(given: Json) -> Json:
    """Return the form that the output must have, from OpenAI's field or vLLM's."""
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
    check_type(given, "logprobs", bool)
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
