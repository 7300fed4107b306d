"""Requests and their results: SamplingParams, Request, RequestOutput. Host values only, without jax."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from numbers import Integral, Real
from typing import Any, cast, no_type_check

from jaxserve.errors import RequestError, brief
from jaxserve.vllm_options import SAMPLING_ARGUMENTS, check_arguments

DEFAULT_MAX_LOGPROBS = 20  # vLLM's
MAX_LOGIT_BIAS = 300
MAX_BAD_SEQUENCES = 64  # sequences of token ids per request; most words have one or two
MAX_BAD_SEQUENCE_TOKENS = 8
MAX_STOP_TOKEN_IDS = 64
# OpenAI allows 4 stop strings, and common prompts have about 10. The bounds keep a request's automaton below a
# megabyte, and the time in which it is built near that of tokenising as much text.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
TokenIds = list[int]


class FinishReason(enum.StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


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
        stop: strings that end the output; removed from the text unless `include_stop_str_in_output`. At most 64 of 4096
            characters in all.
        stop_token_ids: ids that end the output; at most 64.
        ignore_eos: continue after the end-of-sequence token.
        seed: seed of sampling; the same seed and prompt give the same samples whatever else runs, unless a draft model
            or layer draws chains of tokens for speculative decoding: then their distribution alone is the same. None
            derives a seed from the engine's, so that the same requests have the same samples after a restart. Sample i
            of `n` has the seed `seed + i`, as in vLLM: requests with seeds 0, 1, 2 and 3 and n=4 share most of their
            samples.
        logprobs: number of most likely tokens whose log probabilities are returned too; at most the engine's
            `max_logprobs`, which is 20 by default. -1 is the whole vocabulary, and needs an engine with -1.
        prompt_logprobs: the same for every prompt token.
        presence_penalty: subtracted once from the logit of each token already in the output; in [-2, 2].
        frequency_penalty: subtracted for every occurrence in the output; in [-2, 2].
        repetition_penalty: divides (or multiplies, below zero) the logits of tokens in prompt and output; above 0.
        logit_bias: token id -> value added to its logit; at most 300 entries, values in [-100, 100].
        allowed_token_ids: only ids that can be sampled, including those that end the output; None allows all.
        bad_words: texts that the output must not contain: the last token of one cannot be sampled if the output ends
            with its other tokens. A word stands for its tokens at the start of a text, and for those after a space if
            they are equally many and the first differs. At most 64 such sequences of 8 tokens each.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        detokenize: produce text; must be True if `stop` is given.
        truncate_prompt_tokens: number of last tokens to keep of a longer prompt, besides the special tokens around a
            text; -1 keeps as many as leave room for `max_tokens`.

    Of vLLM's structured_outputs, guided_decoding, logits_processors, extra_args, best_of, flat_logprobs and
    spaces_between_special_tokens, only the defaults are accepted, and `n` for best_of.

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
    _: KW_ONLY  # vLLM's others, which must ask for what jaxserve does anyway
    structured_outputs: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    extra_args: InitVar[Any] = None
    best_of: InitVar[Any] = None
    flat_logprobs: InitVar[Any] = False
    spaces_between_special_tokens: InitVar[Any] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Raise RequestError for unknown names, as for invalid values."""
        names = {f.name for f in dataclasses.fields(cls)}
        defaults = vars(cls)
        others = {n: kwargs[n] for n in kwargs.keys() - names if n not in defaults or kwargs[n] is not defaults[n]}
        if unknown := sorted(others.keys() - defaults.keys()):
            raise RequestError(f"unsupported sampling parameters {unknown}; supported are {sorted(names)}")
        if "best_of" in others and others["best_of"] == kwargs.get("n", 1):
            del others["best_of"]
        if others:
            check_arguments(others, SAMPLING_ARGUMENTS)
        return super().__new__(cls)

    def __post_init__(self, *_others: object) -> None:
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                setattr(self, name, _integer(name, value, low, high))
        for name, (low, high) in _REALS.items():
            setattr(self, name, _real(name, getattr(self, name), low, high, open_low=name in _ABOVE_ZERO))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be a bool, got {brief(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be positive, -1 or None, got 0")
        if self.seed == -1:  # no seed, as in vLLM
            self.seed = None
        self._check_stop()
        self._check_logit_bias()
        self._check_allowed_token_ids()
        self._check_bad_words()

    def _check_stop(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if isinstance(stop, bytes) or not _is_sequence(stop) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be a non-empty string or a list of them, got {brief(self.stop)}")
        num_chars = sum(map(len, stop))
        if len(stop) > MAX_STOP_STRINGS or num_chars > MAX_STOP_CHARS:
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters in all, "
                f"got {len(stop)} of {num_chars}; keep those that matter, or look for the others in the output"
            )
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; drop stop, or use stop_token_ids")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not _is_sequence(ids) or isinstance(ids, bytes) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids, "
                f"got {brief(self.stop_token_ids)}"
            )
        self.stop = list(stop)
        self.stop_token_ids = [_integer("stop_token_ids", token_id, 0, _MAX_INT32) for token_id in ids]

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias must be a dict of at most {MAX_LOGIT_BIAS} entries, got {brief(bias)}")
        try:  # keys in JSON are strings
            by_id = {int(key) if isinstance(key, str) else key: value for key, value in bias.items()}
        except ValueError:
            raise RequestError(f"logit_bias keys must be token ids, got {brief(list(bias))}") from None
        self.logit_bias = {
            _integer("logit_bias key", token_id, 0, _MAX_INT32): _real("logit_bias value", value, -100, 100)
            for token_id, value in by_id.items()
        }

    def _check_allowed_token_ids(self) -> None:
        ids = self.allowed_token_ids
        if ids is None:
            return
        if not _is_sequence(ids) or isinstance(ids, bytes) or not len(ids):
            raise RequestError(f"allowed_token_ids must be a list of at least one token id, got {brief(ids)}")
        if set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) <= _MAX_INT32:  # faster than looking at each
            self.allowed_token_ids = list(ids)
        else:
            self.allowed_token_ids = [_integer("allowed_token_ids", token_id, 0, _MAX_INT32) for token_id in ids]

    def _check_bad_words(self) -> None:
        words = () if self.bad_words is None else self.bad_words
        if not _is_sequence(words) or not all(isinstance(word, str) and word.strip() for word in words):
            raise RequestError(f"bad_words must be a list of strings that are not blank, got {brief(words)}")
        if len(words) > MAX_BAD_SEQUENCES:
            raise RequestError(
                f"bad_words must be at most {MAX_BAD_SEQUENCES} words, got {len(words)}; keep those that matter"
            )
        self.bad_words = list(dict.fromkeys(words))

    def clone(self) -> SamplingParams:
        """Return an independent copy, checked again."""
        return dataclasses.replace(self)

    @property
    def has_penalties(self) -> bool:
        """True if sampling depends on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """True if ids are biased, forbidden or restricted, whatever the earlier tokens."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


