"""Resumption: how a stream is sent so that it can move, and how it continues when it has moved here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.api.stream_events import Increment
from jaxserve.core.prompt import outside_vocabulary
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.resumption import FIELD, Delivered, DeliveredSample, part_comment

if TYPE_CHECKING:
    from jaxserve.api.outputs import CompletionOutput, RequestOutput
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.openai.replies import AnyReply
    from jaxserve.scheduling.request import Request
    from jaxserve.server.streams import Starts


@dataclass(slots=True)
class Resumption:
    """Resumption of a stream, here or later on another server.

    Attributes:
        delivered: part that the client has got from another server; None for a stream that begins here.
        starts: delivered characters and tokens by sample, for each prompt.
    """

    delivered: Delivered | None
    starts: Sequence[Starts] | None = None
    _pending: dict[tuple[int, int], DeliveredSample] = field(default_factory=dict)  # not yet passed over

    @classmethod
    def begin(
        cls, request: ParsedRequest, groups: Sequence[RequestGroup], delivered: Delivered | None, vocab_size: int
    ) -> Resumption | None:
        """Give the tokens that a client has got to the groups, which are about to start.

        A sample that has ended, or that a grammar constrains, samples its last token again: this ends it, or allows
        the grammar to end it, here as well.

        Returns:
            None if the stream cannot move: it has log probabilities, which only the first server knows, or no tokens.

        Raises:
            BadRequestError: no stream of this request has such a part.
        """
        params = request.params
        structure = params.structured_outputs
        is_forced = structure is not None and structure.append_forced_tokens
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if not request.stream or request.pooling is not None or has_logprobs or is_forced:
            if delivered is not None:
                raise BadRequestError(f"{FIELD} needs a stream without log probabilities or forced tokens", FIELD)
            return None
        if delivered is None:
            return cls(None)
        starts: list[dict[int, tuple[int, int]]] = [{} for _ in groups]
        for (number, index), sample in delivered.samples.items():
            if number >= len(groups) or index >= len(groups[number].requests):
                message = f"{FIELD} must have prompts and samples of the request, got prompt {number}, sample {index}"
                raise BadRequestError(message, FIELD)
            is_again = sample.is_ended or structure is not None
            ids = sample.token_ids[:-1] if is_again else sample.token_ids
            _check_ids(groups[number].requests[index], ids, vocab_size)
            groups[number].continue_from(index, ids)
            starts[number][index] = sample.num_chars, len(sample.token_ids)
        return cls(delivered, starts, dict(delivered.samples))

    def first_events(self, reply: AnyReply) -> Iterator[bytes]:
        """Yield the events that begin the stream, none if it began elsewhere, and the comment after them."""
        if self.delivered is None:
            yield from reply.first_events()
        else:
            _drop(reply.first_events())
            reply.num_events = self.delivered.num_events
        yield part_comment(reply.num_events)

    def events(
        self, reply: AnyReply, number: int, output: RequestOutput, increments: Sequence[Increment]
    ) -> Iterator[bytes]:
        """Yield the events for new parts of an output that the client has not got, and the comment after them.

        Raises:
            BadRequestError: the samples differ from the delivered ones.
        """
        new: list[Increment] = []
        for each in increments:
            sample = self._pending.pop((number, each.completion.index), None)
            if sample is not None:
                self._pass_over(reply, number, output, each.completion, sample)
            if sample is None or not sample.is_ended:
                new.append(each)
        if new:
            yield from reply.events(number, output, new)
            yield part_comment(reply.num_events, number, new)

    def _pass_over(
        self, reply: AnyReply, number: int, output: RequestOutput, completion: CompletionOutput, sample: DeliveredSample
    ) -> None:
        """Let the reply make the events for a sample's delivered part, and send none."""
        ids, reason = list(completion.token_ids), completion.finish_reason if sample.is_ended else None
        is_same = ids[: len(sample.token_ids)] == sample.token_ids
        if not is_same or (sample.is_ended and (reason is None or len(ids) > len(sample.token_ids))):
            message = f"{FIELD} must have the tokens that are sampled here, got others among {len(sample.token_ids)}"
            raise BadRequestError(message, FIELD, "resumed_differently", 409)
        text = completion.text[: sample.num_chars]
        num_events = reply.num_events
        _drop(reply.events(number, output, [Increment(completion, text, sample.token_ids, None, reason)]))
        reply.num_events = num_events


def _check_ids(request: Request, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise BadRequestError for delivered tokens of a sample that are outside the vocabulary or would have ended it."""
    if token_ids and max(token_ids) >= vocab_size:
        raise BadRequestError(outside_vocabulary(FIELD, token_ids, vocab_size), FIELD)
    is_full = request.num_prompt_tokens + len(token_ids) >= request.max_total_tokens
    if is_full or not request.stop_ids.isdisjoint(token_ids[request.params.min_tokens :]):
        message = f"{FIELD} must have tokens after which a sample continues, got {len(token_ids)} that end it"
        raise BadRequestError(message, FIELD)


def _drop(events: Iterator[bytes]) -> None:
    """Make events and send none of them."""
    for _ in events:
        pass
