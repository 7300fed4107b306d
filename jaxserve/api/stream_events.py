"""Increments: new text and tokens of each completion since the last read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.token_ids import TokenIds


class Increment(NamedTuple):
    """New part of a completion.

    Attributes:
        completion: the completion so far; read it immediately, as it grows.
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
    """Reader of a request's outputs. Its increments add up to the outputs, whenever it reads.

    Args:
        output: growing output, which must not change while `read` runs.
        starts: characters and tokens that count as read, by completion index.
    """

    def __init__(self, output: RequestOutput, starts: Mapping[int, tuple[int, int]] | None = None) -> None:
        starts = starts or {}
        self._open = [_Position(completion, *starts.get(completion.index, ())) for completion in output.outputs]

    def read(self) -> list[Increment]:
        """Return one increment for each completion that has new tokens or has ended since the last call."""
        increments = []
        has_ended = False
        for position in self._open:
            completion, start = position.completion, position.num_tokens
            token_ids, reason = completion.token_ids, completion.finish_reason
            num_tokens = len(token_ids)
            if num_tokens <= start and reason is None:
                continue
            text, logprobs = completion.text_since(position.num_chars), completion.logprobs_since(start, num_tokens)
            position.num_chars += len(text)
            position.num_tokens = max(num_tokens, start)
            has_ended |= reason is not None
            increments.append(Increment(completion, text, token_ids[start:], logprobs, reason))
        if has_ended:
            self._open = [each for each in self._open if each.completion.finish_reason is None]
        return increments


@dataclass(slots=True)
class _Position:
    """Position up to which a completion has been read."""

    completion: CompletionOutput
    num_chars: int = 0
    num_tokens: int = 0