_MAX_INT32 = 2**31 - 1
_INTEGERS = {  # smallest and largest value by name
    "n": (1, 1024),
    "top_k": (-1, _MAX_INT32),
    "max_tokens": (1, _MAX_INT32),
    "min_tokens": (0, _MAX_INT32),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (-1, _MAX_INT32),
    "prompt_logprobs": (-1, _MAX_INT32),
    "truncate_prompt_tokens": (-1, _MAX_INT32),
}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
_REALS = {
    "temperature": (0, 10_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10_000),
}
_ABOVE_ZERO = {"top_p", "repetition_penalty"}


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise RequestError(f"{name} must be an integer in [{low}, {high}], got {brief(value)}")
    return int(value)


def _real(name: str, value: Any, low: int, high: int, *, open_low: bool = False) -> float:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high or (open_low and value == low):
        raise RequestError(f"{name} must be a number in {'(' if open_low else '['}{low}, {high}], got {brief(value)}")
    return float(value)


class RequestStatus(enum.Enum):
    """State of a request."""

    WAITING = enum.auto()  # has no pages and no slot; new or preempted
    RUNNING = enum.auto()
    BLOCKED = enum.auto()  # runs, but computes nothing until the update of a plan
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """Sequence that is generated. The scheduler owns every field below `status`.

    Prefill and decode are not distinguished: `num_computed_tokens` of the `num_tokens` have keys and values in the
    pool; each step computes more until the numbers are equal, which samples one further token.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    seed: int  # resolved, never None
    max_total_tokens: int  # prompt + output limit
    stop_ids: frozenset[int] = frozenset()  # any of these ends the output
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that the output must not contain
    salt: bytes = b""  # prefix-cache namespace: requests share pages only if their salts are equal
    read_prefix_cache: bool = True  # False if every prompt position must be computed (prompt_logprobs)
    waits_for_tokens: bool = False  # True if each token must be read before the next is computed
    arrival: int = 0  # index of the request in order of arrival
    num_shared_tokens: int = 0  # prompt tokens that the router expects to be cached when the request starts

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: TokenIds = field(default_factory=list)  # ids read from the device so far
    num_computed_tokens: int = 0  # tokens in plans made so far; 0 unless running
    num_tokens_when_preempted: int = 0  # includes tokens that were then on the device
    quiet_until: int = 0  # limit of num_computed_tokens below which a decode step changes only that number
    review_at: int = 0  # number of output tokens at which the request ends by length or a page is full
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)  # ids of all KV groups, by column; append-only while running
    num_released_columns: int = 0  # leading columns whose pages in sliding groups were released
    page_hashes: list[bytes] = field(default_factory=list)  # hashes of the full pages of known tokens
    slot: int = -1  # row of the per-request device state; -1 while not running

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and output tokens whose ids the host has."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and of those still on the device: computing n tokens samples one more."""
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return max(num_known, self.num_computed_tokens + 1, self.num_tokens_when_preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens sampled on the device and not yet read (step-ahead)."""
        return self.num_tokens - self.num_known_tokens

    @property
    def min_position(self) -> int:
        """First position at which a token may end the output."""
        min_tokens = self.params.min_tokens
        return min(self.num_prompt_tokens + min_tokens, self.max_total_tokens) if min_tokens else 0

    @property
    def seed_words(self) -> tuple[int, int]:
        """Low and high word of the 64-bit seed."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Return the known token ids in [start, stop)."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:split] + self.output_token_ids[: stop - split]


