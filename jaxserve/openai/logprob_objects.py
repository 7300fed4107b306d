"""LogprobObjects: log probabilities as OpenAI's and vLLM's JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.api.stream_events import Increment
from jaxserve.text.token_texts import hidden_ids

if TYPE_CHECKING:
    from jaxserve.api.outputs import Logprob, RequestOutput
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.text.tokenizer import Tokenizer


class LogprobObjects:
    """Log probabilities in the reply to one completion or chat request.

    Args:
        request: the request.
        tokenizer: the model's tokenizer; None if requests have token ids.

    Attributes:
        listed: makes a list or an iterator of a position's objects, which can be many.
    """

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer | None) -> None:
        self.listed: Callable[[Iterator[Any]], Any] = list
        self._request, self._tokenizer = request, tokenizer
        self._num_chars: dict[int, int] = {}  # text length by choice, for text offsets

    def begin(self, index: int, num_chars: int) -> None:
        """Let the text of the choice with this index begin with `num_chars` characters of an echoed prompt."""
        self._num_chars[index] = num_chars

    def completion(
        self,
        index: int,
        token_ids: Sequence[int],
        tables: Iterable[dict[int, Logprob] | None] | None,
        prompt_offsets: Sequence[int],
    ) -> Json | None:
        """Return OpenAI's `logprobs` object for new tokens of a completion; None unless requested.

        Offsets are indices in the reply's text, in which special tokens may be hidden. A stop string's tokens have
        offsets as if it was kept: it may be cut off only after parts were sent.

        Args:
            index: index of the choice.
            token_ids: the tokens, an echoed prompt's first.
            tables: log probabilities by token id, one table per token; None for a prompt's first token.
            prompt_offsets: text offsets of an echoed prompt's tokens.
        """
        if tables is None:
            return None
        hidden = frozenset[int]() if self._tokenizer is None else hidden_ids(self._tokenizer, self._request.params)
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        num_chars, offsets = self._num_chars.get(index, 0), list(prompt_offsets)
        for token_id, table in zip(token_ids, tables, strict=True):  # tables are large, and are read one at a time
            entry = None if table is None else table[token_id]
            tokens.append(self._text(token_id, entry))
            token_logprobs.append(None if entry is None else entry.logprob)
            top_logprobs.append(None if table is None else self._by_text(table))
            if len(tokens) > len(prompt_offsets):
                offsets.append(num_chars)
                if self._tokenizer is not None and token_id not in hidden:
                    num_chars += len(_token_text(token_id, entry, self._tokenizer))
        self._num_chars[index] = num_chars
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _by_text(self, table: Mapping[int, Logprob]) -> dict[str, float]:
        """Return one position's log probabilities by token text, in the order of `table`.

        If tokens have equal text, such as parts of a character, the first counts.
        """
        found: dict[str, float] = {}
        for token_id, entry in table.items():
            found.setdefault(self._text(token_id, entry), entry.logprob)
        return found

    def prompt(self, output: RequestOutput) -> Any:
        """Return vLLM's field `prompt_logprobs`: a list with one object per prompt token, None for the first one.

        An object has log probability, rank and text by token id.
        """
        tables, tokenizer = output.prompt_tables, self._tokenizer
        if tables is None or not self._request.shows_prompt_logprobs:  # an echo has them among the others
            return None

        def described(token_id: int, entry: Logprob) -> Json:
            text = _token_text(token_id, entry, tokenizer)
            return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": text}

        return self.listed(
            None if table is None else {str(i): described(i, entry) for i, entry in table.items()} for table in tables
        )

    def chat(self, increment: Increment) -> Json | None:
        """Return OpenAI's `logprobs` object for the new tokens of a chat; None unless requested."""
        if increment.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        top = slice(num_top if num_top >= 0 else None)

        def described(token_id: int, table: Mapping[int, Logprob]) -> Json:
            ranked = sorted(table.items(), key=lambda item: item[1].rank)[top]
            alternatives = [self._chat_token(i, entry) for i, entry in ranked]
            return self._chat_token(token_id, table[token_id]) | {"top_logprobs": alternatives}

        tokens = zip(increment.token_ids, increment.logprobs, strict=True)
        return {"content": self.listed(described(*token) for token in tokens), "refusal": None}

    def _chat_token(self, token_id: int, entry: Logprob) -> Json:
        """Return one token's text, log probability and UTF-8 bytes, as in a chat's `logprobs` object."""
        text, tokenizer = _token_text(token_id, entry, self._tokenizer), self._tokenizer
        data = tokenizer.byte_table[token_id] if tokenizer is not None and tokenizer.byte_table else text.encode()
        return {"token": self._text(token_id, entry), "logprob": entry.logprob, "bytes": list(data)}

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        """Return a token's name in log probabilities: its text, or "token_id:7" if the request wants ids."""
        if self._request.tokens_as_ids:
            return f"token_id:{token_id}"
        return _token_text(token_id, entry, self._tokenizer)


def _token_text(token_id: int, entry: Logprob | None, tokenizer: Tokenizer | None) -> str:
    """Return a token's text: decoded in its context if `entry` has that, in isolation otherwise."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)
