"""Increments of outputs: what each completion has got since a reader looked last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.request import TokenIds


class Increment(NamedTuple):
    """New part of a completion.

    Attributes:
        completion: the completion, as far as it is known; read it at once, as it grows.
        text: new text; a token may add none before its characters are complete.
        token_ids: new tokens.
        logprobs: their log probabilities; None unless requested.
        finish_reason: reason of the end; None before.
    """

    completion: CompletionOutput
    text: str
    token_ids: TokenIds
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None


class OutputReader:
    """Reader of a request's outputs. Whatever the moments of its calls, its increments add up to the outputs.

    Args:
        output: output that grows; whoever reads must keep it from changing meanwhile.
    """

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self._num_chars = [0] * len(output.outputs)
        self._num_tokens = [0] * len(output.outputs)
        self._is_ended = [False] * len(output.outputs)

    def read(self) -> list[Increment]:
        """Return the increments of the completions that have got tokens, text or their end since the last call."""
        increments = []
        for index, completion in enumerate(self._output.outputs):
            if self._is_ended[index]:
                continue
            start, num_tokens = self._num_tokens[index], len(completion.token_ids)
            reason = completion.finish_reason
            if num_tokens == start and reason is None:
                continue
            text, logprobs = completion.text_since(self._num_chars[index]), completion.logprobs
            self._num_chars[index] += len(text)
            self._num_tokens[index], self._is_ended[index] = num_tokens, reason is not None
            new_logprobs = None if logprobs is None else logprobs[start:num_tokens]
            increments.append(Increment(completion, text, completion.token_ids[start:], new_logprobs, reason))
        return increments
