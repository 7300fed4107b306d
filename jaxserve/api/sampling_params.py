"""SamplingParams: sampling parameters and their bounds. Host values only, without jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, no_type_check

from jaxserve.api.schema import (
    FILLED_TEXT,
    SWITCH,
    FieldType,
    Schema,
    integer,
    list_of,
    number,
    one_of,
    unknown_names_message,
)
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.api.vllm_options import SAMPLING_ARGUMENTS, check_arguments
from jaxserve.errors import RequestError, brief

DEFAULT_MAX_LOGPROBS = 20  # vLLM's
MAX_LOGIT_BIAS = 300
MAX_BAD_SEQUENCES = 64  # token sequences per request; most words have one or two
MAX_BAD_SEQUENCE_TOKENS = 8
MAX_STOP_TOKEN_IDS = 64
TRUNCATION_SIDES = ("left", "right")
# OpenAI allows 4 stop strings, and common prompts have about 10. The bounds keep a request's automaton below a
# megabyte, and building it about as fast as tokenising the same text.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a RequestError
@dataclass
class SamplingParams:
    """Sampling parameters of one request. Names, meanings and defaults are vLLM's.

    Attributes:
        n: number of completions per prompt; they share the prompt's pages.
        temperature: 0 is greedy.
        top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`; in (0, 1].
        top_k: keep the `top_k` most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the most likely one; in [0, 1].
        max_tokens: output limit; None means up to the model's maximum length.
        min_tokens: end-of-sequence and stop ids cannot be sampled before this many tokens.
        stop: strings that end the output; removed from the text unless `include_stop_str_in_output`. At most 64, with
            4096 characters in all.
        stop_token_ids: ids that end the output; at most 64.
        ignore_eos: continue after the end-of-sequence token.
        seed: sampling seed; the same seed and prompt give the same samples whatever else runs, unless a draft model or
            layer samples chains for speculative decoding: then only the distribution is the same. None derives a seed
            from the engine's, so that the same requests have the same samples after a restart. Sample i of `n` has the
            seed `seed + i`, as in vLLM: requests with seeds 0, 1, 2 and 3 and n=4 have most samples in common.
        logprobs: number of most likely tokens whose log probabilities are returned too; at most the engine's
            `max_logprobs`, which is 20 by default. -1 is the whole vocabulary, and needs an engine with -1.
        prompt_logprobs: the same for every prompt token.
        presence_penalty: subtracted once from the logit of each token already in the output; in [-2, 2].
        frequency_penalty: subtracted for every occurrence in the output; in [-2, 2].
        repetition_penalty: divides (or multiplies, below zero) the logits of tokens in prompt and output; above 0.
        logit_bias: token id -> value added to its logit; at most 300 entries, values in [-100, 100].
        allowed_token_ids: only ids that can be sampled, including those that end the output; None allows all.
        bad_words: texts that the output must not contain: the last token of one cannot be sampled if the output ends
            with its other tokens. A word means its tokens at the start of a text, and also its tokens after a space if
            their number is the same and the first differs. At most 64 such sequences with 8 tokens each.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_ids: special tokens that stay in the text nevertheless, such as tool call delimiters.
        include_stop_str_in_output: keep the stop string in the text.
        detokenize: produce text; must be True if `stop` is given.
        truncate_prompt_tokens: number of tokens that a longer prompt keeps, including special tokens; -1 keeps as many
            as `max_tokens` allows.
        truncation_side: side on which a longer prompt is cut: "left" keeps its last tokens, "right" its first ones.
        structured_outputs: constraint on the output, as StructuredOutputsParams or a dict with its fields. Needs the
            extra `structured`. An end-of-sequence token is allowed once the output is complete, and ends it even with
            `ignore_eos`; an output that ends otherwise (such as by `max_tokens`) may be incomplete.

    vLLM's other parameters are accepted only with values that match the behaviour here, such as the defaults, and `n`
    for best_of: see `vllm_options.SAMPLING_ARGUMENTS`.

    Raises:
        RequestError: a value is out of range or a parameter is unknown.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    _: KW_ONLY
    structured_outputs: StructuredOutputsParams | None = None
    shown_special_ids: Sequence[int] | None = None
    # vLLM's others, whose values must match the behaviour here
    guided_decoding: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    extra_args: InitVar[Any] = None
    best_of: InitVar[Any] = None
    flat_logprobs: InitVar[Any] = False
    spaces_between_special_tokens: InitVar[Any] = True
    watermarking: InitVar[Any] = None
    prompt_logprob_token_ids: InitVar[Any] = None
    prompt_logprob_start: InitVar[Any] = None
    logprob_token_ids: InitVar[Any] = None
    output_kind: InitVar[Any] = None
    stream_interval: InitVar[Any] = None
    skip_clone: InitVar[Any] = False
    output_text_buffer_length: InitVar[Any] = 0
    skip_reading_prefix_cache: InitVar[Any] = None
    thinking_token_budget: InitVar[Any] = None
    repetition_detection: InitVar[Any] = None
    routed_experts_prompt_start: InitVar[Any] = 0
    trace_decode_token_ids: InitVar[Any] = None
    _eos_token_id: InitVar[Any] = None
    _all_stop_token_ids: InitVar[Any] = None
    _watermarking_skipped: InitVar[Any] = None
    _bad_words_token_ids: InitVar[Any] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Raise RequestError for unknown names, as for invalid values."""
        if kwargs.keys() <= _NAMES:  # nearly always
            return super().__new__(cls)
        defaults = vars(cls)
        others = {n: kwargs[n] for n in kwargs.keys() - _NAMES if n not in defaults or kwargs[n] is not defaults[n]}
        if unknown := others.keys() - defaults.keys():
            raise RequestError(unknown_names_message("sampling parameters", unknown, _NAMES))
        if "best_of" in others and others["best_of"] == kwargs.get("n", 1):
            del others["best_of"]
        if others:
            check_arguments(others, SAMPLING_ARGUMENTS)
        return super().__new__(cls)

    def __post_init__(self, *_others: object) -> None:
        self._check()

    def _check(self) -> None:
        """Raise RequestError unless all fields are valid, and store them in their normal types."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        _SCHEMA.check(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be positive, -1 or None, got 0")
        if self.seed == -1:  # no seed, as in vLLM
            self.seed = None
        if self.stop:
            self._check_stop(self.stop)
        if self.bad_words:
            self.bad_words = list(dict.fromkeys(self.bad_words))
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.from_value(self.structured_outputs)

    def _check_stop(self, stop: Sequence[str]) -> None:
        """Raise RequestError for too many stop strings, or without text to look for them in."""
        num_chars = sum(map(len, stop))
        if len(stop) > MAX_STOP_STRINGS or num_chars > MAX_STOP_CHARS:
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters in all, "
                f"got {len(stop)} of {num_chars}; keep those that matter, or look for the others in the output"
            )
        if not self.detokenize:
            raise RequestError("stop strings need detokenize=True; drop stop, or use stop_token_ids")

    def clone(self, changes: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return an independent copy, checked again.

        Args:
            changes: values of fields that differ.
        """
        copy: SamplingParams = object.__new__(type(self))
        vars(copy).update(vars(self), **changes or {})
        copy._check()
        return copy

    @property
    def has_penalties(self) -> bool:
        """True if a penalty makes sampling depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """True if ids are biased, forbidden or restricted independently of earlier tokens."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


_NAMES = frozenset(f.name for f in dataclasses.fields(SamplingParams))
_MAX_INT32 = 2**31 - 1
_TOKEN_ID = integer(0, _MAX_INT32)
_NUM_LOGPROBS = integer(-1, _MAX_INT32).optional()
_BIAS = number(-100, 100)
_STOP = FieldType("a non-empty string or a list of them", FILLED_TEXT.holds)
_WORD = FieldType("a list of strings that are not blank", lambda word: isinstance(word, str) and word.strip() != "")


def _read_biases(given: dict[Any, Any]) -> dict[int, float]:
    """Return `logit_bias` with token ids as keys, from integers or their text; RequestError for other entries."""
    try:  # keys in JSON are strings
        by_id = {int(key) if isinstance(key, str) else key: value for key, value in given.items()}
    except ValueError:
        raise RequestError(f"logit_bias keys must be token ids, got {brief(list(given))}") from None
    return {
        _TOKEN_ID.read("logit_bias key", token_id, RequestError): _BIAS.read("logit_bias value", value, RequestError)
        for token_id, value in by_id.items()
    }


_SCHEMA = Schema(
    RequestError,
    SamplingParams,
    {
        "n": integer(1, 1024),
        "temperature": number(0, 10_000),
        "top_p": number(0, 1, excludes_low=True),
        "top_k": integer(-1, _MAX_INT32),
        "min_p": number(0, 1),
        "max_tokens": integer(1, _MAX_INT32).optional(),
        "min_tokens": integer(0, _MAX_INT32),
        "stop": list_of(_STOP, _STOP.words).optional(list),
        "stop_token_ids": list_of(
            _TOKEN_ID, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids", max_len=MAX_STOP_TOKEN_IDS
        ).optional(list),
        "ignore_eos": SWITCH,
        "seed": integer(-(2**63), 2**64 - 1).optional(),
        "logprobs": _NUM_LOGPROBS,
        "prompt_logprobs": _NUM_LOGPROBS,
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0, 10_000, excludes_low=True),
        "logit_bias": FieldType(
            f"a dict of at most {MAX_LOGIT_BIAS} entries",
            lambda given: isinstance(given, dict) and len(given) <= MAX_LOGIT_BIAS,
            _read_biases,
        ).optional(),
        "allowed_token_ids": list_of(_TOKEN_ID, "a list of at least one token id", min_len=1).optional(),
        "bad_words": list_of(
            _WORD, f"a list of at most {MAX_BAD_SEQUENCES} strings that are not blank", max_len=MAX_BAD_SEQUENCES
        ).optional(list),
        "skip_special_tokens": SWITCH,
        "shown_special_ids": list_of(_TOKEN_ID, "a list of token ids").optional(list),
        "include_stop_str_in_output": SWITCH,
        "detokenize": SWITCH,
        "truncate_prompt_tokens": integer(-1, _MAX_INT32).optional(),
        "truncation_side": one_of(TRUNCATION_SIDES),
    },
)
