"""Replies in OpenAI's form, whole or streamed.

Both are made of the same increments of the outputs: a whole reply is the one whose only increment is everything. So
however a stream is cut, its parts add up to the whole reply.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

from jaxserve.increments import Increment, OutputReader
from jaxserve.openai.deltas import Content, Delta, DeltaReader, delta_json, whole_message
from jaxserve.openai.errors import error_body

if TYPE_CHECKING:
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.outputs import Logprob, RequestOutput
    from jaxserve.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Reply:
    """Reply to one request.

    Args:
        request: the request.
        tokenizer: tokenizer of the model; None if requests have token ids.
        response_id: name of the reply.
        created_s: time of the request, in seconds since 1970.
    """

    def __init__(
        self, request: ParsedRequest, tokenizer: Tokenizer | None, *, response_id: str, created_s: int
    ) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._head: Json = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{response_id}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": created_s,
            "model": request.model,
        }
        self._response_id = response_id
        self._readers: dict[int, DeltaReader] = {}  # readers by choice of a chat
        self._num_chars: dict[int, int] = {}  # characters of each choice so far, where log probabilities count them
        self._listed: Callable[[Iterator[Any]], Any] = list  # makes lists of log probabilities
        self._begun: set[int] = set()  # choices whose prompt has been echoed
        suffix = ".chunk" if request.is_chat else ""
        head = json.dumps(self._head | {"object": self._head["object"] + suffix})[:-1] + ', "choices": [{"index": '
        self._chunk_head = head
        kind, closed = ('"delta": {"content": ', "}") if request.is_chat else ('"text": ', "")
        self._text_head = f", {kind}"
        usage = ', "usage": null' if request.include_usage else ""
        self._text_tail = f'{closed}, "logprobs": null, "finish_reason": null}}]{usage}}}\n\n'
        self._usage_tail = usage
        self._is_plain = not (request.return_token_ids or request.continuous_usage or request.echo)

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply; `outputs`, one for each prompt and in their order, have ended."""
        return self._head | {"choices": list(self._choices(outputs)), "usage": self.usage(outputs)}

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the same with iterators in place of its long lists, so that it never exists as a whole."""
        self._listed = iter
        return self._head | {"choices": self._choices(outputs), "usage": self.usage(outputs)}

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[Json]:
        for number, output in enumerate(outputs):
            for increment in OutputReader(output).read():
                choice = self._choice(number, output, increment)
                if self._request.is_chat:
                    reader = self.reader(choice["index"])
                    choice["message"] = whole_message(reader.read(increment))
                    choice["finish_reason"] = reader.finish_reason(increment)
                if not self._request.echo and output.prompt_tables is not None:  # an echo has them among the others
                    choice["prompt_logprobs"] = self._listed(_prompt_logprobs(output.prompt_tables, self._tokenizer))
                yield choice

    def usage(self, outputs: Iterable[RequestOutput]) -> Json:
        """Return the counts of tokens so far."""
        prompt_tokens = completion_tokens = cached_tokens = 0
        for output in outputs:
            prompt_tokens += len(output.prompt_token_ids)
            cached_tokens += output.num_cached_tokens
            if self._request.has_output:
                completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def first_events(self) -> Iterator[bytes]:
        """Yield the events of a stream before there is any output: none."""
        yield from ()

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the server-sent events of what is new.

        Args:
            number: index of the prompt.
            output: output of that prompt.
            increments: its increments.
        """
        request, is_plain = self._request, self._is_plain
        for increment in increments:
            index = number * request.params.n + increment.completion.index
            reader = self._readers.get(index)
            if reader is None and request.is_chat:
                reader = self.reader(index)
                yield self._event(index, {"delta": {"role": "assistant", "content": ""}} | _OPEN, output)
            deltas: list[Delta] = [Content(increment.text)] if reader is None else reader.read(increment)
            if is_plain and increment.logprobs is None and increment.finish_reason is None:  # nearly always
                for delta in deltas:
                    if type(delta) is not Content:
                        yield self._event(index, {"delta": delta_json(delta)} | _OPEN, output)
                    elif delta.text:
                        text = encode_basestring_ascii(delta.text)  # `json.dumps` comes to the same
                        yield f"data: {self._chunk_head}{index}{self._text_head}{text}{self._text_tail}".encode()
                continue
            choice = self._choice(number, output, increment)
            del choice["index"]
            if reader is not None:
                for delta in deltas[:-1]:
                    yield self._event(index, {"delta": delta_json(delta)} | _OPEN, output)
                choice["delta"] = delta_json(deltas[-1]) if deltas else {}
                choice["finish_reason"] = reader.finish_reason(increment)
            yield self._event(index, choice, output)

    def reader(self, index: int) -> DeltaReader:
        """Return the reader of a choice of a chat."""
        if index not in self._readers:
            self._readers[index] = self._request.form.reader(f"{self._response_id}-{index}")
        return self._readers[index]

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the events that end a stream."""
        if self._request.include_usage:
            head = self._chunk_head.removesuffix('{"index": ')
            yield f'data: {head}], "usage": {json.dumps(self.usage(outputs))}}}\n\n'.encode()
        yield DONE

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events that end a stream in which the request has failed."""
        yield f"data: {json.dumps(error_body(error))}\n\n".encode()
        yield DONE

    def _event(self, index: int, fields: Json, output: RequestOutput) -> bytes:
        usage = self._usage_tail
        if self._request.continuous_usage:
            usage = f', "usage": {json.dumps(self.usage([output]))}'
        return f"data: {self._chunk_head}{index}, {json.dumps(fields)[1:]}]{usage}}}\n\n".encode()

    def _index(self, number: int, increment: Increment) -> int:
        return number * self._request.params.n + increment.completion.index

    def _choice(self, number: int, output: RequestOutput, increment: Increment) -> Json:
        """Return a choice of a chunk or of a whole reply; that of a chat still lacks its delta or message."""
        request, index, completion = self._request, self._index(number, increment), increment.completion
        if request.is_chat:
            choice: Json = {"index": index, "logprobs": self.chat_logprobs(increment)}
        else:
            text, token_ids = increment.text, increment.token_ids
            tables: Iterable[dict[int, Logprob] | None] | None = increment.logprobs
            if not request.has_output:
                text, token_ids, tables = "", [], None if tables is None else []
            if request.echo and index not in self._begun:
                self._begun.add(index)
                text = self._prompt_text(output) + text
                if tables is not None and output.prompt_tables is not None:
                    token_ids = output.prompt_token_ids + token_ids
                    tables = itertools.chain(output.prompt_tables, tables)
            hides_special = request.params.skip_special_tokens and output.prompt is not None
            logprobs = self._logprobs(index, token_ids, tables, hides_special=hides_special)
            choice = {"index": index, "text": text, "logprobs": logprobs}
        reason = increment.finish_reason
        choice["finish_reason"] = "length" if reason and not request.has_output else reason
        if reason is not None:
            choice["stop_reason"] = completion.stop_reason if request.has_output else None
        if request.return_token_ids:
            choice["token_ids"] = increment.token_ids if request.has_output else []
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        tables: Iterable[dict[int, Logprob] | None] | None,
        *,
        hides_special: bool,
    ) -> Json | None:
        """Return the log probabilities of a completion's tokens; null for the first one of a prompt.

        Offsets count characters of the text, in which special tokens may be hidden.
        """
        if tables is None:
            return None
        hidden = self._tokenizer.special_ids if hides_special and self._tokenizer is not None else frozenset()
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets = [self._num_chars.get(index, 0)]
        for token_id, table in zip(token_ids, tables, strict=True):  # tables are large, and are read one at a time
            entry = None if table is None else table[token_id]
            tokens.append(self._text(token_id, entry))
            token_logprobs.append(None if entry is None else entry.logprob)
            top_logprobs.append(None if table is None else self._by_text(table))
            length = 0 if token_id in hidden else len(_token_text(token_id, entry, self._tokenizer))
            offsets.append(offsets[-1] + length)
        self._num_chars[index] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _by_text(self, table: Mapping[int, Logprob]) -> dict[str, float]:
        """Return log probabilities by text; of tokens with equal text, such as parts of a character, the likeliest."""
        best: dict[str, float] = {}
        for token_id, entry in _ranked(table):
            best.setdefault(self._text(token_id, entry), entry.logprob)
        return best

    def chat_logprobs(self, increment: Increment) -> Json | None:
        """Return the log probabilities of a chat's new tokens; None unless requested."""
        if increment.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        top = slice(num_top if num_top >= 0 else None)
        content = (
            self._chat_token(token_id, table[token_id])
            | {"top_logprobs": [self._chat_token(i, entry) for i, entry in _ranked(table)[top]]}
            for token_id, table in zip(increment.token_ids, increment.logprobs, strict=True)
        )
        return {"content": self._listed(content), "refusal": None}

    def _chat_token(self, token_id: int, entry: Logprob) -> Json:
        text, tokenizer = _token_text(token_id, entry, self._tokenizer), self._tokenizer
        data = tokenizer.byte_table[token_id] if tokenizer is not None and tokenizer.byte_table else text.encode()
        return {"token": self._text(token_id, entry), "logprob": entry.logprob, "bytes": list(data)}

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if self._request.tokens_as_ids:
            return f"token_id:{token_id}"
        return _token_text(token_id, entry, self._tokenizer)


_OPEN: Json = {"logprobs": None, "finish_reason": None}


def _token_text(token_id: int, entry: Logprob | None, tokenizer: Tokenizer | None) -> str:
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _ranked(table: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(table.items(), key=lambda item: item[1].rank)


def _prompt_logprobs(tables: Iterable[dict[int, Logprob] | None], tokenizer: Tokenizer | None) -> Iterator[Json | None]:
    """Yield vLLM's extension: by position, log probability, rank and text by token id; null at the first position."""

    def described(table: Mapping[int, Logprob]) -> Json:
        return {
            str(i): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": _token_text(i, entry, tokenizer)}
            for i, entry in table.items()
        }

    return (None if table is None else described(table) for table in tables)
