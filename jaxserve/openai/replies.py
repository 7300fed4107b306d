"""AnyReply, the interface of all replies, and Reply: OpenAI's replies for completions and chats, whole or streamed.

Both are built from increments: a whole reply has one increment with everything. So however a stream is cut, its
parts add up to the whole reply.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

from jaxserve import __version__
from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.openai.errors import error_body
from jaxserve.openai.logprob_objects import LogprobObjects
from jaxserve.openai.message_deltas import Content, DeltaReader, MessageDelta, delta_json, whole_message
from jaxserve.openai.reasoning_tokens import ReasoningTokens
from jaxserve.text.token_texts import hidden_ids, new_stream, text_offsets

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig
    from jaxserve.api.outputs import Logprob, RequestOutput
    from jaxserve.errors import RequestError
    from jaxserve.openai.errors import Json
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class AnyReply(ABC):
    """Reply to one HTTP request, whole or as server-sent events. Subclasses without a stream have only `body`.

    Attributes:
        num_events: numbered events sent so far; 0 if events have no numbers.
    """

    num_events = 0

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as a JSON object.

        Args:
            outputs: ended outputs, one for each prompt and in their order.
        """

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply with iterators in place of long lists, so that these never exist as a whole."""
        return self.body(outputs)

    def first_events(self) -> Iterator[bytes]:
        """Yield the encoded events that begin a stream, before any output."""
        yield from ()

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the encoded events for new parts of an output.

        Args:
            number: index of the prompt.
            output: output of that prompt so far.
            increments: its parts that have not been sent.
        """
        yield from ()

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the encoded events that end a stream after all `outputs` have ended."""
        yield from ()

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the encoded events that end a failed stream."""
        yield from ()


