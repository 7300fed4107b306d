"""Conversion of OpenAI's request and response bodies, for /v1/completions and /v1/chat/completions.

A body may have the fields of OpenAI's API that this engine supports, and vLLM's further sampling parameters. Labels of
the caller, such as `user`, are ignored, and fields of unsupported features may have the value that switches them off.
Any other field is an error. A null means "not given": then the checkpoint's recommended sampling parameters apply.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from jaxserve.errors import EngineDiedError, RequestError, brief
from jaxserve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, TokenIds
from jaxserve.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]
Prompt = str | TokenIds

_SAMPLING_FIELDS = {  # fields with the same name and meaning in SamplingParams
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
}
_LABELS = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}  # ignored
_TYPES = {
    "cache_salt": str,
    "model": str,
    "stop": str | list,
    "stop_token_ids": list,
    "allowed_token_ids": list,
    "bad_words": list,
}
_NEUTRAL_SHARED = {"stream": ["false"], "store": ["false"], "service_tier": ['"auto"', '"default"']}
_NEUTRAL = {  # values, as JSON, that switch off unsupported features
    COMPLETIONS: _NEUTRAL_SHARED | {"echo": ["false"], "suffix": ['""'], "best_of": ["1", "n"]},
    CHAT: _NEUTRAL_SHARED
    | {"response_format": ['{"type": "text"}'], "tools": ["[]"], "parallel_tool_calls": ["true", "false"]},
}
_SHARED_FIELDS = _SAMPLING_FIELDS | _LABELS.keys() | {"model", "max_tokens", "logprobs", "cache_salt"}
_FIELDS = {
    COMPLETIONS: _SHARED_FIELDS | _NEUTRAL[COMPLETIONS].keys() | {"prompt"},
    CHAT: _SHARED_FIELDS
    | _NEUTRAL[CHAT].keys()
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"},
}
_RESERVED = {"messages", "chat_template", "tokenize"}  # names not allowed in chat_template_kwargs


@dataclass(eq=False)
class BadRequestError(RequestError):
    """Error of a body that cannot be served, with the fields of OpenAI's error object."""

    message: str
    param: str | None = None
    code: str = "invalid_request"
    status_code: int = 400

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Request from a valid body.

    Attributes:
        prompts: prompts as text or token ids; a chat has one, rendered and encoded.
        top_logprobs: requested alternatives per token of a chat, -1 for all; None without log probabilities.
    """

    url: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    cache_salt: str | None = None
    top_logprobs: int | None = None


def parse_body(
    url: str,
    body: object,
    own_name: str,
    model_names: Sequence[str],
    tokenizer: Tokenizer | None,
    defaults: SamplingParams,
) -> ParsedRequest:
    """Check a request body and convert it to prompts and sampling parameters.

    Args:
        url: endpoint, COMPLETIONS or CHAT.
        body: request body, parsed from JSON.
        own_name: name of the model if a request gives none.
        model_names: accepted values of `model`; if empty, any name is accepted.
        tokenizer: tokenizer that renders and encodes chats.
        defaults: recommended parameters of the checkpoint, for all fields not given except the length.

    Raises:
        RequestError: the body cannot be served; a `BadRequestError` if the error belongs to a field.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"body must be an object, got {brief(body)}", "body")
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unknown("body", given, _FIELDS[url])
    _refuse_features(given, _NEUTRAL[url])
    for name, wanted in (_TYPES | _LABELS).items():
        _check_type(given, name, wanted)
    model = given.get("model", own_name)
    if model_names and model not in model_names:
        message = f"model must be one of {list(model_names)}, got {brief(model)}"
        raise BadRequestError(message, "model", "model_not_found", 404)
    salt = given.get("cache_salt")
    if url == COMPLETIONS:
        prompts, params = _completion_prompts(given.get("prompt")), _completion_params(given, defaults)
        return ParsedRequest(url, model, prompts, params, salt)
    params = _chat_params(given, defaults)
    return ParsedRequest(url, model, [_chat_prompt(given, tokenizer)], params, salt, params.logprobs)


def refuse_unknown(where: str, given: Json, known: set[str]) -> None:
    """Raise BadRequestError that names every field of `given` that is not `known`."""
    if unknown := sorted(given.keys() - known):
        message = f"unsupported fields {unknown} in the {where}; supported are {sorted(known)}"
        raise BadRequestError(message, unknown[0], "unsupported_parameter")


def _refuse_features(given: Json, neutral: Mapping[str, Sequence[str]]) -> None:
    for name in sorted(neutral.keys() & given.keys()):
        allowed = [json.dumps(given.get("n", 1)) if text == "n" else text for text in neutral[name]]
        if json.dumps(given[name]) not in allowed:
            message = f"{name} is not supported: it must be {' or '.join(neutral[name])}, got {brief(given[name])}"
            raise BadRequestError(message, name, "unsupported_value")


def _completion_params(given: Json, defaults: SamplingParams) -> SamplingParams:
    limits = {name: given.get(name, getattr(SamplingParams, name)) for name in ("max_tokens", "logprobs")}
    return dataclasses.replace(defaults, **_sampling_fields(given), **limits)


def _sampling_fields(given: Json) -> Json:
    return {name: given[name] for name in _SAMPLING_FIELDS & given.keys()}


