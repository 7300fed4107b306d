"""Prompts: their accepted types, and the token ids they stand for."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Integral

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.images.inputs import PROMPT_KEYS
from jaxserve.images.prepared import EncodedPrompt, ExpandedPrompt
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]

USER_SALT = "user:"  # start of the prefix cache namespaces that callers may share
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "reuse", *PROMPT_KEYS}


def read_prompt(
    prompt: Prompt,
    cache_salt: str | None,
    tokenizer: Tokenizer | None,
    max_tokens: int | None = None,
    *,
    keeps_first: bool = False,
    rewrite: Callable[[str, Sequence[int]], str] | None = None,
) -> tuple[str | None, TokenIds, str | None]:
    """Return a prompt's text (None if it has only token ids), its token ids and its cache salt.

    Args:
        prompt: prompt as given by the user.
        cache_salt: salt for a prompt without its own.
        tokenizer: None if prompts must be token ids.
        max_tokens: maximum number of tokens; of more, the last ones are kept. None for all.
        keeps_first: True to keep the first ones instead.
        rewrite: function from the text of a prompt with images, and their numbers of crops, to the text that is
            encoded; None for a prompt without images.

    Raises:
        RequestError: the prompt has no accepted type.
    """
    if isinstance(prompt, Mapping):
        if unknown := sorted(map(str, prompt.keys() - _PROMPT_KEYS)):
            raise RequestError(f"a prompt takes the keys {sorted(_PROMPT_KEYS)}, got also {unknown}")
        if not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise RequestError("a prompt needs prompt or prompt_token_ids, got neither")
        salt = prompt.get("cache_salt", cache_salt)
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))  # ids win: the text is then only their source
        text = prompt.get("prompt")
    else:
        content, salt, text = prompt, cache_salt, None
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a string, got {type(text).__name__}")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, got {salt!r}")
    if isinstance(content, str):
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; pass token ids, or drop skip_tokenizer_init")
        if rewrite is None:
            return content, tokenizer.encode(content, max_tokens=max_tokens, keeps_first=keeps_first), salt
        encode = partial(_encode_rewritten, tokenizer, rewrite, content)
        return content, EncodedPrompt(encode(()), encode), salt
    if isinstance(content, ExpandedPrompt) and (content.images or max_tokens is None):
        return text, content, salt
    if isinstance(content, EncodedPrompt):
        return text, content, salt
    token_ids = _read_token_ids(content)
    if max_tokens is not None:
        token_ids = token_ids[:max_tokens] if keeps_first else token_ids[-max_tokens:]
    return text, token_ids, salt


def _encode_rewritten(
    tokenizer: Tokenizer, rewrite: Callable[[str, Sequence[int]], str], text: str, counts: Sequence[int]
) -> TokenIds:
    """Return the token ids of a text that is rewritten for images with these numbers of crops."""
    return tokenizer.encode(rewrite(text, counts))


def check_bound(text: str, tokenizer: Tokenizer, schedule: ScheduleConfig, advice: str = "") -> None:
    """Raise PromptTooLongError if a text's length already proves that it has too many tokens.

    Args:
        text: prompt.
        tokenizer: tokenizer, which gives a lower bound on the number of tokens.
        schedule: engine sizes.
        advice: advice for the error message, in addition to shortening the prompt.
    """
    num_tokens = tokenizer.bound.num_tokens(text)
    if num_tokens >= schedule.max_total_tokens:
        raise prompt_too_long(schedule, num_tokens, is_bound=True, advice=advice)


def check_len(num_tokens: int, schedule: ScheduleConfig, advice: str = "") -> None:
    """Raise PromptTooLongError for a prompt with too many tokens; arguments as in `check_bound`."""
    if num_tokens >= schedule.max_total_tokens:
        raise prompt_too_long(schedule, num_tokens, advice=advice)


def prompt_too_long(
    schedule: ScheduleConfig, num_tokens: int, *, is_bound: bool = False, advice: str
) -> PromptTooLongError:
    """Return the error for a prompt that is too long, in words by which clients recognise it.

    Args:
        schedule: engine sizes.
        num_tokens: prompt tokens.
        is_bound: True if `num_tokens` is a lower bound.
        advice: advice in addition to shortening the prompt.
    """
    limit = schedule.max_total_tokens - 1  # maximum prompt length: the scheduler always counts one output token
    condition = "" if schedule.pools else " and leave room for at least 1 output token"
    return PromptTooLongError(
        f"This model's maximum context length is {schedule.max_model_len} tokens. However, your prompt is too long: "
        f"it has {'at least ' if is_bound else ''}{num_tokens} input tokens, and must have at most {limit}{condition}. "
        f"Please reduce the length of the input prompt{advice}.",
        num_tokens,
        limit,
    )


def _read_token_ids(content: object) -> TokenIds:
    """Convert a list or array with token ids to a list of ints; RequestError for anything else."""
    if callable(to_list := getattr(content, "tolist", None)):  # numpy, torch, jax and Python arrays
        content = to_list()
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"a prompt must be a string or a list of token ids, got {type(content).__name__}")
    if set(map(type, content)) <= {int}:  # the usual case, ten times faster than checking each
        return list(content)
    for position, token_id in enumerate(content):
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise RequestError(f"token ids must be integers, got {token_id!r} at index {position}")
    return [int(token_id) for token_id in content]


def outside_vocabulary(name: str, ids: Collection[int], vocab_size: int) -> str:
    """Return the error message for ids outside the vocabulary, with the first one and its index."""
    outside = [(index, token_id) for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size]
    index, token_id = outside[0]
    at_index = f" at index {index}" if isinstance(ids, Sequence) else ""
    others = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
    return (
        f"token ids in {name} must be in [0, {vocab_size}), got {token_id}{at_index}{others}; "
        "that is out of vocabulary: take ids from this model's tokenizer"  # clients look for "out of vocabulary"
    )


def prompt_limit(params: SamplingParams, max_model_len: int, max_total_tokens: int) -> int | None:
    """Return the number of prompt tokens to keep according to `truncate_prompt_tokens`; None to keep all.

    Args:
        params: sampling parameters.
        max_model_len: maximum prompt and output tokens, for the model.
        max_total_tokens: the same for the scheduler, which counts an output even for pooling models.

    Raises:
        RequestError: the model cannot hold that many tokens.
    """
    wanted = params.truncate_prompt_tokens
    if wanted == -1:
        return max(1, max_total_tokens - (params.max_tokens or 1))
    if wanted is not None and wanted > max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be at most max_model_len {max_model_len}, got {wanted}; -1 keeps what fits"
        )
    return wanted