class Reply(AnyReply):
    """OpenAI's reply to one completion or chat request; other interfaces' replies are made from its parts.

    Args:
        request: the request.
        tokenizer: the model's tokenizer; None if requests have token ids.
        response_id: name of the reply.
        created_s: arrival time, in seconds since 1970.
        fingerprint: name of the engine's configuration, from `system_fingerprint`.

    Attributes:
        request, response_id, created_s: the arguments.
        kv_transfer_params: for the server that continues; None without a transfer.
        logprobs: writes log probabilities.
    """

    def __init__(
        self,
        request: ParsedRequest,
        tokenizer: Tokenizer | None,
        *,
        response_id: str,
        created_s: int,
        fingerprint: str | None = None,
    ) -> None:
        self.request, self.response_id, self.created_s = request, response_id, created_s
        self._tokenizer = tokenizer
        self.kv_transfer_params: Json | None = None
        self._head: Json = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{response_id}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": created_s,
            "model": request.model,
            "system_fingerprint": fingerprint,
        }
        self._readers: dict[int, DeltaReader] = {}  # keys are choices
        self._reasoning_counters: dict[int, ReasoningTokens] = {}  # keys are choices
        self.logprobs = LogprobObjects(request, tokenizer)
        self._num_sent: dict[int, int] = {}  # sent tokens by choice
        self._begun: set[int] = set()  # choices with a first part sent
        # JSON parts of chunks, which are joined rather than encoded each time
        chunk = self._head | {"object": "chat.completion.chunk" if request.is_chat else "text_completion"}
        self._chunk_head = json.dumps(chunk)[:-1] + ', "choices": [{"index": '
        self._text_head, closed = (', "delta": {"content": ', "}") if request.is_chat else (', "text": ', "")
        self._usage_tail = usage = ', "usage": null' if request.include_usage else ""
        unset = "" if request.is_chat else ', "stop_reason": null, "prompt_token_ids": null'
        self._text_tail = f'{closed}, "logprobs": null, "finish_reason": null{unset}, "token_ids": null}}]{usage}}}\n\n'
        self._is_plain = not (request.return_token_ids or request.continuous_usage or request.echo)

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as OpenAI's JSON object; all outputs have ended."""
        return self._whole(list(self._choices(outputs)), outputs)

    def lazy_body(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply as OpenAI's JSON object, with iterators for choices and log probabilities."""
        self.logprobs.listed = iter
        choices = self._choices(outputs)
        return self._whole(list(choices) if self.request.is_chat else choices, outputs)

    def _whole(self, choices: Iterable[Json], outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole reply around its `choices`, which a chat's usage has counted."""
        return self._head | {"choices": choices, "usage": self.usage(outputs)} | self._extensions(outputs)

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[Json]:
        """Yield the `choices` of a whole reply: one for each completion of each output."""
        for number, output in enumerate(outputs):
            for increment in OutputReader(output).read():
                choice = self._choice(number, output, increment)
                if self.request.is_chat:
                    message: Json = {"reasoning": None} | whole_message(self.read(choice["index"], increment))
                    message["role"] = self.request.role
                    if echoed := self.request.echoed:
                        message["content"] = echoed + (message["content"] or "")
                    choice["message"] = message
                    choice["finish_reason"] = self.reader(choice["index"]).finish_reason(increment)
                else:
                    choice["prompt_logprobs"] = self.logprobs.prompt(output)
                yield choice

    def _extensions(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the further fields of vLLM's whole replies: metrics, and a chat's prompt with log probabilities."""
        fields: Json = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params"))
        fields["kv_transfer_params"] = self.kv_transfer_params
        fields["metrics"] = _metrics(self.request, outputs)
        if self.request.is_chat:
            fields["prompt_logprobs"] = self.logprobs.prompt(outputs[0])
            fields |= _prompt_fields(self.request, outputs[0])
        return fields

    def usage(self, outputs: Iterable[RequestOutput]) -> Json:
        """Return OpenAI's `usage` object: numbers of prompt, cached, generated and reasoning tokens in `outputs`."""
        prompt_tokens = completion_tokens = 0
        cached_tokens = CachedTokens()
        for output in outputs:
            prompt_tokens += len(output.prompt_token_ids)
            cached_tokens += output.cached_tokens
            if self.request.has_output:
                completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        return self._usage(prompt_tokens, completion_tokens, cached_tokens, self._reasoning_counters.values())

    def _usage(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: CachedTokens,
        counters: Iterable[ReasoningTokens],
    ) -> Json:
        """Return OpenAI's `usage` object with these numbers of tokens; `counters` have counted the reasoning."""
        counts: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens.total},
        }
        if cached_tokens.loaded:  # no field of OpenAI's
            counts["prompt_tokens_details"]["cached_tokens_by_tier"] = asdict(cached_tokens)
        if self.request.is_chat:
            counts["completion_tokens_details"] = {"reasoning_tokens": sum(counter.count for counter in counters)}
        return counts

    def events(self, number: int, output: RequestOutput, increments: Iterable[Increment]) -> Iterator[bytes]:
        """Yield the encoded chunks for an output's new increments; `number` is the index of its prompt."""
        request, is_chat, is_plain = self.request, self.request.is_chat, self._is_plain
        for increment in increments:
            index = self._index(number, increment)
            if is_chat and index not in self._begun:
                self._begun.add(index)
                top = _prompt_fields(request, output)
                yield self._event(index, {"delta": {"role": request.role, "content": ""}} | _OPEN, output, top)
                if request.echoed:
                    yield self._event(index, {"delta": {"content": request.echoed}} | _OPEN, output)
            self._num_sent[index] = self._num_sent.get(index, 0) + len(increment.token_ids)
            deltas: list[MessageDelta] = self.read(index, increment) if is_chat else [Content(increment.text)]
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
            if is_chat:
                for delta in deltas[:-1]:
                    yield self._event(index, {"delta": delta_json(delta)} | _OPEN, output)
                choice["delta"] = delta_json(deltas[-1]) if deltas else {}
                choice["finish_reason"] = self.reader(index).finish_reason(increment)
            yield self._event(index, choice, output)

    def read(self, index: int, increment: Increment) -> list[MessageDelta]:
        """Return a chat increment's message deltas, and count its reasoning tokens; `index` is its choice."""
        deltas, tokenizer, form = self.reader(index).read(increment), self._tokenizer, self.request.form
        if form.chat_format is not None and tokenizer is not None:
            if index not in self._reasoning_counters:
                stream = new_stream(tokenizer, hidden_ids(tokenizer, self.request.params))
                self._reasoning_counters[index] = ReasoningTokens(
                    form.chat_format, stream, in_reasoning=form.in_reasoning
                )
            self._reasoning_counters[index].push(increment.token_ids)
        return deltas

    def reader(self, index: int) -> DeltaReader:
        """Return the reader for the message of the choice with this index, the same one at each call."""
        if index not in self._readers:
            self._readers[index] = self.request.form.reader(f"{self.response_id}-{index}")
        return self._readers[index]

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the encoded events that end the stream: token counts, if requested, and the end mark."""
        if self.request.include_usage:
            head = self._chunk_head.removesuffix('{"index": ')
            metrics = _metrics(self.request, outputs) or {}
            times = {name: value for name, value in metrics.items() if value is not None}
            more = f', "metrics": {json.dumps(times)}' if times else ""
            yield f'data: {head}], "usage": {json.dumps(self.usage(outputs))}{more}}}\n\n'.encode()
        yield DONE

    def error_events(self, error: RequestError) -> Iterator[bytes]:
        """Yield the encoded events that end a failed stream."""
        yield f"data: {json.dumps(error_body(error))}\n\n".encode()
        yield DONE

    def _event(self, index: int, fields: Json, output: RequestOutput, top: Json | None = None) -> bytes:
        """Encode a chunk with one choice.

        Args:
            index: index of the choice.
            fields: its other fields.
            output: output that it belongs to, for the token counts.
            top: further fields of the chunk itself.
        """
        usage = self._usage_tail
        if self.request.continuous_usage:
            num_sent = self._num_sent.get(index, 0) if self.request.has_output else 0
            counters = [self._reasoning_counters[index]] if index in self._reasoning_counters else []
            so_far = self._usage(len(output.prompt_token_ids), num_sent, output.cached_tokens, counters)
            usage = f', "usage": {json.dumps(so_far)}'
        more = f", {json.dumps(top)[1:-1]}" if top else ""
        return f"data: {self._chunk_head}{index}, {json.dumps(fields)[1:]}]{more}{usage}}}\n\n".encode()

    def _index(self, number: int, increment: Increment) -> int:
        """Return the index of an increment's choice among the choices of all prompts; `number` is its prompt's."""
        return number * self.request.params.n + increment.completion.index

    def _choice(self, number: int, output: RequestOutput, increment: Increment) -> Json:
        """Return the `choices` element for an increment of prompt `number`; a chat's still lacks its message."""
        request, index, completion = self.request, self._index(number, increment), increment.completion
        if request.is_chat:
            choice: Json = {"index": index, "logprobs": self.logprobs.chat(increment)}
        else:
            choice = {"index": index, **self._text_fields(index, output, increment)}
        reason = increment.finish_reason
        choice["finish_reason"] = "length" if reason and not request.has_output else reason
        choice["stop_reason"] = completion.stop_reason if reason is not None and request.has_output else None
        if not request.is_chat:
            is_first, has_ids = index not in self._begun, request.return_token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if has_ids and is_first else None
            self._begun.add(index)
        new_ids = increment.token_ids if request.has_output else []
        choice["token_ids"] = new_ids if request.return_token_ids else None
        return choice

    def _text_fields(self, index: int, output: RequestOutput, increment: Increment) -> Json:
        """Return a completion increment's fields `text` and `logprobs`; an echoed prompt comes first in both."""
        request, tokenizer = self.request, self._tokenizer
        text, token_ids = increment.text, increment.token_ids
        tables: Iterable[dict[int, Logprob] | None] | None = increment.logprobs
        if not request.has_output:
            text, token_ids, tables = "", [], None if tables is None else []
        offsets: list[int] = []
        if request.echo and index not in self._begun:
            prompt = self._prompt_text(output)
            text = prompt + text
            self.logprobs.begin(index, len(prompt))
            if tables is not None and output.prompt_tables is not None:
                prompt_ids, keeps_first = output.prompt_token_ids, request.params.truncation_side == "right"
                offsets = [0] * len(prompt_ids)
                if tokenizer is not None:
                    offsets = text_offsets(tokenizer, prompt, prompt_ids, keeps_first=keeps_first)
                token_ids, tables = prompt_ids + token_ids, itertools.chain(output.prompt_tables, tables)
        return {"text": text, "logprobs": self.logprobs.completion(index, token_ids, tables, offsets)}

    def _prompt_text(self, output: RequestOutput) -> str:
        """Return an output's prompt as text; empty if it was given as token ids and there is no tokenizer."""
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


_OPEN: Json = {"logprobs": None, "finish_reason": None, "token_ids": None}


def _prompt_fields(request: ParsedRequest, output: RequestOutput) -> Json:
    """Return vLLM's fields about the prompt, for a whole chat reply or a choice's first chunk."""
    token_ids = output.prompt_token_ids if request.return_token_ids else None
    return {"prompt_token_ids": token_ids, "prompt_text": request.prompt_text}


def _metrics(request: ParsedRequest, outputs: Sequence[RequestOutput]) -> Json | None:
    """Return vLLM's `metrics` object, with times in ms; None unless requested, and with several completions.

    The time to the first token begins with the first step, and not with the arrival.
    """
    if not request.shows_metrics or len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return None
    metrics = outputs[0].outputs[0].metrics
    first_s, last_s, scheduled_s = metrics.first_token_s, metrics.last_token_s, metrics.scheduled_s
    total_s = None if scheduled_s is None or last_s is None else last_s - scheduled_s
    times_s = {
        "time_to_first_token_ms": metrics.prefill_s,
        "generation_time_ms": None if first_s is None or last_s is None else last_s - first_s,
        "queue_time_ms": metrics.queue_s,
        "mean_itl_ms": metrics.tpot_s,
    }
    times: Json = {name: None if value is None else value * 1e3 for name, value in times_s.items()}
    return times | {"tokens_per_second": metrics.num_output_tokens / total_s if total_s else None}


def system_fingerprint(config: EngineConfig) -> str:
    """Return a short hash of jaxserve's version and the engine options; `engine_process` does not count."""
    digest = hashlib.blake2b(f"{__version__} {replace(config, engine_process=False)!r}".encode(), digest_size=5)
    return f"fp_{digest.hexdigest()}"