def _chat_params(given: Json, defaults: SamplingParams) -> SamplingParams:
    _check_type(given, "logprobs", bool)
    wanted = given.get("logprobs", False)
    if given.get("top_logprobs", 0) != 0 and not wanted:
        raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRequestError("max_tokens and max_completion_tokens must agree; give one", "max_completion_tokens")
    return dataclasses.replace(
        defaults,
        **_sampling_fields(given),
        max_tokens=limits[0] if limits else None,  # up to the model's length, OpenAI's default for chats
        logprobs=given.get("top_logprobs", 0) if wanted else None,
    )


def _chat_prompt(given: Json, tokenizer: Tokenizer | None) -> TokenIds:
    if tokenizer is None:
        raise BadRequestError("chats need a tokenizer, and the engine runs with skip_tokenizer_init", "messages")
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise BadRequestError(f"messages must be a list of messages, got {brief(messages)}", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"every message must be an object with a role, got {brief(message)}", "messages")
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRequestError(f"every message must have a content or tool_calls, got {brief(message)}", "messages")
    _check_type(given, "chat_template_kwargs", dict)
    variables = given.get("chat_template_kwargs", {})
    if reserved := sorted(variables.keys() & _RESERVED):
        raise BadRequestError(f"chat_template_kwargs cannot set {reserved}", "chat_template_kwargs")
    return tokenizer.encode(tokenizer.render_chat(messages, variables), add_special_tokens=False)


def _completion_prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and _are_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and _are_token_ids(item) for item in prompt):
            return prompt
    message = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    raise BadRequestError(f"{message}, got {brief(prompt)}", "prompt")


def _are_token_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int and 0 <= item < 2**31 for item in items)


def _check_type(given: Json, name: str, wanted: type | UnionType) -> None:
    if name in given and not isinstance(given[name], wanted):
        kind = wanted.__name__ if isinstance(wanted, type) else wanted
        raise BadRequestError(f"{name} must be a {kind}, got {brief(given[name])}", name)


def as_bad_request(error: RequestError) -> BadRequestError:
    """Return an error with the fields of OpenAI's error object."""
    if isinstance(error, BadRequestError):
        return error
    if isinstance(error, EngineDiedError):
        return BadRequestError(str(error), code="engine_died", status_code=500)
    return BadRequestError(str(error))


def error_body(error: RequestError) -> Json:
    """Return OpenAI's error object."""
    known = as_bad_request(error)
    kind = "invalid_request_error" if known.status_code < 500 else "server_error"
    return {"error": {"message": known.message, "type": kind, "param": known.param, "code": known.code}}


def response_body(
    request: ParsedRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer | None,
    *,
    response_id: str,
    created_s: int,
) -> Json:
    """Return the completion or chat completion; `outputs` are in the order of `request.prompts`."""
    chat = request.url == CHAT
    completions = [(output, completion) for output in outputs for completion in output.outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(completion.token_ids) for _, completion in completions)
    token_text = _token_texts(tokenizer)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{response_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created_s,
        "model": request.model,
        "choices": [
            {"index": i}
            | (_chat_choice(c, request.top_logprobs or 0, tokenizer) if chat else _completion_choice(c, token_text))
            | {"finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            | _prompt_logprobs(output, token_text)
            for i, (output, c) in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


_TokenText = Callable[[int, Logprob], str]


def _token_texts(tokenizer: Tokenizer | None) -> _TokenText:
    def text(token_id: int, entry: Logprob) -> str:
        if entry.decoded_token is not None:
            return entry.decoded_token
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    return text


def _completion_choice(completion: CompletionOutput, token_text: _TokenText) -> Json:
    if completion.logprobs is None:
        return {"text": completion.text, "logprobs": None}
    rows = list(zip(completion.token_ids, completion.logprobs, strict=True))
    tokens = [token_text(token_id, table[token_id]) for token_id, table in rows]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [table[token_id].logprob for token_id, table in rows],
        "top_logprobs": [_by_text(table, token_text) for _, table in rows],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }
    return {"text": completion.text, "logprobs": logprobs}


def _by_text(table: Mapping[int, Logprob], token_text: _TokenText) -> dict[str, float]:
    """Return log probabilities by text; of tokens with equal text, such as parts of a character, the likeliest."""
    best: dict[str, float] = {}
    for token_id, entry in _ranked(table):
        best.setdefault(token_text(token_id, entry), entry.logprob)
    return best


def _chat_choice(completion: CompletionOutput, num_top: int, tokenizer: Tokenizer | None) -> Json:
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.logprobs is None:
        return {"message": message, "logprobs": None}
    top = slice(num_top if num_top >= 0 else None)
    content = [
        _chat_token(token_id, table[token_id], tokenizer)
        | {"top_logprobs": [_chat_token(i, entry, tokenizer) for i, entry in _ranked(table)[top]]}
        for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {"message": message, "logprobs": {"content": content, "refusal": None}}


def _chat_token(token_id: int, entry: Logprob, tokenizer: Tokenizer | None) -> Json:
    text = _token_texts(tokenizer)(token_id, entry)
    data = tokenizer.byte_table[token_id] if tokenizer is not None and tokenizer.byte_table else text.encode()
    return {"token": text, "logprob": entry.logprob, "bytes": list(data)}


def _ranked(table: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(table.items(), key=lambda item: item[1].rank)


def _prompt_logprobs(output: RequestOutput, token_text: _TokenText) -> Json:
    """Return vLLM's extension: by position, log probability, rank and text by token id; null at the first position."""
    if output.prompt_logprobs is None:
        return {}

    def described(table: Mapping[int, Logprob]) -> Json:
        return {
            str(i): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": token_text(i, entry)}
            for i, entry in table.items()
        }

    return {"prompt_logprobs": [table and described(table) for table in output.prompt_logprobs]}
