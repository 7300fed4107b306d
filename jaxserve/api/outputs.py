"""Request results: RequestOutput, its completions, their log probabilities and times. Host values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from jaxserve.api.cached_tokens import NO_CACHED_TOKENS, CachedTokens
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)  # not frozen: that would double the construction time, and a token can have 21
class Logprob:
    """A token's log probability at one position, before temperature, penalties and masks.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: rank among all tokens; 1 is the most likely.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """A completion's times, in seconds on one monotonic clock, and counts.

    Attributes:
        arrival_s: time when the request was queued.
        scheduled_s: time of its first admission to a step.
        first_token_s: time when its first token was read from the device.
        last_token_s: time when its last token so far was read.
        finished_s: time of its end.
        cached_tokens: prompt tokens found in the prefix cache, by tier.
        num_preemptions: number of preemptions, in which it loses its pages to another request.
        num_restarts: number of restarts from the prompt with other weights.
        num_output_tokens: tokens generated so far.
        num_draft_rounds: rounds in which tokens were drafted for it.
        num_drafted_tokens: drafted tokens.
        num_accepted_tokens: drafted tokens that were accepted.
        num_accepted_per_position: accepted tokens by draft position.
        energy_j: joules of its steps, until its latest token; None without a meter.
        co2_g: grams of CO2 for this energy; None without a meter or a known carbon intensity.
    """

    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: CachedTokens = NO_CACHED_TOKENS
    num_preemptions: int = 0
    num_restarts: int = 0
    num_output_tokens: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    energy_j: float | None = None
    co2_g: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache, in any tier."""
        return self.cached_tokens.total

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

    The length and the pieces are an immutable tuple that `append` replaces as a whole, so a reader sees a consistent
    text. Each piece is at least twice as long as the next: the number of pieces is logarithmic in the length of the
    text, and so is the number of times that a character is copied.
    """

    __slots__ = ("_state",)

    def __init__(self, text: str = "") -> None:
        self._state: tuple[int, tuple[str, ...]] = (len(text), (text,) if text else ())

    def append(self, text: str) -> None:
        """Append text. Only one thread may do so."""
        if not text:
            return
        length, pieces = self._state
        num_kept, num_chars = len(pieces), len(text)
        length += num_chars
        while num_kept and len(pieces[num_kept - 1]) < 2 * num_chars:
            num_kept -= 1
            num_chars += len(pieces[num_kept])
        self._state = (length, (*pieces[:num_kept], "".join((*pieces[num_kept:], text))))

    def __len__(self) -> int:
        return self._state[0]

    def __str__(self) -> str:
        """Return the whole text."""
        return "".join(self._state[1])

    def since(self, start: int) -> str:
        """Return the text after the first `start` characters, at a cost that depends only on its length."""
        length, pieces = self._state
        missing = length - start
        if missing <= 0:
            return ""
        last = pieces[-1]
        if missing <= len(last):  # nearly always
            return last[-missing:]
        new: list[str] = []
        for piece in reversed(pieces):
            new.append(piece[max(0, len(piece) - missing) :])
            missing -= len(piece)
            if missing <= 0:
                break
        return "".join(reversed(new))


class _TextField:
    """Descriptor of a string attribute that is stored as a GrowingText."""

    def __get__(self, output: CompletionOutput | None, owner: type[CompletionOutput]) -> str:
        return "" if output is None else str(vars(output)["text"])

    def __set__(self, output: CompletionOutput, text: str) -> None:
        vars(output)["text"] = GrowingText(text)


@runtime_checkable
class GrowingList(Protocol):
    """Sequence that one thread appends to while any other reads it."""

    def as_list(self) -> list[Any]:
        """Return all entries so far: always the same list, which later calls extend."""

    def part(self, start: int, stop: int) -> Sequence[Any]:
        """Return the entries from `start` to before `stop`, each built when it is read."""


class _ListField:
    """Descriptor of a list attribute that may be stored as a GrowingList, and is then read as its list."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, output: object | None, owner: type) -> list[Any] | None:
        value = None if output is None else vars(output)[self._name]
        return value if value is None or isinstance(value, list) else value.as_list()

    def __set__(self, output: object, value: list[Any] | GrowingList | None) -> None:
        vars(output)[self._name] = value


_LOGPROBS: Any = _ListField("logprobs")  # descriptors, which dataclasses assign to
_PROMPT_LOGPROBS: Any = _ListField("prompt_logprobs")


@dataclass
class CompletionOutput:
    """A prompt's completion.

    Attributes:
        index: index among the request's `n` completions.
        text: generated text.
        token_ids: generated token ids.
        cumulative_logprob: sum over the generated tokens' log probabilities; None unless `logprobs` was requested.
        logprobs: dict from token id to Logprob for each generated token; None unless requested.
        finish_reason: "stop", "length" or "abort" once the completion has ended; None before.
        stop_reason: stop string or stop token id that ended it; None for end-of-sequence.
        metrics: times and counts.
    """

    index: int
    text: str = cast("str", _TextField())  # a descriptor, which dataclasses assign to
    token_ids: TokenIds = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = _LOGPROBS
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def finished(self) -> bool:
        """Return whether this completion has ended."""
        return self.finish_reason is not None

    def follow(self, text: GrowingText, logprobs: GrowingList | None) -> None:
        """Make the attributes `text` and `logprobs` always read the current values in these."""
        vars(self).update(text=text, logprobs=logprobs)

    def text_since(self, start: int) -> str:
        """Return `text[start:]`, at a cost that depends only on its length."""
        text: GrowingText = vars(self)["text"]
        return text.since(start)

    def logprobs_since(self, start: int, stop: int) -> Sequence[dict[int, Logprob]] | None:
        """Return `logprobs[start:stop]`; entries are built on access."""
        logprobs: list[dict[int, Logprob]] | GrowingList | None = vars(self)["logprobs"]
        if logprobs is None or isinstance(logprobs, list):
            return None if logprobs is None else logprobs[start:stop]
        return logprobs.part(start, stop)


@dataclass
class RequestOutput:
    """A request's current result; final when `finished`.

    Attributes:
        request_id: the request's name, unique in its engine.
        prompt: prompt text; None if token ids were given.
        prompt_token_ids: prompt token ids.
        outputs: `n` completions.
        finished: True if all completions have ended.
        prompt_logprobs: dict from token id to Logprob for each prompt token, None for the first token; None unless
            requested.
        pooled: vector from a pooling engine, whose requests generate nothing; None before the end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: TokenIds
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = _PROMPT_LOGPROBS
    pooled: NDArray[np.float32] | None = None

    @property
    def prompt_tables(self) -> Sequence[dict[int, Logprob] | None] | None:
        """Entries of `prompt_logprobs`, each built when it is read; None unless requested."""
        tables: list[dict[int, Logprob] | None] | GrowingList | None = vars(self)["prompt_logprobs"]
        if tables is None or isinstance(tables, list):
            return tables
        return tables.part(0, len(self.prompt_token_ids))

    @property
    def metrics(self) -> RequestMetrics:
        """The first completion's times."""
        return self.outputs[0].metrics

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return self.outputs[0].metrics.num_cached_tokens

    @property
    def cached_tokens(self) -> CachedTokens:
        """Number of prompt tokens found in the prefix cache, by tier: `device`, `host` and `disk`."""
        return self.outputs[0].metrics.cached_tokens

    def follow(self, prompt_logprobs: GrowingList | None) -> None:
        """Make the attribute `prompt_logprobs` always read the current entries in this GrowingList."""
        vars(self)["prompt_logprobs"] = prompt_logprobs


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Failure of an accepted request."""

    request_id: str
    error: RequestError