@dataclass(slots=True)  # not frozen: that would double the construction time, and a token can have 21
class Logprob:
    """Log probability of one token at one position, before temperature, penalties and masks.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: place among all tokens; 1 is the most likely.
        decoded_token: text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one completion, in seconds on one monotonic clock, and counts.

    Attributes:
        arrival_s: time when the request was queued.
        scheduled_s: time of its first admission to a step.
        first_token_s: time when its first token was read from the device.
        last_token_s: time when its last token so far was read.
        finished_s: time of its end.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: number of times that it lost its pages to another request.
        num_restarts: number of times that it restarted from the prompt with other weights.
        num_output_tokens: tokens generated so far.
        num_draft_rounds: rounds in which tokens were drafted for it.
        num_drafted_tokens: drafted tokens.
        num_accepted_tokens: drafted tokens that were accepted.
        num_accepted_per_position: accepted tokens by their position among the drafted ones of a round.
    """

    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    num_output_tokens: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Time from arrival to first admission."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """Time from first admission to first token."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.num_output_tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def total_s(self) -> float | None:
        """Time from arrival to finish."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


class GrowingText:
    """Text that one thread appends to while any other reads it.

    The pieces are an immutable tuple that `append` replaces as a whole, so a reader sees a consistent text. Each piece
    is at least twice as long as the next: the number of pieces is logarithmic in the length of the text, and so is the
    number of times that a character is copied.
    """

    def __init__(self, text: str = "") -> None:
        self._pieces: tuple[str, ...] = (text,) if text else ()

    def append(self, text: str) -> None:
        """Append text. Only one thread may do so."""
        if not text:
            return
        pieces = self._pieces
        num_kept, num_chars = len(pieces), len(text)
        while num_kept and len(pieces[num_kept - 1]) < 2 * num_chars:
            num_kept -= 1
            num_chars += len(pieces[num_kept])
        self._pieces = (*pieces[:num_kept], "".join((*pieces[num_kept:], text)))

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __str__(self) -> str:
        """Return the whole text."""
        return "".join(self._pieces)

    def since(self, start: int) -> str:
        """Return the text after the first `start` characters, at a cost that depends only on its length."""
        pieces = self._pieces
        missing = sum(map(len, pieces)) - start
        new: list[str] = []
        for piece in reversed(pieces):
            if missing <= 0:
                break
            new.append(piece[max(0, len(piece) - missing) :])
            missing -= len(piece)
        return "".join(reversed(new))


class _TextField:
    """Descriptor of a string attribute that is stored as a GrowingText."""

    def __get__(self, output: CompletionOutput | None, owner: type[CompletionOutput]) -> str:
        return "" if output is None else str(vars(output)["text"])

    def __set__(self, output: CompletionOutput, text: str) -> None:
        vars(output)["text"] = GrowingText(text)


@dataclass
class CompletionOutput:
    """Completion of a prompt.

    Attributes:
        index: number of the completion among the `n` of its request, from 0.
        text: generated text.
        token_ids: generated token ids.
        cumulative_logprob: sum of the log probabilities of the generated tokens; None unless `logprobs` was requested.
        logprobs: dict from token id to Logprob for each generated token; None unless requested.
        finish_reason: "stop", "length" or "abort" once the completion has ended; None before.
        stop_reason: stop string or stop token id that ended it; None for end-of-sequence.
        metrics: times and counts.
    """

    index: int
    text: str = cast("str", _TextField())  # a descriptor, which dataclasses assign to
    token_ids: TokenIds = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def finished(self) -> bool:
        """Return whether this completion has ended."""
        return self.finish_reason is not None

    def follow(self, text: GrowingText) -> None:
        """Let the attribute `text` always read the current value of this GrowingText."""
        vars(self)["text"] = text

    def text_since(self, start: int) -> str:
        """Return `text[start:]`, at a cost that depends only on its length."""
        text: GrowingText = vars(self)["text"]
        return text.since(start)


@dataclass(slots=True)
class RequestOutput:
    """Current result of a request; final when `finished`.

    Attributes:
        request_id: name of the request, unique in its engine.
        prompt: text of the prompt; None if token ids were given.
        prompt_token_ids: token ids of the prompt.
        outputs: `n` completions.
        finished: True if all completions have ended.
        prompt_logprobs: dict from token id to Logprob for each prompt token, None for the first token; None unless
            requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: TokenIds
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the first completion."""
        return self.outputs[0].metrics

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return self.outputs[0].metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Failure of a request that was accepted but cannot be served."""

    request_id: str
    error: RequestError
