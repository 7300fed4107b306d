"""RequestGroup: turns sampled tokens into text, log probabilities and times, for one user request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.metrics import co2_g
from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import PeerLostError, RequestError
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.logprobs import LogprobList, largest
from jaxserve.text.token_texts import TokenTexts, hidden_ids
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.api.pooling_params import PoolingParams
    from jaxserve.execution.sampling import TokenLogprobs

Clock = Callable[[], float]


@dataclass(slots=True)
class _Completion:
    """One sample: its request, growing output, and the detokenizer that turns its tokens into text."""

    request: Request
    output: CompletionOutput
    detokenizer: Detokenizer
    logprobs: LogprobList[dict[int, Logprob]] | None  # log probabilities for `output`


class RequestGroup:
    """The `n` samples of one user request, and the RequestOutput that they fill.

    Attributes:
        request_id: id of the user request.
        params: sampling parameters.
        output: output seen by the user.
        listener: called after outputs have grown or ended.
        error: exception that ended the request early.
        pooling: parameters of a pooling request; otherwise None.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        clock: Clock,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id, self.pooling = request_id, pooling
        self.params: SamplingParams = requests[0].params
        self.listener: Callable[[RequestGroup], None] | None = None
        self.error: BaseException | None = None
        self._tokenizer = tokenizer
        self._clock = clock
        hidden = hidden_ids(tokenizer, self.params) if tokenizer is not None else frozenset[int]()
        self._texts = TokenTexts(tokenizer, hidden) if tokenizer is not None and self.params.detokenize else None
        self._completions = [self._new_completion(i, r) for i, r in enumerate(requests)]
        outputs = [c.output for c in self._completions]
        # A copy: the caller may change its list, and the prefix cache keeps the prompt.
        self.output = RequestOutput(request_id, prompt, list(requests[0].prompt_token_ids), outputs)
        self._begin_prompt_logprobs()

    def _new_completion(self, index: int, request: Request) -> _Completion:
        """Return sample `index` with an empty output."""
        detokenizer = Detokenizer(self._tokenizer, self.params, request.prompt_token_ids)
        output = CompletionOutput(index)
        output.metrics.arrival_s = self._clock()
        wanted = self.params.logprobs is not None
        logprobs = LogprobList[dict[int, Logprob]](self._texts, request.prompt_token_ids) if wanted else None
        output.follow(detokenizer.visible, logprobs)
        output.cumulative_logprob = None if logprobs is None else 0.0
        return _Completion(request, output, detokenizer, logprobs)

    def _begin_prompt_logprobs(self) -> None:
        """Begin the output's prompt log probabilities, if requested, with None for the first token."""
        self._prompt_logprobs: LogprobList[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = LogprobList(self._texts, first=self.output.prompt_token_ids[:1], entries=[None])
        self.output.follow(self._prompt_logprobs)

    @property
    def requests(self) -> list[Request]:
        """Scheduler requests, one per sample."""
        return [c.request for c in self._completions]

    def continue_from(self, index: int, token_ids: TokenIds) -> None:
        """Begin sample `index`, which must be new, with output tokens that another engine has sampled."""
        completion = self._completions[index]
        completion.request.output_token_ids = list(token_ids)
        self._extend_text(completion, token_ids, None)
        completion.output.token_ids += token_ids
        completion.output.metrics.num_output_tokens = len(token_ids)

    def num_prompt_tokens_computed(self, index: int) -> int:
        """Return the number of prompt tokens computed for a sample's first token; 0 after that token."""
        completion = self._completions[index]
        metrics = completion.output.metrics
        return 0 if metrics.num_output_tokens else completion.request.num_prompt_tokens - metrics.num_cached_tokens

    def restart(self) -> None:
        """Replace all samples by new requests; their outputs are emptied in place."""
        for index, completion in enumerate(self._completions):
            output, again = completion.output, self._new_completion(index, completion.request.again())
            again.output.metrics.arrival_s = output.metrics.arrival_s
            again.output.metrics.num_restarts = output.metrics.num_restarts + 1
            vars(output).update(vars(again.output))
            again.output = output
            self._completions[index] = again
        self._begin_prompt_logprobs()
        self.output.pooled = None

    def admitted(self, index: int, cached_tokens: CachedTokens, num_preemptions: int, now_s: float) -> None:
        """Record in sample `index`'s metrics that it got a slot.

        Args:
            index: sample index.
            cached_tokens: prompt tokens found in the prefix cache.
            num_preemptions: earlier preemptions.
            now_s: current time.
        """
        self.preempted(index, num_preemptions)
        metrics = self._completions[index].output.metrics
        if metrics.scheduled_s is None:
            metrics.scheduled_s = now_s
            metrics.cached_tokens = cached_tokens

    def preempted(self, index: int, count: int) -> None:
        """Set the preemption count in sample `index`'s metrics."""
        self._completions[index].output.metrics.num_preemptions = count

    def consumed(self, index: int, energy_j: float, carbon_intensity: int | float | None) -> None:
        """Set the energy of sample `index` so far, and the grams of CO2 that it implies."""
        metrics = self._completions[index].output.metrics
        metrics.energy_j, metrics.co2_g = energy_j, co2_g(energy_j, carbon_intensity)

    def append(
        self,
        index: int,
        token_ids: TokenIds,
        reason: FinishReason | None,
        now_s: float,
        logprobs: TokenLogprobs | None = None,
        first_row: int = 0,
    ) -> tuple[int, str | None]:
        """Append new tokens of a sample; return the number kept, and the stop string that they completed.

        Tokens after a stop string are dropped: the output ends as if tokens had come one by one.

        Args:
            index: sample index.
            token_ids: new tokens.
            reason: reason why the last token ended the sample, if it did.
            now_s: arrival time of the tokens.
            logprobs: log probabilities that include these tokens.
            first_row: row of the first new token in `logprobs`; the others follow.
        """
        completion = self._completions[index]
        output, metrics = completion.output, completion.output.metrics
        num_kept, stop_string = self._extend_text(completion, token_ids, reason)
        if num_kept < len(token_ids):
            token_ids = token_ids[:num_kept]
        metrics.num_output_tokens += num_kept
        output.token_ids += token_ids
        metrics.first_token_s = metrics.first_token_s or now_s
        metrics.last_token_s = now_s
        if completion.logprobs is not None and logprobs is not None:
            for row, token_id in enumerate(token_ids, start=first_row):
                logprob = _append_logprobs(completion.logprobs, logprobs, row, token_id, self.params.logprobs or 0)
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob
        return num_kept, stop_string

    def pool(self, index: int, vector: NDArray[np.float32], now_s: float) -> None:
        """Store the prompt's pooled vector as the output of sample `index`."""
        metrics = self._completions[index].output.metrics
        metrics.first_token_s = metrics.last_token_s = now_s
        self.output.pooled = vector

    def count_drafts(self, index: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add the numbers of drafted and accepted tokens per round to sample `index`'s metrics."""
        metrics = self._completions[index].output.metrics
        for num_drafted, num_accepted in zip(drafted, accepted, strict=True):
            if not num_drafted:
                continue
            metrics.num_draft_rounds += 1
            metrics.num_drafted_tokens += num_drafted
            metrics.num_accepted_tokens += num_accepted
            counts = metrics.num_accepted_per_position
            counts += [0] * (num_drafted - len(counts))
            for position in range(num_accepted):
                counts[position] += 1

    def _extend_text(
        self, completion: _Completion, token_ids: TokenIds, reason: FinishReason | None
    ) -> tuple[int, str | None]:
        """Append the text of new tokens, up to a stop string; return the number of tokens used, and that string.

        If `reason` is a stop, the last id adds no text, unless stops are included.
        """
        if self._tokenizer is None:
            return len(token_ids), None
        is_hidden = reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        visible = token_ids[:-1] if is_hidden and token_ids[-1] in completion.request.stop_ids else token_ids
        if not self.params.stop:
            completion.detokenizer.push(visible)
            return len(token_ids), None
        for num_tokens, token_id in enumerate(visible, start=1):
            if (stop_string := completion.detokenizer.push([token_id])) is not None:
                return num_tokens, stop_string
        return len(token_ids), None

    def append_prompt_logprobs(self, start: int, count: int, logprobs: TokenLogprobs, row: int) -> None:
        """Append log probabilities for `count` prompt tokens from position `start`, skipping known ones.

        Args:
            start: position of the first prompt token.
            count: number of prompt tokens.
            logprobs: device results.
            row: row of the first prompt token in `logprobs`; the others follow.
        """
        entries = self._prompt_logprobs
        assert entries is not None, "prompt logprobs were not requested"
        token_ids = self._completions[0].request.prompt_token_ids[start : start + count]
        for offset, token_id in enumerate(token_ids):
            if start + offset == len(entries):
                _append_logprobs(entries, logprobs, row + offset, token_id, self.params.prompt_logprobs or 0)

    def finish(self, index: int, reason: FinishReason, now_s: float, stop_string: str | None = None) -> bool:
        """Complete the output of sample `index`, which has ended; return whether all samples have.

        Args:
            index: sample index.
            reason: reason for its end; a stop string in its last text overrides it.
            now_s: end time.
            stop_string: stop string that ended it, if any.
        """
        completion = self._completions[index]
        output, metrics = completion.output, completion.output.metrics
        stop_string = completion.detokenizer.finish() or stop_string
        if completion.logprobs is not None and stop_string is None:
            completion.logprobs.end()
        output.finish_reason = str(reason)
        if stop_string is not None:
            output.finish_reason, output.stop_reason = str(FinishReason.STOP), stop_string
        elif reason is FinishReason.STOP and set(output.token_ids[-1:]) & set(self.params.stop_token_ids or ()):
            output.stop_reason = output.token_ids[-1]
        metrics.finished_s = now_s
        self.output.finished = all(c.output.finish_reason for c in self._completions)
        return self.output.finished

    def check_served(self) -> None:
        """Raise the error that ended the request early, if any; a RuntimeError if a step failed."""
        if isinstance(self.error, PeerLostError | RequestError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"the step that served this request broke off: {self.error!r}") from self.error

    def release_logprobs(self) -> None:
        """Free the memory of all log probabilities; call it after the reply was sent, on a thread with spare time."""
        for entries in (self._prompt_logprobs, *(c.logprobs for c in self._completions)):
            if entries is not None:
                entries.release()

    def abandon(self, error: BaseException) -> None:
        """End all unfinished samples with their outputs so far, after `error`."""
        if not self.output.finished:
            self.error = error
        for completion in self._completions:
            output = completion.output
            output.finish_reason = output.finish_reason or str(FinishReason.ABORT)
        self.output.finished = True


def _append_logprobs(entries: LogprobList[Any], logprobs: TokenLogprobs, row: int, token_id: int, top: int) -> float:
    """Append the device's results at `row` for `token_id` and the `top` most likely tokens; return its log probability.

    A `top` of -1 appends all tokens, which the device has sent in id order.
    """
    logprob = float(logprobs.logprob[row])
    values = np.asarray(logprobs.top_logprobs[row], np.float32)
    if logprobs.top_ids.shape[1]:
        token_ids = np.asarray(logprobs.top_ids[row, :top], np.int32)
        values = values[:top]
    elif 0 <= top < len(values):
        token_ids = largest(values, top)
        values = values[token_ids]
    else:
        token_ids = np.zeros(0, np.int32)
    entries.append(token_id, logprob, int(logprobs.rank[row]), token_ids.tobytes(), values.tobytes())
    return logprob
