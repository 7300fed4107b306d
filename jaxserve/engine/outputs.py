"""From sampled tokens to what the user sees: text, log probabilities, times. One group per user request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    TokenIds,
)
from jaxserve.sampling import TokenLogprobs
from jaxserve.tokenizer import Detokenizer, Tokenizer

Clock = Callable[[], float]


@dataclass(slots=True)
class _Completion:
    request: Request
    output: CompletionOutput
    detokenizer: Detokenizer


class RequestGroup:
    """The `n` samples of one user request and the RequestOutput that they fill."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        clock: Clock,
    ) -> None:
        self.params: SamplingParams = requests[0].params
        self._tokenizer = tokenizer
        self._clock = clock
        self._texts: dict[int, str] = {}  # decoded single tokens, for logprobs
        self._completions = {r.request_id: self._new_completion(i, r) for i, r in enumerate(requests)}
        outputs = [c.output for c in self._completions.values()]
        self.output = RequestOutput(request_id, prompt, requests[0].prompt_token_ids, outputs)
        if self.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    def _new_completion(self, index: int, request: Request) -> _Completion:
        detokenizer = Detokenizer(self._tokenizer, self.params, request.prompt_token_ids)
        output = CompletionOutput(index)
        output.follow(detokenizer.visible)
        output.metrics.arrival_s = self._clock()
        if self.params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        return _Completion(request, output, detokenizer)

    @property
    def requests(self) -> list[Request]:
        """The samples as the scheduler knows them."""
        return [c.request for c in self._completions.values()]

    def restart(self) -> list[Request]:
        """Begin all samples again, as new requests; their outputs are emptied, where they are."""
        requests = [_again(request) for request in self.requests]
        for completion, request in zip(list(self._completions.values()), requests, strict=True):
            output, metrics = completion.output, completion.output.metrics
            again = self._new_completion(output.index, request)
            again.output.metrics.arrival_s = metrics.arrival_s
            again.output.metrics.num_restarts = metrics.num_restarts + 1
            vars(output).update(vars(again.output))
            self._completions[request.request_id] = _Completion(request, output, again.detokenizer)
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        return requests

    def admitted(self, request: Request) -> None:
        """Note that a sample got its slot."""
        metrics = self._completions[request.request_id].output.metrics
        if metrics.scheduled_s is None:
            metrics.scheduled_s = self._clock()
            metrics.num_cached_tokens = request.num_cached_tokens

    def num_output_tokens(self, request: Request) -> int:
        """Tokens that a sample has been given."""
        return self._completions[request.request_id].output.metrics.num_output_tokens

    def append(
        self,
        request: Request,
        num_tokens: int,
        now_s: float,
        logprobs: TokenLogprobs | None = None,
        rows: Sequence[int] = (),
    ) -> str | None:
        """Take the next tokens of a sample; returns the stop string that they completed, if any.

        Tokens that follow a stop string are dropped: the output ends where it would have, had they come one by one.

        Args:
            request: the sample, with the new tokens.
            num_tokens: how many are new.
            now_s: the time at which they came.
            logprobs: their log probabilities, among others.
            rows: the position of each new token's in `logprobs`.
        """
        completion = self._completions[request.request_id]
        output, metrics = completion.output, completion.output.metrics
        start = metrics.num_output_tokens
        token_ids = request.output_token_ids[start : start + num_tokens]
        stop_string = self._extend_text(completion, token_ids)
        metrics.num_output_tokens += len(token_ids)
        output.token_ids += token_ids
        metrics.first_token_s = metrics.first_token_s or now_s
        metrics.last_token_s = now_s
        if output.logprobs is not None and logprobs is not None:
            for row, token_id in zip(rows, token_ids, strict=False):  # those of dropped tokens are left over
                entry = self._logprob_entry(logprobs, row, token_id, self.params.logprobs or 0)
                output.logprobs.append(entry)
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry[token_id].logprob
        return stop_string

    def _extend_text(self, completion: _Completion, token_ids: TokenIds) -> str | None:
        """Take the text of new tokens; drops those behind the one that completes a stop string, which it returns."""
        if self._tokenizer is None:
            return None
        visible = token_ids[:-1] if self._is_hidden_stop(completion.request, token_ids[-1]) else token_ids
        if not self.params.stop:
            return completion.detokenizer.push(visible)
        for num_tokens, token_id in enumerate(visible, start=1):
            if (stop_string := completion.detokenizer.push([token_id])) is not None:
                del token_ids[num_tokens:]
                return stop_string
        return None

    def append_prompt_logprobs(self, start: int, token_ids: TokenIds, logprobs: TokenLogprobs, row: int) -> None:
        """Take the logprobs of the prompt tokens `token_ids`, the first at position `start`; skips those it has."""
        entries, top = self.output.prompt_logprobs, self.params.prompt_logprobs
        assert entries is not None, "no one asked for prompt logprobs"
        for offset, token_id in enumerate(token_ids):
            if start + offset == len(entries):
                entries.append(self._logprob_entry(logprobs, row + offset, token_id, top or 0))

    def finish(self, request: Request, stop_string: str | None = None) -> bool:
        """Close a sample that has ended; returns whether that ended the whole group."""
        completion = self._completions[request.request_id]
        output, metrics = completion.output, completion.output.metrics
        stop_string = completion.detokenizer.finish() or stop_string
        output.finish_reason = str(request.finish_reason)
        if stop_string is not None:
            output.finish_reason, output.stop_reason = str(FinishReason.STOP), stop_string
        elif request.finish_reason is FinishReason.STOP and output.token_ids[-1] in (self.params.stop_token_ids or ()):
            output.stop_reason = output.token_ids[-1]
        metrics.finished_s = self._clock()
        metrics.num_preemptions = request.num_preemptions
        self.output.finished = all(c.output.finish_reason for c in self._completions.values())
        return self.output.finished

    def _is_hidden_stop(self, request: Request, token_id: int) -> bool:
        """An id that ended the output leaves no text, unless stops are to be kept."""
        if request.finish_reason is not FinishReason.STOP or token_id not in request.stop_ids:
            return False
        return not self.params.include_stop_str_in_output

    def _logprob_entry(self, logprobs: TokenLogprobs, row: int, token_id: int, top: int) -> dict[int, Logprob]:
        """The token itself, then the `top` most likely ones."""
        entry = {token_id: Logprob(float(logprobs.logprob[row]), int(logprobs.rank[row]), self._text(token_id))}
        ids, values = logprobs.top_ids[row, :top].tolist(), logprobs.top_logprobs[row, :top].tolist()
        for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
            if other >= 0 and other != token_id:
                entry[other] = Logprob(value, rank, self._text(other))
        return entry

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]


def _again(request: Request) -> Request:
    """The same, with nothing done for it yet."""
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        seed=request.seed,
        max_total_tokens=request.max_total_tokens,
        stop_ids=request.stop_ids,
        salt=request.salt,
        read_prefix_cache=request.read_prefix_cache,
        arrival=request.arrival,
    )
