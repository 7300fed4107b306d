"""Counting of reasoning tokens by the delimiters in a model's text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jaxserve.openai.chat_formats import Delimiters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.openai.chat_formats import ChatFormat
    from jaxserve.text.token_stream import ByteStream, WindowStream


_MAX_KEPT_CHARS = 4096  # kept text; headers are shorter


class ReasoningTokens:
    """Counter of one message's tokens between reasoning delimiters.

    Args:
        chat_format: format of the message.
        stream: detokenizer whose text contains the delimiters.
        in_reasoning: True if the prompt ends with the opening delimiter of reasoning.
    """

    def __init__(self, chat_format: ChatFormat, stream: ByteStream | WindowStream, *, in_reasoning: bool) -> None:
        self._format, self._stream, self._in_reasoning = chat_format, stream, in_reasoning
        messages, reasoning = chat_format.messages, chat_format.reasoning
        self._in_header = messages is not None
        self._begins = Delimiters((messages.head_end,) if messages else (reasoning.begin,) if reasoning else ())
        self._ends = Delimiters(tuple(sorted(messages.ends)) if messages else (reasoning.end,) if reasoning else ())
        self._longest = max(map(len, (*self._begins.texts, *self._ends.texts)), default=1)
        self._text = ""  # text since the last delimiter
        self._starts: list[int] = []  # start index of each token in it
        self._num_ended = 0

    @property
    def count(self) -> int:
        """Number of reasoning tokens so far."""
        return self._num_ended + (len(self._starts) if self._in_reasoning and not self._in_header else 0)

    def push(self, token_ids: Sequence[int]) -> None:
        """Read the message's next tokens."""
        for token_id in token_ids:
            self._starts.append(len(self._text))
            seen = max(0, len(self._text) - self._longest)
            self._text += self._stream.push(token_id)
            while (found := self._delimiters.search(self._text, seen)) is not None:
                self._pass(found)
                seen = 0
            if len(self._text) > _MAX_KEPT_CHARS:  # no further delimiter can begin in the dropped text
                end = len(self._text) - self._longest
                self._count_before(end)
                self._drop(end)

    @property
    def _delimiters(self) -> re.Pattern[str]:
        """Regular expression for the next delimiter: one that ends the current part, or begins the next."""
        is_inside = self._in_reasoning if self._format.messages is None else not self._in_header
        return (self._ends if is_inside else self._begins).pattern

    def _pass(self, found: re.Match[str]) -> None:
        """Count the reasoning before a delimiter, drop the text, and note whether reasoning follows."""
        messages, end = self._format.messages, found.end()
        self._count_before(found.start())
        if messages is None:
            self._in_reasoning = not self._in_reasoning
        elif self._in_header:
            channel = messages.channel(self._text[: found.start()])
            self._in_header, self._in_reasoning = False, channel in messages.reasoning_channels
        else:
            self._in_header, self._in_reasoning = True, False
            end = found.start()  # it may belong to the next header
        self._drop(end)

    def _count_before(self, end: int) -> None:
        """Count the tokens that begin before index `end` of the kept text, if they are reasoning."""
        if self._in_reasoning and not self._in_header:
            self._num_ended += sum(start < end for start in self._starts)

    def _drop(self, end: int) -> None:
        """Drop the kept text before index `end`, and the tokens that begin in it."""
        self._text = self._text[end:]
        self._starts = [start - end for start in self._starts if start >= end]
